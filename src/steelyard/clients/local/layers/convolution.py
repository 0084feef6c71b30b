"""Products and convolutions of one client, such that a stack of clients is one product of matrices for each.

`torch.func` maps torch's own convolution over clients as one of many groups, which leaves the matrix units idle.
"""

from __future__ import annotations

from itertools import product as product_of
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Sides = tuple[int, int]


class Product(torch.autograd.Function):
    """x @ wᵀ of x [rows, inputs] and w [outputs, inputs]; both gradients come in the layout of what they belong to."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return (slope @ weight) if ctx.needs_input_grad[0] else None, slope.t() @ x


ALIGNED = 8
"""Matrix units of a GPU take rows of so many numbers; cuBLAS multiplies others many times slower."""


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weightᵀ for x [..., inputs], in the arithmetic of the block around it."""
    if torch.is_autocast_enabled(x.device.type):
        short = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(short), weight.to(short)
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs)
    if x.is_cuda:
        outer, inner = -outputs % ALIGNED, -inputs % ALIGNED
        flat, weight = functional.pad(flat, (0, inner)), functional.pad(weight, (0, inner, 0, outer))
    found: Any = Product.apply(flat, weight)
    return found[:, :outputs].reshape(*x.shape[:-1], outputs)


class Windows(torch.autograd.Function):
    """[images, rows, columns, kernel · kernel · channels] of images [images, height, width, channels].

    Both ways are one pass over memory when compiled: torch's own gradient of overlapping views adds numbers one by one.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: torch.Tensor, kernel: Sides, stride: Sides, dilation: Sides
    ) -> torch.Tensor:
        (high, wide), (down, right), (far, apart) = kernel, stride, dilation
        views = x.unfold(1, far * (high - 1) + 1, down).unfold(2, apart * (wide - 1) + 1, right)
        return views[..., ::far, ::apart].permute(0, 1, 2, 4, 5, 3).flatten(3)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.kernel, ctx.stride, ctx.dilation = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (high, wide), (down, right), (far, apart) = ctx.kernel, ctx.stride, ctx.dilation
        _, height, width, channels = ctx.shape
        rows, columns = slope.shape[1:3]
        parts = slope.view(*slope.shape[:3], high, wide, channels)
        total = slope.new_zeros(ctx.shape)
        if ctx.dilation != (1, 1):
            for i, j in product_of(range(high), range(wide)):
                top, left, part = i * far, j * apart, parts[:, :, :, i, j]
                total[:, top : top + down * rows : down, left : left + right * columns : right] += part
            return total, None, None, None
        # Parts of windows as large as a step from one to the next lie side by side: each is added where it begins.
        for i, j in product_of(range(0, high, down), range(0, wide, right)):
            part = parts[:, :, :, i : i + down, j : j + right]
            part = functional.pad(part, (0, 0, 0, right - part.shape[4], 0, down - part.shape[3]))
            part = part.permute(0, 1, 3, 2, 4, 5).reshape(-1, rows * down, columns * right, channels)
            below, after = height - i - rows * down, width - j - columns * right
            total = total + functional.pad(part, (0, 0, j, after, i, below))
        return total, None, None, None


COLUMNS = 64
"""How wide a product is made on a GPU: its matrix units are idle for most of a narrower one."""


def beside(outputs: int, columns: int) -> int:
    """Return how many outputs of an image's row are taken as one, so that a product has some `COLUMNS`; all alike."""
    most = min(max(1, COLUMNS // outputs), columns)
    return ceil(columns / ceil(columns / most))


def banded(weight: torch.Tensor, count: int) -> torch.Tensor:
    """Return kernels [outputs, high, wide, channels] for so many neighbours in a row at once.

    A window that is `count` − 1 wider holds those of all; row (i, output) is the output's kernel from its column i on,
    with zeros elsewhere: [count · outputs, high · (wide + count − 1) · channels].
    """
    outputs, high, wide, channels = weight.shape
    # A row of zeros behind each copy of a kernel, one column too long, so that cut again each begins a column later.
    copies = functional.pad(weight, (0, 0, 0, count))[:, :, None].expand(-1, -1, count, -1, -1)
    cut = copies.reshape(outputs, high, -1)[..., : count * (wide + count - 1) * channels]
    return cut.view(outputs, high, count, -1).permute(2, 0, 1, 3).reshape(count * outputs, -1)


def convolve(images: torch.Tensor, weight: torch.Tensor, stride: Sides, dilation: Sides, count: int) -> torch.Tensor:
    """Return the convolution [images, rows, columns, outputs], `count` neighbours of a row in one row of the product.

    Images are [images, height, width, channels], weights [outputs, high, wide, channels]. Neighbours share most of
    their windows, so that fewer numbers are written out and the product is less narrow. Where `count` is more than 1,
    stride and dilation are 1.
    """
    outputs, high, wide, _ = weight.shape
    if count == 1:
        windows: Any = Windows.apply(images, (high, wide), stride, dilation)
        return product(windows, weight.flatten(1))
    columns = images.shape[2] - wide + 1
    images = functional.pad(images, (0, 0, 0, -columns % count))
    windows = Windows.apply(images, (high, wide + count - 1), (1, count), (1, 1))
    found = product(windows, banded(weight, count))
    return found.reshape(*found.shape[:2], -1, outputs)[:, :, :columns]


class StackedLinear(nn.Module):
    """nn.Linear as a `product`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias: nn.Parameter | None = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = product(x, self.weight)
        return found if self.bias is None else found + self.bias.to(found.dtype)


class StackedConvolution(nn.Module):
    """nn.Conv2d as a `product` over the windows of its images; images and weights stand channels last (`AXES`)."""

    AXES = (0, 2, 3, 1)
    """The axes of torch's weights [outputs, inputs, height, width] in the order in which they stand here."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().permute(self.AXES).contiguous(), layer.weight.requires_grad)
        self.bias = layer.bias
        self.stride: Any = layer.stride
        self.dilation: Any = layer.dilation
        self.padding = _sides(layer)

    @staticmethod
    def takes(layer: nn.Conv2d) -> bool:
        """Whether this is a convolution that can be written so: one group, zeros around the image."""
        return layer.groups == 1 and layer.padding_mode == "zeros"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        images = functional.pad(x.permute(0, 2, 3, 1), (0, 0, *self.padding))
        outputs, _, wide, _ = self.weight.shape
        plain = self.stride == self.dilation == (1, 1)
        count = beside(outputs, images.shape[2] - wide + 1) if plain and x.is_cuda else 1
        found = convolve(images, self.weight, self.stride, self.dilation, count)
        found = found if self.bias is None else found + self.bias.to(found.dtype)
        return found.permute(0, 3, 1, 2)


def _sides(layer: nn.Conv2d) -> tuple[int, int, int, int]:
    """Return the zeros to the left, to the right, above and below an image."""
    if layer.padding == "valid":
        return 0, 0, 0, 0
    if isinstance(layer.padding, str):
        # "same": one more to the right and below, where the kernel is even.
        (high, wide) = (d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
        return wide // 2, wide - wide // 2, high // 2, high - high // 2
    above, left = layer.padding
    return left, left, above, above
