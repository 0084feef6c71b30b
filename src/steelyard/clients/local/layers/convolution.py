"""Products and convolutions of one client, such that a stack of clients is one product of matrices for each.

`torch.func` maps torch's own convolution over clients as one of many groups, which leaves the matrix units idle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


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


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weightᵀ for x [..., inputs], in the arithmetic of the block around it."""
    if torch.is_autocast_enabled(x.device.type):
        short = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(short), weight.to(short)
    found: Any = Product.apply(x.reshape(-1, x.shape[-1]), weight)
    return found.view(*x.shape[:-1], len(weight))


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
        self.kernel, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        self.padding = _sides(layer)

    @staticmethod
    def takes(layer: nn.Conv2d) -> bool:
        """Whether this is a convolution that can be written so: one group, zeros around the image."""
        return layer.groups == 1 and layer.padding_mode == "zeros"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        windows = self._windows(functional.pad(x.permute(0, 2, 3, 1), (0, 0, *self.padding)))
        found = product(windows, self.weight.flatten(1))
        found = found if self.bias is None else found + self.bias.to(found.dtype)
        return found.permute(0, 3, 1, 2)

    def _windows(self, x: torch.Tensor) -> torch.Tensor:
        """Return [images, rows, columns, kernel · kernel · channels] of images [images, height, width, channels]."""
        (high, wide), (down, right), (far, apart) = self.kernel, self.stride, self.dilation
        rows = (x.shape[1] - far * (high - 1) - 1) // down + 1
        columns = (x.shape[2] - apart * (wide - 1) - 1) // right + 1
        parts: list[torch.Tensor] = []
        for i in range(0, far * high, far):
            band = x[:, i : i + down * (rows - 1) + 1 : down]
            parts += [band[:, :, j : j + right * (columns - 1) + 1 : right] for j in range(0, apart * wide, apart)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)


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
