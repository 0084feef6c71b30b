"""Pooling, with or without ReLU, its way back, and gathering of windows, in torch, for convolutions of stacked clients.

Images stand channels last: [images, height, width, channels]. On a GPU with Triton the package `kernels` does all this:
for convolutions that keep their border without writing windows out, for Keras' in one pass each.
"""

from __future__ import annotations

from math import prod

import torch
from torch.nn import functional

aten = torch.ops.aten
DEAD = 4
"""The code of a pooled number that ReLU cuts off; codes 0 to 3 say which of the four was the largest."""


def pool(raw: torch.Tensor, bias: torch.Tensor | None, *, rectified: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return relu(2×2 maximum + bias) and the codes of where each maximum was.

    `bias` is [clients, channels] for images that stand client by client. Adding a bias and cutting at 0 are monotone,
    so doing both after the maximum gives the same numbers from a quarter of the work. Without
    `rectified` nothing is cut.
    """
    width, channels = raw.shape[2:]
    pooled, where = aten.max_pool2d_with_indices(raw.permute(0, 3, 1, 2), [2, 2])
    pooled, where = pooled.permute(0, 2, 3, 1).contiguous(), where.permute(0, 2, 3, 1)
    if bias is not None:
        pooled.view(len(bias), -1, channels).add_(bias[:, None, :].to(raw.dtype))
    codes = (where // width % 2 * 2 + where % width % 2).to(torch.uint8)
    if not rectified:
        return pooled, codes
    pooled.relu_()
    return pooled, torch.where(pooled > 0, codes, DEAD)


def unpool(slope: torch.Tensor, codes: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Send each slope back to where its maximum was, and nowhere where ReLU cut it off."""
    count, rows, columns, channels = slope.shape
    spread = slope.new_zeros((count, height, width, channels))
    inner = spread[:, : 2 * rows, : 2 * columns].unflatten(1, (rows, 2)).unflatten(3, (columns, 2))
    for code in range(4):
        inner[:, :, code // 2, :, code % 2] = torch.where(codes == code, slope, 0)
    return spread


def windows(images: torch.Tensor, kernel: int, width: int, *, ones: bool = False, turned: bool = False) -> torch.Tensor:
    """Gather the kernel×kernel window around every position: [images · positions, width].

    Beyond the border are zeros; the rest is as in `inner_windows`. `turned` takes the windows back to front, which is
    what the way back through a convolution needs.
    """
    edge = kernel // 2
    padded = functional.pad(images, (0, 0, edge, edge, edge, edge))
    return inner_windows(padded, kernel, width, ones=ones, turned=turned)


def inner_windows(
    images: torch.Tensor, kernel: int, width: int, *, ones: bool = False, turned: bool = False
) -> torch.Tensor:
    """Gather the kernel×kernel windows that lie inside the images: [images · positions, width].

    Numbers beyond kernel² · channels are 0, except that `ones` puts a 1 right after them: a bias then is one more
    weight.
    """
    images = images.contiguous()
    count, height, columns, channels = images.shape
    taps = kernel * kernel * channels
    steps = images.stride()
    shape = (count, height - kernel + 1, columns - kernel + 1, kernel, kernel, channels)
    seen = images.as_strided(shape, (steps[0], steps[1], steps[2], steps[1], steps[2], 1))
    seen = seen.flip(3, 4) if turned else seen
    if taps == width:
        return seen.reshape(-1, width)
    out = images.new_zeros((prod(shape[:3]), width))
    out[:, :taps] = seen.reshape(-1, taps)
    if ones:
        out[:, taps] = 1
    return out
