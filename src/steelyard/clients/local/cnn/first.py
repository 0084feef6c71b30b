"""The first convolution, on images as they lie in the data set: with pooling and ReLU, and its gradient; in Triton.

A window carries a 1 after its last number, so that a bias is one more weight. Pooling looks at four neighbouring
windows, which lie in one square a number wider than a kernel: the gradient loads that square once and keeps one sum for
each corner. What calls a kernel stands below all of them, and says what each argument is.
"""
# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# No postponed annotations: Triton reads those of its kernels.

import torch
import triton
import triton.language as tl

from steelyard.clients.local.cnn.tiles import Arithmetic, Images, Shape, keep_pooled, larger, power, tile, windows


@triton.jit
def squares(features, rows, position, inside, pixel, height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
            kernel: tl.constexpr, kind: tl.constexpr):  # fmt: skip
    """The square under the four windows of each pooled position: [positions, pixels]."""
    across: tl.constexpr = width // 2
    area: tl.constexpr = (height // 2) * across
    side: tl.constexpr = kernel + 1
    last: tl.constexpr = side * side * depth
    image = position // area
    cell = position % area
    y = cell // across * 2 - kernel // 2
    x = cell % across * 2 - kernel // 2
    base = tl.load(rows + image, inside, 0).to(tl.int64) * (depth * height * width) + y * width + x
    down = pixel // depth // side
    along = pixel // depth % side
    row = y[:, None] + down[None, :]
    column = x[:, None] + along[None, :]
    there = (row >= 0) & (row < height) & (column >= 0) & (column < width) & (pixel < last)[None, :] & inside[:, None]
    offset = pixel % depth * (height * width) + down * width + along
    value = tl.load(features + base[:, None] + offset[None, :], there, 0).to(tl.float32)
    if features.dtype.element_ty == tl.uint8:
        value *= 1 / 255
    return tl.where((pixel == last)[None, :], 1.0, value).to(kind)


@triton.jit
def _forward(features, rows, counter, weights, pooled, codes, samples, client_rows, step_rows, weight_step,
             height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr, kernel: tl.constexpr,
             outputs: tl.constexpr, columns: tl.constexpr, coded: tl.constexpr, rectified: tl.constexpr,
             kind: tl.constexpr,
             precision: tl.constexpr, block: tl.constexpr, taps: tl.constexpr, wide: tl.constexpr):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = width // 2
    area: tl.constexpr = (height // 2) * across
    position = tl.program_id(0) * block + tl.arange(0, block)
    inside = position < samples * area
    rows += tl.load(counter) * step_rows + client * client_rows
    base = tl.load(rows + position // area, inside, 0).to(tl.int64) * (depth * height * width)
    y = position % area // across * 2
    x = position % area % across * 2
    out = tl.arange(0, wide)
    tap = tl.arange(0, taps)
    known = (tap < columns)[:, None] & (out < outputs)[None, :]
    w = tl.load(weights + client * weight_step + out[None, :] * columns + tap[:, None], known, 0.0).to(kind)
    a = windows(features, base, y, x, inside, tap, height, width, depth, kernel, kind, True)
    best = tl.dot(a, w, input_precision=precision)
    a = windows(features, base, y, x + 1, inside, tap, height, width, depth, kernel, kind, True)
    best, code = larger(best, 0, tl.dot(a, w, input_precision=precision), 1)
    a = windows(features, base, y + 1, x, inside, tap, height, width, depth, kernel, kind, True)
    best, code = larger(best, code, tl.dot(a, w, input_precision=precision), 2)
    a = windows(features, base, y + 1, x + 1, inside, tap, height, width, depth, kernel, kind, True)
    best, code = larger(best, code, tl.dot(a, w, input_precision=precision), 3)
    keep_pooled(pooled, codes, best, code, client, position, inside, out, samples * area, outputs, coded, rectified)


@triton.jit
def gradient(features, rows, counter, slope, codes, partial, samples, group, client_rows, step_rows,
             height: tl.constexpr, width: tl.constexpr, depth: tl.constexpr, kernel: tl.constexpr,
             outputs: tl.constexpr, kind: tl.constexpr, precision: tl.constexpr, block: tl.constexpr,
             pixels: tl.constexpr, wide: tl.constexpr):  # fmt: skip
    """One share of the positions' part of the kernels' gradient, by corner: [client, share, 4, wide, pixels]."""
    client = tl.program_id(1).to(tl.int64)
    share = tl.program_id(0)
    area: tl.constexpr = (height // 2) * (width // 2)
    rows += tl.load(counter) * step_rows + client * client_rows
    slope += client * samples * (area * outputs)
    codes += client * samples * (area * outputs)
    out = tl.arange(0, wide)
    pixel = tl.arange(0, pixels)
    end = tl.minimum((share + 1) * group, samples * area)
    total0 = tl.zeros((wide, pixels), tl.float32)
    total1 = tl.zeros((wide, pixels), tl.float32)
    total2 = tl.zeros((wide, pixels), tl.float32)
    total3 = tl.zeros((wide, pixels), tl.float32)
    for start in range(share * group, end, block):
        position = start + tl.arange(0, block)
        inside = position < end
        seen = squares(features, rows, position, inside, pixel, height, width, depth, kernel, kind)
        wanted = inside[:, None] & (out < outputs)[None, :]
        code = tl.trans(tl.load(codes + position[:, None] * outputs + out[None, :], wanted, 4).to(tl.int32))
        value = tl.trans(tl.load(slope + position[:, None] * outputs + out[None, :], wanted, 0.0))
        total0 = tl.dot(tl.where(code == 0, value, 0.0).to(kind), seen, total0, input_precision=precision)
        total1 = tl.dot(tl.where(code == 1, value, 0.0).to(kind), seen, total1, input_precision=precision)
        total2 = tl.dot(tl.where(code == 2, value, 0.0).to(kind), seen, total2, input_precision=precision)
        total3 = tl.dot(tl.where(code == 3, value, 0.0).to(kind), seen, total3, input_precision=precision)
    partial += (client * tl.num_programs(0) + share) * (4 * wide * pixels)
    at = out[:, None] * pixels + pixel[None, :]
    tl.store(partial + at, total0)
    tl.store(partial + wide * pixels + at, total1)
    tl.store(partial + 2 * wide * pixels + at, total2)
    tl.store(partial + 3 * wide * pixels + at, total3)


@triton.jit
def _step(partial, models, target, shares, model_step, target_step, rate, depth: tl.constexpr, kernel: tl.constexpr,
          outputs: tl.constexpr, columns: tl.constexpr, pixels: tl.constexpr, wide: tl.constexpr, plain: tl.constexpr,
          block: tl.constexpr, height: tl.constexpr):  # fmt: skip
    """Add up shares and corners; θ ← θ − η·sum for plain SGD, else the gradient itself."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * block + tl.arange(0, block)
    side: tl.constexpr = kernel + 1
    taps: tl.constexpr = kernel * kernel * depth
    tap = at % columns
    out = at // columns
    inside = (out < outputs) & (tap <= taps)
    partial += client * shares * (4 * wide * pixels)
    sums = tl.zeros((height, block), tl.float32)
    for begin in range(0, shares, height):
        share = begin + tl.arange(0, height)
        wanted = (share < shares)[:, None] & inside[None, :]
        for phase in tl.static_range(0, 4):
            down = tap // depth // kernel + phase // 2
            along = tap // depth % kernel + phase % 2
            pixel = (down * side + along) * depth + tap % depth
            pixel = tl.where(tap == taps, side * side * depth, pixel) + (phase * wide + out) * pixels
            sums += tl.load(partial + share[:, None] * (4 * wide * pixels) + pixel[None, :], wanted, 0.0)
    total = tl.sum(sums, axis=0)
    if plain:
        total = tl.load(models + client * model_step + at, inside, 0.0) - rate * total
    tl.store(target + client * target_step + at, total, inside)


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
    _forward[(-(-samples * shape.area // cut.block), clients)](
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
    gradient[(shares, clients)](
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
    _step[(-(-shape.outputs * columns // 64), clients)](
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
