"""The second convolution of stacked clients, with pooling and ReLU, and its gradients; in Triton.

Images stand channels last. No window is ever written out: programs gather them while they multiply, and a forward
program keeps the four sums over which it pools. What calls a kernel stands below all of them, and says what each
argument is.
"""
# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# No postponed annotations: Triton reads those of its kernels.

import torch
import triton
import triton.language as tl

from steelyard.clients.local.cnn.tiles import Arithmetic, Shape, keep_pooled, larger, power, tile, windows


@triton.jit
def _prepare(weights, straight, turned, weight_step, channels: tl.constexpr, kernel: tl.constexpr,
             outputs: tl.constexpr, copied: tl.constexpr, narrow: tl.constexpr, wide: tl.constexpr):  # fmt: skip
    """Kernels in the kind of number that products take, and once more turned: [channels, taps backwards, outputs]."""
    client = tl.program_id(1).to(tl.int64)
    cell = tl.program_id(0)
    area: tl.constexpr = kernel * kernel
    step: tl.constexpr = outputs * area * channels
    out = tl.arange(0, wide)
    channel = tl.arange(0, narrow)
    at = (out * area + cell)[:, None] * channels + channel[None, :]
    known = (out < outputs)[:, None] & (channel < channels)[None, :]
    value = tl.load(weights + client * weight_step + at, known, 0.0).to(turned.dtype.element_ty)
    if copied:
        tl.store(straight + client * step + at, value, known)
    target = (channel * area + area - 1 - cell)[:, None] * outputs + out[None, :]
    tl.store(turned + client * step + target, tl.trans(value), tl.trans(known))


@triton.jit
def _forward(source, weights, bias, pooled, codes, samples, weight_step, bias_step, height: tl.constexpr,
             width: tl.constexpr, channels: tl.constexpr, kernel: tl.constexpr, outputs: tl.constexpr,
             coded: tl.constexpr, rectified: tl.constexpr, precision: tl.constexpr, block: tl.constexpr,
             chunk: tl.constexpr, wide: tl.constexpr):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = width // 2
    area: tl.constexpr = (height // 2) * across
    columns: tl.constexpr = kernel * kernel * channels
    position = tl.program_id(0) * block + tl.arange(0, block)
    inside = position < samples * area
    source += client * samples * (height * width * channels)
    weights += client * weight_step
    base = position // area * (height * width * channels)
    y = position % area // across * 2
    x = position % area % across * 2
    out = tl.arange(0, wide)
    first = tl.zeros((block, wide), tl.float32)
    second = tl.zeros((block, wide), tl.float32)
    third = tl.zeros((block, wide), tl.float32)
    fourth = tl.zeros((block, wide), tl.float32)
    for begin in range(0, columns, chunk):
        tap = begin + tl.arange(0, chunk)
        known = (tap < columns)[:, None] & (out < outputs)[None, :]
        w = tl.load(weights + out[None, :] * columns + tap[:, None], known, 0.0)
        a = windows(source, base, y, x, inside, tap, height, width, channels, kernel, None, False)
        first = tl.dot(a, w, first, input_precision=precision)
        a = windows(source, base, y, x + 1, inside, tap, height, width, channels, kernel, None, False)
        second = tl.dot(a, w, second, input_precision=precision)
        a = windows(source, base, y + 1, x, inside, tap, height, width, channels, kernel, None, False)
        third = tl.dot(a, w, third, input_precision=precision)
        a = windows(source, base, y + 1, x + 1, inside, tap, height, width, channels, kernel, None, False)
        fourth = tl.dot(a, w, fourth, input_precision=precision)
    best, code = larger(first, 0, second, 1)
    best, code = larger(best, code, third, 2)
    best, code = larger(best, code, fourth, 3)
    best += tl.load(bias + client * bias_step + out, out < outputs, 0.0)[None, :]
    keep_pooled(pooled, codes, best, code, client, position, inside, out, samples * area, outputs, coded, rectified)


@triton.jit
def _spread(slope, codes, out, size, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
            block: tl.constexpr):  # fmt: skip
    """Send each pooled slope to where its maximum was, and 0 everywhere else."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < size
    down: tl.constexpr = height // 2
    across: tl.constexpr = width // 2
    x = index // channels % width
    y = index // channels // width % height
    image = index // (channels * width * height)
    wanted = inside & (y < 2 * down) & (x < 2 * across)
    cell = ((image * down + (y >> 1)) * across + (x >> 1)) * channels + index % channels
    code = tl.load(codes + cell, wanted, 4).to(tl.int32)
    value = tl.load(slope + cell, wanted, 0.0)
    value = tl.where(code == (y & 1) * 2 + (x & 1), value, 0.0)
    tl.store(out + index, value.to(out.dtype.element_ty), inside)


@triton.jit
def _input_gradient(slope, turned, below, samples, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
                    kernel: tl.constexpr, outputs: tl.constexpr, precision: tl.constexpr, block: tl.constexpr,
                    chunk: tl.constexpr, narrow: tl.constexpr):  # fmt: skip
    """The slopes at the inputs: a convolution of the spread slopes with the turned kernels."""
    client = tl.program_id(1).to(tl.int64)
    area: tl.constexpr = height * width
    columns: tl.constexpr = kernel * kernel * outputs
    position = tl.program_id(0) * block + tl.arange(0, block)
    inside = position < samples * area
    slope += client * samples * (area * outputs)
    turned += client * (columns * channels)
    base = position // area * (area * outputs)
    y = position % area // width
    x = position % width
    channel = tl.arange(0, narrow)
    total = tl.zeros((block, narrow), tl.float32)
    for begin in range(0, columns, chunk):
        tap = begin + tl.arange(0, chunk)
        known = (tap < columns)[:, None] & (channel < channels)[None, :]
        w = tl.load(turned + channel[None, :] * columns + tap[:, None], known, 0.0)
        a = windows(slope, base, y, x, inside, tap, height, width, outputs, kernel, None, False)
        total = tl.dot(a, w, total, input_precision=precision)
    target = (client * samples * area + position)[:, None] * channels + channel[None, :]
    tl.store(below + target, total.to(below.dtype.element_ty), inside[:, None] & (channel < channels)[None, :])


@triton.jit
def weight_gradient(source, slope, partial, samples, group, height: tl.constexpr, width: tl.constexpr,
                    channels: tl.constexpr, kernel: tl.constexpr, outputs: tl.constexpr, precision: tl.constexpr,
                    block: tl.constexpr, chunk: tl.constexpr, wide: tl.constexpr):  # fmt: skip
    """One share of the samples' part of the kernels' gradient; `step` adds the shares up in their order."""
    client = tl.program_id(2).to(tl.int64)
    share = tl.program_id(1)
    area: tl.constexpr = height * width
    columns: tl.constexpr = kernel * kernel * channels
    end = tl.minimum((share + 1) * group, samples) * area
    source += client * samples * (area * channels)
    slope += client * samples * (area * outputs)
    out = tl.arange(0, wide)
    tap = tl.program_id(0) * chunk + tl.arange(0, chunk)
    total = tl.zeros((wide, chunk), tl.float32)
    for start in range(share * group * area, end, block):
        position = start + tl.arange(0, block)
        inside = position < end
        base = position // area * (area * channels)
        y = position % area // width
        x = position % width
        wanted = inside[:, None] & (out < outputs)[None, :]
        a = tl.load(slope + position[:, None] * outputs + out[None, :], wanted, 0.0)
        b = windows(source, base, y, x, inside, tap, height, width, channels, kernel, None, False)
        total = tl.dot(tl.trans(a), b, total, input_precision=precision)
    partial += (client * tl.num_programs(1) + share) * (outputs * columns)
    known = (out < outputs)[:, None] & (tap < columns)[None, :]
    tl.store(partial + out[:, None] * columns + tap[None, :], total, known)


@triton.jit
def _step(partial, slope, codes, models, target, samples, shares, model_step, target_step, weight_offset, bias_offset,
          rate, area: tl.constexpr, size: tl.constexpr, outputs: tl.constexpr, plain: tl.constexpr, block: tl.constexpr,
          wide: tl.constexpr):  # fmt: skip
    """θ ← θ − η·Σ shares for plain SGD, else the gradient itself; the last program sums the bias's pooled slopes."""
    client = tl.program_id(1).to(tl.int64)
    models += client * model_step
    target += client * target_step
    if tl.program_id(0) < tl.num_programs(0) - 1:
        at = tl.program_id(0) * block + tl.arange(0, block)
        inside = at < size
        partial += client * shares * size
        total = tl.zeros((block,), tl.float32)
        for share in range(shares):
            total += tl.load(partial + share * size + at, inside, 0.0)
        if plain:
            total = tl.load(models + weight_offset + at, inside, 0.0) - rate * total
        tl.store(target + weight_offset + at, total, inside)
    else:
        out = tl.arange(0, wide)
        slope += client * samples * (area * outputs)
        codes += client * samples * (area * outputs)
        sums = tl.zeros((128, wide), tl.float32)
        for start in range(0, samples * area, 128):
            position = start + tl.arange(0, 128)
            wanted = (position < samples * area)[:, None] & (out < outputs)[None, :]
            cell = position[:, None] * outputs + out[None, :]
            alive = tl.load(codes + cell, wanted, 4) < 4
            sums += tl.where(alive, tl.load(slope + cell, wanted, 0.0).to(tl.float32), 0.0)
        gradient = tl.sum(sums, axis=0)
        if plain:
            gradient = tl.load(models + bias_offset + out, out < outputs, 0.0) - rate * gradient
        tl.store(target + bias_offset + out, gradient, out < outputs)


def prepare(shape: Shape, weights: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernels in this kind of number, and turned for the way back: [clients, channels, taps · outputs]."""
    clients = len(weights)
    copied = weights.dtype != kind
    straight = torch.empty((clients, shape.outputs, shape.taps) if copied else (1,), dtype=kind, device=weights.device)
    turned = torch.empty((clients, shape.outputs * shape.taps), dtype=kind, device=weights.device)
    _prepare[(shape.kernel**2, clients)](
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
    _forward[(-(-samples * shape.area // cut.block), clients)](
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
    _spread[(-(-out.numel() // 1024),)](
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
    _input_gradient[(-(-samples * shape.height * shape.width // cut.block), clients)](
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
    weight_gradient[(pieces, shares, clients)](
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
    _step[(-(-size // 512) + 1, clients)](
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
