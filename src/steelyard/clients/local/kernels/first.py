"""Calls of the first convolution's kernels: shapes, strides and memory for what they return."""

from __future__ import annotations

from typing import Any

import torch

from steelyard.clients.local.kernels import images as _images
from steelyard.clients.local.kernels.shapes import Images, Shape, power
from steelyard.clients.local.kernels.tiles import Arithmetic, tile

images: Any = _images  # what Triton makes of a function has no type


def forward(
    shape: Shape, source: Images, weights: torch.Tensor, how: Arithmetic, kind: torch.dtype, *, coded: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return relu(2×2 maximum of the convolution), [clients · samples, h, w, out], and where each maximum was.

    `weights` is [clients, out, columns] with any stride between clients; the bias stands after a kernel's last tap.
    """
    clients, samples = len(weights), source.samples
    pooled = torch.empty((clients * samples, *shape.pooled, shape.outputs), dtype=kind, device=weights.device)
    codes = torch.empty(pooled.shape if coded else (1,), dtype=torch.uint8, device=weights.device)
    cut = tile("first", how, clients * samples)
    images.forward[(-(-samples * shape.area // cut.block), clients)](
        source.features,
        source.rows,
        source.counter,
        weights,
        pooled,
        codes,
        samples,
        *source.strides,
        weights.stride(0),
        **shape.raw,
        columns=weights.shape[2],
        coded=coded,
        rectified=shape.rectified,
        kind=how.kind,
        precision=how.precision,
        block=cut.block,
        taps=power(shape.taps + 1),
        wide=power(shape.outputs),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return pooled, codes


def step(
    shape: Shape,
    source: Images,
    slope: torch.Tensor,
    codes: torch.Tensor,
    models: torch.Tensor,
    into: torch.Tensor | None,
    columns: int,
    rate: float,
    how: Arithmetic,
) -> None:
    """Step the first convolution's kernels, which stand at the front of a model, or write their gradient."""
    clients, samples = len(models), source.samples
    cut = tile("first back", how, clients * samples)
    # Shares of the positions: as many programs as keep the device busy, whole blocks each.
    group = -(-samples * shape.area // -(-cut.programs // clients))
    group = -(-group // cut.block) * cut.block
    shares = -(-samples * shape.area // group)
    wide, pixels = shape.square
    partial = torch.empty((clients, shares, 4, wide, pixels), device=models.device)
    images.gradient[(shares, clients)](
        source.features,
        source.rows,
        source.counter,
        slope,
        codes,
        partial,
        samples,
        group,
        *source.strides,
        **shape.raw,
        kind=how.kind,
        precision=how.precision,
        block=cut.block,
        pixels=pixels,
        wide=wide,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    target = models if into is None else into
    images.step[(-(-shape.outputs * columns // 64), clients)](
        partial,
        models,
        target,
        shares,
        models.stride(0),
        target.stride(0),
        rate,
        depth=shape.channels,
        kernel=shape.kernel,
        outputs=shape.outputs,
        columns=columns,
        pixels=pixels,
        wide=wide,
        plain=into is None,
        block=64,
        height=32,
    )
