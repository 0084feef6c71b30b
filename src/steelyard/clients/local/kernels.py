"""Small GPU kernels for what torch does in several passes: pooling with ReLU, its way back, and gathering of windows.

They need Triton, which comes with torch's CUDA builds; without it, or on a CPU, the same functions go through torch.
Images stand channels last: [images, height, width, channels].
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

aten = torch.ops.aten
DEAD = 4
"""The code of a pooled number that ReLU cuts off; codes 0 to 3 say which of the four was the largest."""
BLOCK = 1024

_triton: Any = None
with suppress(ImportError):
    _triton = import_module("steelyard.clients.local.triton_kernels")


def ready(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels can take this tensor (its interpreter takes CPU tensors too; the tests use it)."""
    return _triton is not None and (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def pool(raw: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return relu(2×2 maximum + bias) and the codes of where each maximum was.

    `bias` is [clients, channels] for images that stand client by client. Adding a bias and cutting at 0 are monotone,
    so doing both after the maximum gives the same numbers from a quarter of the work.
    """
    count, height, width, channels = raw.shape
    shape = (count, height // 2, width // 2, channels)
    if ready(raw):
        pooled = torch.empty(shape, dtype=raw.dtype, device=raw.device)
        codes = torch.empty(shape, dtype=torch.uint8, device=raw.device)
        size = pooled.numel()
        _triton.pool[(-(-size // BLOCK),)](
            raw,
            raw if bias is None else bias,
            pooled,
            codes,
            size,
            count // (1 if bias is None else len(bias)),
            0 if bias is None else bias.stride(0),
            height,
            width,
            channels,
            has_bias=bias is not None,
            wide=raw.numel() >= 2**31,
            block=BLOCK,
        )
        return pooled, codes
    pooled, where = aten.max_pool2d_with_indices(raw.permute(0, 3, 1, 2), [2, 2])
    pooled, where = pooled.permute(0, 2, 3, 1).contiguous(), where.permute(0, 2, 3, 1)
    if bias is not None:
        pooled.view(len(bias), -1, channels).add_(bias[:, None, :].to(raw.dtype))
    pooled.relu_()
    codes = (where // width % 2 * 2 + where % width % 2).to(torch.uint8)
    return pooled, torch.where(pooled > 0, codes, DEAD)


def unpool(slope: torch.Tensor, codes: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Send each slope back to where its maximum was, and nowhere where ReLU cut it off."""
    count, rows, columns, channels = slope.shape
    whole = height == 2 * rows and width == 2 * columns
    make = torch.empty if whole and ready(slope) else torch.zeros
    spread = make((count, height, width, channels), dtype=slope.dtype, device=slope.device)
    if ready(slope):
        size = slope.numel()
        _triton.unpool[(-(-size // BLOCK),)](
            slope.contiguous(),
            codes,
            spread,
            size,
            rows,
            columns,
            height,
            width,
            channels,
            wide=spread.numel() >= 2**31,
            block=BLOCK,
        )
        return spread
    inner = spread[:, : 2 * rows, : 2 * columns].unflatten(1, (rows, 2)).unflatten(3, (columns, 2))
    for code in range(4):
        inner[:, :, code // 2, :, code % 2] = torch.where(codes == code, slope, 0)
    return spread


def windows(images: torch.Tensor, kernel: int, width: int, *, ones: bool = False, turned: bool = False) -> torch.Tensor:
    """Gather the kernel×kernel window around every position: [images · positions, width].

    Numbers beyond kernel² · channels are 0, except that `ones` puts a 1 right after them (a bias then is one more
    weight). `turned` takes the windows back to front, which is what the way back through a convolution needs.
    """
    count, height, columns, channels = images.shape
    taps = kernel * kernel * channels
    if ready(images):
        out = torch.empty((count * height * columns, width), dtype=images.dtype, device=images.device)
        # Blocks as wide as the channels, where they are a power of two: a block then is one tap of its windows.
        across = min(128, max(16, width & -width))
        rows = 4096 // across
        grid = (-(-len(out) // rows), -(-width // across))
        _triton.windows[grid](
            images.contiguous(),
            out,
            len(out),
            height,
            columns,
            channels,
            width,
            kernel=kernel,
            ones=ones,
            turned=turned,
            chunk=rows,
            span=across,
        )
        return out
    edge = kernel // 2
    padded = functional.pad(images, (0, 0, edge, edge, edge, edge)).contiguous()
    steps = padded.stride()
    seen = padded.as_strided(
        (count, height, columns, kernel, kernel, channels), (steps[0], steps[1], steps[2], steps[1], steps[2], 1)
    )
    seen = seen.flip(3, 4) if turned else seen
    if taps == width:
        return seen.reshape(-1, width)
    out = images.new_zeros((count * height * columns, width))
    out[:, :taps] = seen.reshape(-1, taps)
    if ones:
        out[:, taps] = 1
    return out
