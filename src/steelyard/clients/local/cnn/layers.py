"""Dense layers of stacked clients with few samples each, where reading the weights is all the work; in Triton.

What calls a kernel stands below all of them, and says what each argument is.
"""
# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# No postponed annotations: Triton reads those of its kernels.

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from steelyard.clients.local.cnn.tiles import Arithmetic, power, tile


@triton.jit
def _forward(entered, weights, out, samples, weight_step, inputs: tl.constexpr, outputs: tl.constexpr,
             precision: tl.constexpr, tall: tl.constexpr, block: tl.constexpr, chunk: tl.constexpr,
             span: tl.constexpr):  # fmt: skip
    """One share of the columns' part of x Wᵀ: a program reads a piece of some rows of one client's weights, once."""
    client = tl.program_id(1).to(tl.int64)
    share = tl.program_id(2)
    row = tl.program_id(0) * block + tl.arange(0, block)
    sample = tl.arange(0, tall)
    weights += client * weight_step
    entered += client * samples * inputs
    total = tl.zeros((block, tall), tl.float32)
    for begin in range(0, span, chunk):
        column = share * span + begin + tl.arange(0, chunk)
        w = tl.load(weights + row[:, None] * inputs + column[None, :],
                    (row < outputs)[:, None] & (column < inputs)[None, :], 0.0)  # fmt: skip
        x = tl.load(entered + sample[None, :] * inputs + column[:, None],
                    (column < inputs)[:, None] & (sample < samples)[None, :], 0.0)  # fmt: skip
        total = tl.dot(w, x, total, input_precision=precision)
    known = (row < outputs)[:, None] & (sample < samples)[None, :]
    out += (share * tl.num_programs(1) + client) * samples * outputs
    tl.store(out + sample[None, :] * outputs + row[:, None], total, known)


@triton.jit
def _backward(slope, entered, weights, target, below, samples, weight_step, target_step, rate, inputs: tl.constexpr,
              outputs: tl.constexpr, plain: tl.constexpr, precision: tl.constexpr, tall: tl.constexpr,
              block: tl.constexpr, chunk: tl.constexpr):  # fmt: skip
    """slope @ W and W ← W − η·slopeᵀ x (or the gradient alone) in one pass: a program owns some columns of W."""
    client = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * chunk + tl.arange(0, chunk)
    sample = tl.arange(0, tall)
    weights += client * weight_step
    target += client * target_step
    slope += client * samples * outputs
    index = (client * samples + sample)[:, None] * inputs + column[None, :]
    known = (sample < samples)[:, None] & (column < inputs)[None, :]
    x = tl.load(entered + index, known, 0.0)
    total = tl.zeros((tall, chunk), tl.float32)
    for begin in range(0, outputs, block):
        row = begin + tl.arange(0, block)
        at = row[:, None] * inputs + column[None, :]
        there = (row < outputs)[:, None] & (column < inputs)[None, :]
        w = tl.load(weights + at, there, 0.0)
        s = tl.load(slope + sample[:, None] * outputs + row[None, :],
                    (sample < samples)[:, None] & (row < outputs)[None, :], 0.0)  # fmt: skip
        total = tl.dot(s, w, total, input_precision=precision)
        gradient = tl.dot(tl.trans(s), x, input_precision=precision)
        if plain:
            gradient = w - rate * gradient
        tl.store(target + at, gradient, there)
    tl.store(below + index, total.to(below.dtype.element_ty), known)


@triton.jit
def logits(shares_of, models, hidden, logit_shares, samples, shares, stack, model_step, weight_offset, bias_offset,
           below_offset, inputs: tl.constexpr, outputs: tl.constexpr, precision: tl.constexpr, tall: tl.constexpr,
           wide: tl.constexpr, chunk: tl.constexpr):  # fmt: skip
    """Finish some hidden units (add the shares up, bias, ReLU) and give their part of the outputs."""
    client = tl.program_id(1).to(tl.int64)
    sample = tl.arange(0, tall)
    out = tl.arange(0, wide)
    column = tl.program_id(0) * chunk + tl.arange(0, chunk)
    models += client * model_step
    known = (sample < samples)[:, None] & (column < inputs)[None, :]
    index = (client * samples + sample)[:, None] * inputs + column[None, :]
    h = tl.zeros((tall, chunk), tl.float32)
    for share in range(shares):
        h += tl.load(shares_of + share * stack + index, known, 0.0)
    h = tl.maximum(h + tl.load(models + below_offset + column, column < inputs, 0.0)[None, :], 0.0)
    tl.store(hidden + index, h, known)
    w = tl.load(models + weight_offset + out[None, :] * inputs + column[:, None],
                (column < inputs)[:, None] & (out < outputs)[None, :], 0.0)  # fmt: skip
    part = tl.dot(h, w, input_precision=precision)
    if tl.program_id(0) == 0:
        part += tl.load(models + bias_offset + out, out < outputs, 0.0)[None, :]
    logit_shares += (client * tl.num_programs(0) + tl.program_id(0)) * (tall * wide)
    tl.store(logit_shares + sample[:, None] * wide + out[None, :], part)


@triton.jit
def _head(logit_shares, hidden, models, target, labels, weights, report, counter, slope, losses, samples, client_labels,
          step_labels, model_step, target_step, weight_offset, bias_offset, below_offset, rate, inputs: tl.constexpr,
          outputs: tl.constexpr, plain: tl.constexpr, precision: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
          chunk: tl.constexpr):  # fmt: skip
    """Cross-entropy and the way back through the last layer, for some hidden units of one client."""
    client = tl.program_id(1).to(tl.int64)
    sample = tl.arange(0, tall)
    out = tl.arange(0, wide)
    there = sample < samples
    models += client * model_step
    target += client * target_step
    scores = tl.zeros((tall, wide), tl.float32)
    logit_shares += client * tl.num_programs(0) * (tall * wide)
    for part in range(tl.num_programs(0)):
        scores += tl.load(logit_shares + part * (tall * wide) + sample[:, None] * wide + out[None, :])
    scores = tl.where((out < outputs)[None, :], scores, float("-inf"))
    table = tl.load(counter) * step_labels + client * client_labels + sample
    label = tl.load(labels + table, there, 0).to(tl.int32)
    scores -= tl.max(scores, axis=1)[:, None]
    raised = tl.exp(scores)
    sums = tl.sum(raised, axis=1)
    chosen = out[None, :] == label[:, None]
    back = (raised / sums[:, None] - tl.where(chosen, 1.0, 0.0)) * tl.load(weights + table, there, 0.0)[:, None]
    if tl.program_id(0) == 0:
        each = tl.log(sums) - tl.sum(tl.where(chosen, scores, 0.0), axis=1)
        counted = tl.load(report + table, there, 0.0)
        gone = tl.sum(tl.where(counted > 0, each * counted, 0.0), axis=0)
        tl.store(losses + client, tl.load(losses + client) + gone.to(tl.float64))
        slopes = tl.sum(back, axis=0)
        if plain:
            slopes = tl.load(models + bias_offset + out, out < outputs, 0.0) - rate * slopes
        tl.store(target + bias_offset + out, slopes, out < outputs)
    column = tl.program_id(0) * chunk + tl.arange(0, chunk)
    known = there[:, None] & (column < inputs)[None, :]
    index = (client * samples + sample)[:, None] * inputs + column[None, :]
    h = tl.load(hidden + index, known, 0.0)
    at = weight_offset + out[:, None] * inputs + column[None, :]
    real = (out < outputs)[:, None] & (column < inputs)[None, :]
    w = tl.load(models + at, real, 0.0)
    below = tl.where(h > 0, tl.dot(back, w, input_precision=precision), 0.0)
    tl.store(slope + index, below, known)
    gradient = tl.dot(tl.trans(back), h, input_precision=precision)
    slopes = tl.sum(below, axis=0)
    if plain:
        gradient = w - rate * gradient
        slopes = tl.load(models + below_offset + column, column < inputs, 0.0) - rate * slopes
    tl.store(target + at, gradient, real)
    tl.store(target + below_offset + column, slopes, column < inputs)


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
    _forward[(-(-outputs // cut.block), clients, shares)](
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
    _backward[(-(-inputs // cut.chunk), clients)](
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
    logits[grid](
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
    _head[grid](
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
