"""Convolutions by hand, and layers for stacks of clients, against what torch computes and takes the slope of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.clients.local import engine_cases as cases
from torch import nn
from torch.nn import functional

from steelyard.clients.local.convolution import windows
from steelyard.clients.local.convolution.pooled import (
    LibraryConvolution,
    PooledConvolution,
    corners_of,
    largest,
    send_back,
)
from steelyard.clients.local.convolution.winograd import WinogradConvolution
from steelyard.clients.local.layers.convolution import StackedConvolution, StackedLinear, beside
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


def undecided(images: torch.Tensor, kernels: torch.Tensor, side: int) -> bool:
    """Whether two numbers of a window are as good as equal: rounding decides then which of them gets the gradient."""
    grid = kernels.double().view(len(kernels), side, side, -1).permute(0, 3, 1, 2)
    raw = functional.conv2d(images.double().permute(0, 3, 1, 2), grid, padding=side // 2)
    first, second = raw.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4).topk(2).values.unbind(-1)
    return float((first - second).min()) < 1e-4


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-9))


@pytest.mark.parametrize("make", [LibraryConvolution, WinogradConvolution])
@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 4),
    height=st.integers(2, 13),
    width=st.integers(2, 13),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    side=st.sampled_from([3, 5]),
    seed=st.integers(0, 1000),
)
def test_pooled_convolutions_give_what_autograd_gives(
    make: type, count: int, height: int, width: int, channels: tuple[int, int], side: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    convolution: PooledConvolution = make(side)
    for images in range(count, 0, -1):  # a smaller batch after a larger one uses the same memory again
        seen = torch.randn(images, height, width, channels[0], generator=draw)
        kernels = torch.randn(channels[1], side * side * channels[0], generator=draw)
        slope = torch.randn(images, height // 2, width // 2, channels[1], generator=draw)
        assume(not undecided(seen, kernels, side))
        pooled, at_images, at_kernels = reference(seen, kernels, side, slope)
        assert apart(convolution.forward(seen, kernels), pooled) < 2e-5
        back = convolution.backward(slope)
        assert apart(back[0], at_images) < 5e-5
        assert apart(back[1], at_kernels) < 5e-5


def test_of_equals_the_first_corner_gets_the_slope() -> None:
    image = torch.tensor([[1.0, 5.0, 2.0, 2.0, 9.0], [5.0, 0.0, 2.0, 2.0, 9.0]]).view(1, 2, 5, 1)
    corners = corners_of(image)
    top = largest(corners)
    assert top.flatten().tolist() == [5, 2]
    for corner in corners:
        corner.eq_(top)
    send_back(torch.tensor([3.0, 4.0]).view(1, 1, 2, 1), corners)
    assert image.view(2, 5).tolist() == [[0, 3, 4, 0, 9], [0, 0, 0, 0, 9]]


def test_pool_and_its_way_back_are_torchs() -> None:
    raw = torch.randint(-3, 4, (6, 9, 7, 5)).float()  # many ties: the first of the largest wins, as in torch
    bias = torch.tensor([[0.0, 1, -1, 0, 2], [1.0, 0, 0, -2, 0]])
    leaf = raw.clone().requires_grad_()
    images = leaf.permute(0, 3, 1, 2) + bias.repeat_interleave(3, 0)[:, :, None, None]
    expected = torch.relu(torch.max_pool2d(images, 2)).permute(0, 2, 3, 1)
    pooled, codes = windows.pool(raw, bias)
    assert torch.equal(pooled, expected)
    slope = torch.randn_like(pooled)
    expected.backward(slope)
    assert torch.equal(windows.unpool(slope, codes, 9, 7), leaf.grad)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 5, 3, padding=1),
        nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(0, 2), bias=False),
        nn.Conv2d(3, 4, 3, dilation=2, padding="same"),
        nn.Conv2d(3, 4, 4, padding="same"),
        nn.Conv2d(3, 4, 5, padding="valid", stride=2),
        nn.Conv2d(3, 6, 1, stride=2),
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


def test_as_many_neighbours_as_fill_a_product() -> None:
    assert beside(6, 28) == 10  # three times ten for 28 columns
    assert beside(16, 32) == 4
    assert beside(16, 3) == 3  # no more than there are
    assert beside(64, 8) == beside(500, 8) == 1


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

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    unusual = nn.BatchNorm1d(2, momentum=None)
    module = nn.Sequential(Own(2, 2), hooked, unusual, nn.Linear(2, 2), nn.Conv2d(2, 2, 1, groups=2))
    kinds = [type(layer) for layer in stackable(module, products=True)]
    assert kinds == [Own, nn.Linear, nn.BatchNorm1d, StackedLinear, nn.Conv2d]
    assert [type(layer) for layer in module][3] is nn.Linear
    assert unmasked_norms(module)
    assert not unmasked_norms(cases.normed())
    assert type(stackable(nn.Linear(2, 2), products=True)) is StackedLinear
    assert type(stackable(nn.Linear(2, 2), products=False)) is nn.Linear
