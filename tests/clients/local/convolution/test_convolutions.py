"""The hand-made convolutions of the CPU engines against autograd in double precision."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from steelyard.clients.local.convolution.first import FirstConvolution
from steelyard.clients.local.convolution.pooled import (
    LibraryConvolution,
    PooledConvolution,
    corners_of,
    largest,
    send_back,
)
from steelyard.clients.local.convolution.winograd import TILE, WinogradConvolution, transforms


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


def test_the_way_with_fewer_products_keeps_float32_errors() -> None:
    draw = torch.Generator().manual_seed(3)
    seen = torch.randn(10, 14, 14, 32, generator=draw).relu()
    kernels = 0.03 * torch.randn(64, 800, generator=draw)
    slope = torch.randn(10, 7, 7, 64, generator=draw)
    expected = reference(seen, kernels, 5, slope)
    convolution = WinogradConvolution(5)
    found = (convolution.forward(seen, kernels), *convolution.backward(slope))
    for mine, theirs in zip(found, expected, strict=True):
        assert apart(mine, theirs) < 1e-5


@pytest.mark.parametrize("kernel", [3, 5])
def test_minimal_filtering_is_a_correlation(kernel: int) -> None:
    moves = transforms(kernel)
    side = kernel + TILE - 1
    draw = torch.Generator().manual_seed(kernel)
    tile = torch.randint(-4, 5, (side, side), generator=draw).double()
    taps = torch.randint(-4, 5, (kernel, kernel), generator=draw).double()
    products = (moves.filters.double() @ taps.flatten()) * (moves.inputs.double() @ tile.flatten())
    found = (moves.outputs.double() @ products).view(TILE, TILE)
    expected = functional.conv2d(tile[None, None], taps[None, None])[0, 0]
    # The transforms are stored in float32.
    assert found.allclose(expected, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 4),
    height=st.integers(2, 11),
    width=st.integers(2, 11),
    depth=st.integers(1, 3),
    side=st.sampled_from([1, 3, 5, 7]),
    seed=st.integers(0, 1000),
)
def test_the_first_convolution_gives_what_autograd_gives(
    count: int, height: int, width: int, depth: int, side: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(count, depth, height, width, generator=draw)
    kernels, bias = torch.randn(4, side * side * depth, generator=draw), torch.randn(4, generator=draw)
    slope = torch.randn(count, height // 2, width // 2, 4, generator=draw)
    assume(not undecided(images.permute(0, 2, 3, 1), kernels, side))
    pooled, _, at_kernels = reference(images.permute(0, 2, 3, 1), kernels, side, slope)
    first = FirstConvolution((depth, height, width), side, 4)
    more = torch.cat([images, images[:1]])  # a part of a larger batch, as steps take them, and a smaller one after it
    split = first.split(more)
    first.forward(split, kernels, bias)
    rows = first.forward(split[: len(images)], kernels, bias)
    assert apart(rows, (pooled + bias).relu().flatten(0, 2)) < 1e-5
    assert apart(first.backward(slope.flatten(0, 2)), at_kernels) < 1e-5


def test_of_equals_the_first_corner_gets_the_slope() -> None:
    image = torch.tensor([[1.0, 5.0, 2.0, 2.0, 9.0], [5.0, 0.0, 2.0, 2.0, 9.0]]).view(1, 2, 5, 1)
    corners = corners_of(image)
    top = largest(corners)
    assert top.flatten().tolist() == [5, 2]
    for corner in corners:
        corner.eq_(top)
    send_back(torch.tensor([3.0, 4.0]).view(1, 1, 2, 1), corners)
    assert image.view(2, 5).tolist() == [[0, 3, 4, 0, 9], [0, 0, 0, 0, 9]]
