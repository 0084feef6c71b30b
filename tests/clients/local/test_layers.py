"""Convolutions by hand, and layers for stacks of clients, against what torch computes and takes the slope of."""

from __future__ import annotations

import pytest
import torch
from tests.clients.local import engine_cases as cases
from torch import nn
from torch.nn import functional

from steelyard.clients.local.cnn.pooled import LibraryConvolution, PooledConvolution, WinogradConvolution
from steelyard.clients.local.layers import StackedLinear, stackable, unmasked_norms


def reference(
    images: torch.Tensor, kernels: torch.Tensor, side: int, slope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pooled convolution of [n, h, w, c] and its gradients, by autograd in float64."""
    seen, weights = images.double().requires_grad_(), kernels.double().requires_grad_()
    grid = weights.view(len(kernels), side, side, -1).permute(0, 3, 1, 2)
    raw = functional.conv2d(seen.permute(0, 3, 1, 2), grid, padding=side // 2)
    pooled = functional.max_pool2d(raw, 2).permute(0, 2, 3, 1)
    at_images, at_kernels = torch.autograd.grad((pooled * slope).sum(), (seen, weights))
    return pooled.detach(), at_images, at_kernels


@pytest.mark.parametrize("make", [LibraryConvolution, WinogradConvolution])
@pytest.mark.parametrize(
    ("count", "height", "width", "channels", "side"),
    [(1, 2, 2, (1, 1), 3), (3, 8, 8, (3, 4), 3), (2, 11, 9, (2, 5), 5), (4, 6, 13, (5, 6), 5), (2, 13, 4, (4, 2), 3)],
)
def test_pooled_convolutions_give_what_autograd_gives(
    make: type, count: int, height: int, width: int, channels: tuple[int, int], side: int
) -> None:
    draw = torch.Generator().manual_seed(height)
    convolution: PooledConvolution = make(side)
    for images in range(count, 0, -1):  # a smaller batch after a larger one uses the same memory again
        seen = torch.randn(images, height, width, channels[0], generator=draw)
        kernels = torch.randn(channels[1], side * side * channels[0], generator=draw)
        slope = torch.randn(images, height // 2, width // 2, channels[1], generator=draw)
        found = (convolution.forward(seen, kernels), *convolution.backward(slope))
        # Float32 sums of up to 125 products, and the numbers that Winograd's transforms add.
        for mine, theirs in zip(found, reference(seen, kernels, side, slope), strict=False):
            assert float((mine.double() - theirs).norm()) <= 5e-5 * float(theirs.norm())


def test_layers_of_a_users_own_stay_as_they_are() -> None:
    class Own(nn.Linear):
        pass

    hooked, unusual = nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)
    hooked.register_forward_hook(lambda *_: None)
    module = nn.Sequential(Own(2, 2), hooked, unusual, nn.Linear(2, 2), nn.Conv2d(2, 2, 1, groups=2))
    kinds = [type(layer) for layer in stackable(module, products=True)]
    assert kinds == [Own, nn.Linear, nn.BatchNorm1d, StackedLinear, nn.Conv2d]
    assert type(stackable(nn.Linear(2, 2), products=False)) is nn.Linear
    assert unmasked_norms(module)
    assert not unmasked_norms(cases.normed())
