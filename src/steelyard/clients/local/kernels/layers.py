"""Calls of the kernels for dense layers of clients with few samples: shapes, strides and memory for results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from steelyard.clients.local.kernels import dense as _dense
from steelyard.clients.local.kernels.shapes import power
from steelyard.clients.local.kernels.tiles import Arithmetic, tile

dense: Any = _dense  # what Triton makes of a function has no type


class HeadOffsets(NamedTuple):
    """Where the head's numbers stand in a model: the last layer's weights and bias, and the bias of the one below."""

    weights: int
    bias: int
    below: int


def forward(entered: torch.Tensor, weights: torch.Tensor, how: Arithmetic) -> torch.Tensor:
    """Return x Wᵀ in shares that are still to be added up: [shares, clients, samples, outputs]."""
    clients, samples, inputs = entered.shape
    outputs = weights.shape[1]
    cut = tile("dense", how, clients * samples)
    chunk = min(power(inputs), cut.chunk)
    pieces = -(-outputs // cut.block) * clients
    wanted = max(1, min(8, cut.programs // pieces))
    chunks = -(-inputs // chunk)
    span = -(-chunks // wanted) * chunk
    shares = -(-inputs // span)
    out = torch.empty((shares, clients, samples, outputs), device=entered.device)
    dense.forward[(-(-outputs // cut.block), clients, shares)](
        entered,
        weights,
        out,
        samples,
        weights.stride(0),
        inputs=inputs,
        outputs=outputs,
        precision=how.precision,
        tall=power(samples),
        block=cut.block,
        chunk=chunk,
        span=span,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return out


def backward(
    slope: torch.Tensor,
    entered: torch.Tensor,
    weights: torch.Tensor,
    target: torch.Tensor | None,
    rate: float,
    how: Arithmetic,
) -> torch.Tensor:
    """Return slope @ W and take the step in W in the same pass, or write the gradient into `target`."""
    clients, samples, inputs = entered.shape
    outputs = weights.shape[1]
    below = torch.empty((clients, samples, inputs), device=slope.device)
    cut = tile("dense back", how, clients * samples)
    into = weights if target is None else target
    dense.backward[(-(-inputs // cut.chunk), clients)](
        slope,
        entered,
        weights,
        into,
        below,
        samples,
        weights.stride(0),
        into.stride(0),
        rate,
        inputs=inputs,
        outputs=outputs,
        plain=target is None,
        precision=how.precision,
        tall=power(samples),
        block=cut.block,
        chunk=cut.chunk,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return below


def head(
    shares: torch.Tensor,
    models: torch.Tensor,
    into: torch.Tensor | None,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    counter: torch.Tensor,
    losses: torch.Tensor,
    offsets: HeadOffsets,
    outputs: int,
    rate: float,
    how: Arithmetic,
) -> torch.Tensor:
    """Finish the hidden layer, do the last one and cross-entropy forward and back; return the slope at the hidden one.

    `shares` is what `forward` returned; `tables` are labels, weights and report, [steps, clients, samples] each; the
    losses that count are added to `losses`. Steps the last layer and the hidden one's bias, or writes their gradients.
    """
    count, clients, samples, inputs = shares.shape
    cut = tile("head", how, clients * samples)
    chunk = min(power(inputs), cut.chunk)
    sizes = {"tall": power(samples), "wide": power(outputs), "chunk": chunk, "inputs": inputs, "outputs": outputs}
    grid = (-(-inputs // chunk), clients)
    hidden, slope = torch.empty_like(shares[0]), torch.empty_like(shares[0])
    logit_shares = torch.empty((clients, grid[0], sizes["tall"], sizes["wide"]), device=models.device)
    dense.logits[grid](
        shares,
        models,
        hidden,
        logit_shares,
        samples,
        count,
        hidden.numel(),
        models.stride(0),
        *offsets,
        precision=how.precision,
        num_warps=cut.warps,
        **sizes,
    )
    target = models if into is None else into
    dense.head[grid](
        logit_shares,
        hidden,
        models,
        target,
        *tables,
        counter,
        slope,
        losses,
        samples,
        tables[0].stride(1),
        tables[0].stride(0),
        models.stride(0),
        target.stride(0),
        *offsets,
        rate,
        plain=into is None,
        precision=how.precision,
        num_warps=cut.warps,
        **sizes,
    )
    return slope
