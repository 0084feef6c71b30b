"""Calls of the second convolution's kernels: shapes, strides and memory for what they return."""

from __future__ import annotations

from typing import Any

import torch

from steelyard.clients.local.kernels import convolve as _convolve
from steelyard.clients.local.kernels.shapes import Shape, power
from steelyard.clients.local.kernels.tiles import Arithmetic, tile

convolve: Any = _convolve  # what Triton makes of a function has no type


def prepare(shape: Shape, weights: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernels in this kind of number, and turned for the way back: [clients, channels, taps · outputs]."""
    clients = len(weights)
    copied = weights.dtype != kind
    straight = torch.empty((clients, shape.outputs, shape.taps) if copied else (1,), dtype=kind, device=weights.device)
    turned = torch.empty((clients, shape.outputs * shape.taps), dtype=kind, device=weights.device)
    convolve.prepare[(shape.kernel**2, clients)](
        weights,
        straight,
        turned,
        weights.stride(0),
        channels=shape.channels,
        kernel=shape.kernel,
        outputs=shape.outputs,
        copied=copied,
        narrow=power(shape.channels),
        wide=power(shape.outputs),
    )
    return straight if copied else weights, turned


def forward(
    shape: Shape,
    source: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor,
    samples: int,
    how: Arithmetic,
    *,
    coded: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return relu(2×2 maximum of the convolution + bias) in float32, and where each maximum was.

    `source` is [clients · samples, height, width, channels], `weights` [clients, out, taps] of the same kind.
    """
    clients = len(weights)
    pooled = torch.empty((clients * samples, *shape.pooled, shape.outputs), device=weights.device)
    codes = torch.empty(pooled.shape if coded else (1,), dtype=torch.uint8, device=weights.device)
    cut = tile("second", how, clients * samples)
    convolve.forward[(-(-samples * shape.area // cut.block), clients)](
        source,
        weights,
        bias,
        pooled,
        codes,
        samples,
        weights.stride(0),
        bias.stride(0),
        **shape.fixed,
        coded=coded,
        rectified=shape.rectified,
        precision=how.precision,
        block=cut.block,
        chunk=min(power(shape.taps), cut.chunk),
        wide=power(shape.outputs),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return pooled, codes


def spread(shape: Shape, slope: torch.Tensor, codes: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return pooled slopes sent back to where their maxima were, [images, height, width, outputs]."""
    out = torch.empty((len(codes), shape.height, shape.width, shape.outputs), dtype=kind, device=codes.device)
    convolve.spread[(-(-out.numel() // 1024),)](
        slope, codes, out, out.numel(), shape.height, shape.width, shape.outputs, block=1024
    )
    return out


def input_gradient(
    shape: Shape, slope: torch.Tensor, turned: torch.Tensor, samples: int, how: Arithmetic
) -> torch.Tensor:
    """Return the slopes at the inputs, [clients · samples, height, width, channels], from spread slopes."""
    clients = len(turned)
    size = (clients * samples, shape.height, shape.width, shape.channels)
    below = torch.empty(size, dtype=slope.dtype, device=slope.device)
    cut = tile("below", how, clients * samples)
    convolve.input_gradient[(-(-samples * shape.height * shape.width // cut.block), clients)](
        slope,
        turned,
        below,
        samples,
        **shape.fixed,
        precision=how.precision,
        block=cut.block,
        chunk=min(power(shape.kernel**2 * shape.outputs), cut.chunk),
        narrow=power(shape.channels),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return below


def step(
    shape: Shape,
    source: torch.Tensor,
    full: torch.Tensor,
    slope: torch.Tensor,
    codes: torch.Tensor,
    models: torch.Tensor,
    into: torch.Tensor | None,
    offsets: tuple[int, int],
    samples: int,
    rate: float,
    how: Arithmetic,
) -> None:
    """Step the second convolution's kernels and bias, or write their gradients; `offsets` are theirs in a model.

    `slope` is the pooled one and `full` what `spread` made of it. Shares of the samples are summed apart and added up
    in their order, so that two runs agree bit for bit.
    """
    clients = len(models)
    cut = tile("second back", how, clients * samples)
    chunk = min(power(shape.taps), cut.chunk)
    pieces = -(-shape.taps // chunk)
    wanted = max(1, min(samples, -(-cut.programs // (clients * pieces))))
    group = -(-samples // wanted)
    shares = -(-samples // group)
    size = shape.outputs * shape.taps
    partial = torch.empty((clients, shares, size), device=models.device)
    convolve.weight_gradient[(pieces, shares, clients)](
        source,
        full,
        partial,
        samples,
        group,
        **shape.fixed,
        precision=how.precision,
        block=cut.block,
        chunk=chunk,
        wide=power(shape.outputs),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    target = models if into is None else into
    convolve.step[(-(-size // 512) + 1, clients)](
        partial,
        slope,
        codes,
        models,
        target,
        samples,
        shares,
        models.stride(0),
        target.stride(0),
        *offsets,
        rate,
        area=shape.area,
        size=size,
        outputs=shape.outputs,
        plain=into is None,
        block=512,
        wide=power(shape.outputs),
    )
