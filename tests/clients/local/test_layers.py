"""Convolutions by hand, and layers for stacks of clients, against what torch computes and takes the slope of."""

from __future__ import annotations

import pytest
import torch
from tests.clients.local import engine_cases as cases
from torch import nn
from torch.nn import functional

from steelyard.clients.local.convolution.pooled import (
    LibraryConvolution,
    PooledConvolution,
    corners_of,
    largest,
    send_back,
)
from steelyard.clients.local.convolution.winograd import WinogradConvolution
from steelyard.clients.local.layers.convolution import StackedConvolution, StackedLinear
from steelyard.clients.local.layers.recurrent import StackedRecurrent
from steelyard.clients.local.layers.replacing import stackable, unmasked_norms


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


def test_of_equals_the_first_corner_gets_the_slope() -> None:
    image = torch.tensor([[1.0, 5.0, 2.0, 2.0, 9.0], [5.0, 0.0, 2.0, 2.0, 9.0]]).view(1, 2, 5, 1)
    corners = corners_of(image)
    top = largest(corners)
    assert top.flatten().tolist() == [5, 2]
    for corner in corners:
        corner.eq_(top)
    send_back(torch.tensor([3.0, 4.0]).view(1, 1, 2, 1), corners)
    assert image.view(2, 5).tolist() == [[0, 3, 4, 0, 9], [0, 0, 0, 0, 9]]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 5, 3, padding=1),
        nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(0, 2), bias=False),
        nn.Conv2d(3, 4, 4, dilation=2, padding="same"),
        nn.Conv2d(3, 4, 5, padding="valid", stride=2),
        nn.Linear(7, 4),
        nn.Linear(7, 4, bias=False),
    ],
    ids=str,
)
# What torch says of even kernels concerns its own copy of the rows, not what it computes.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_products_are_what_torch_computes(layer: nn.Module) -> None:
    stacked = StackedConvolution(layer) if isinstance(layer, nn.Conv2d) else StackedLinear(layer)  # type: ignore[arg-type]
    torch.manual_seed(1)
    x = torch.randn((2, 3, 9, 8) if isinstance(layer, nn.Conv2d) else (2, 5, 7), requires_grad=True)
    expected = layer(x)
    slope = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, *layer.parameters()], slope)
    found = stacked(x)
    assert torch.allclose(found, expected, atol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(found, [x, *stacked.parameters()], slope), wanted, strict=True):
        if theirs.shape == getattr(layer, "weight").shape and theirs.dim() == 4:  # noqa: B009
            theirs = theirs.permute(StackedConvolution.AXES)
        assert torch.allclose(mine, theirs, atol=1e-4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_cells_are_what_torch_computes(kind: type[nn.Module], depth: int, both: bool, first: bool) -> None:
    torch.manual_seed(1)
    layer = kind(3, 4, depth, batch_first=first, bidirectional=both, bias=not both)
    stacked = StackedRecurrent(layer)  # type: ignore[arg-type]
    x = torch.randn(2, 5, 3)
    samples = 2 if first else 5
    state = torch.randn(depth * (1 + both), samples, 4)
    for begin in (None, (state, -state) if kind is nn.LSTM else state):
        (expected, ends), (found, mine) = layer(x, hx=begin), stacked(x, hx=begin)
        assert torch.allclose(found, expected, atol=1e-6)
        mine, ends = (mine, ends) if kind is nn.LSTM else ((mine,), (ends,))
        assert all(torch.allclose(own, end, atol=1e-6) for own, end in zip(mine, ends, strict=True))


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
