"""What a step does number by number around its products, and the local optimisers, each in one pass; in Triton.

Images stand channels last. A program takes one row of an image, so that all it computes with fits small integers; only
where an image begins needs large ones. `passes` and `descent` call these kernels and say what each argument is.
"""
# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl


@triton.jit
def windows(images, out, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, kernel: tl.constexpr,
            wide: tl.constexpr, ones: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """The windows of one row of positions, `wide` numbers each."""
    rows: tl.constexpr = height - kernel + 1
    columns: tl.constexpr = width - kernel + 1
    taps: tl.constexpr = kernel * kernel * channels
    line = tl.program_id(0).to(tl.int64)
    image = line // rows
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < columns * wide
    tap = at % wide
    down = tap // (kernel * channels)
    offset = (down * width + at // wide) * channels + tap % (kernel * channels)
    begin = images + (image * height + line % rows) * (width * channels)
    value = tl.load(begin + offset, inside & (tap < taps), 0.0)
    if ones:
        value = tl.where(tap == taps, 1.0, value)
    tl.store(out + line * (columns * wide) + at, value, inside)


@triton.jit
def pool(raw, bias, pooled, codes, samples, bias_step, height: tl.constexpr, width: tl.constexpr,
         channels: tl.constexpr, dead: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """relu(2×2 maximum + bias) of one row of pooled positions, and where each maximum was."""
    rows: tl.constexpr = height // 2
    columns: tl.constexpr = width // 2
    line = tl.program_id(0).to(tl.int64)
    image = line // rows
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < columns * channels
    channel = at % channels
    corner = raw + (image * height + line % rows * 2) * (width * channels) + at // channels * 2 * channels + channel
    best = tl.load(corner, inside, 0.0).to(tl.float32)
    code = tl.zeros([block], tl.int32)
    for number in tl.static_range(1, 4):
        other = tl.load(corner + (number // 2 * width + number % 2) * channels, inside, 0.0).to(tl.float32)
        # What is not a number stays, as it does in torch.
        better = (other > best) | (other != other)
        best = tl.where(better, other, best)
        code = tl.where(better, number, code)
    best += tl.load(bias + image // samples * bias_step + channel, inside, 0.0)
    tl.store(pooled + line * (columns * channels) + at, tl.where(best <= 0, 0.0, best), inside)
    tl.store(codes + line * (columns * channels) + at, tl.where(best > 0, code, dead).to(tl.uint8), inside)


@triton.jit
def unpool(slope, codes, out, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
           block: tl.constexpr):  # fmt: skip
    """One row of the slopes before pooling."""
    rows: tl.constexpr = height // 2
    columns: tl.constexpr = width // 2
    line = tl.program_id(0).to(tl.int64)
    image = line // height
    row = (line % height).to(tl.int32)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width * channels
    column = at // channels
    known = inside & (column // 2 < tl.where(row // 2 < rows, columns, 0))
    there = (image * rows + row // 2) * (columns * channels) + column // 2 * channels + at % channels
    value = tl.load(slope + there, known, 0.0)
    code = tl.load(codes + there, known, 255).to(tl.int32)
    mine = code == row % 2 * 2 + column % 2
    tl.store(out + line * (width * channels) + at, tl.where(mine, value, 0.0), inside)


@triton.jit
def added(parts, entered, out, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
          kernel: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """The parts of all windows added up in one row of the images that were windowed."""
    rows: tl.constexpr = height - kernel + 1
    columns: tl.constexpr = width - kernel + 1
    taps: tl.constexpr = kernel * kernel * channels
    line = tl.program_id(0).to(tl.int64)
    image = line // height
    row = (line % height).to(tl.int32)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width * channels
    column = at // channels
    begin = parts + image * (rows * columns * taps)
    total = tl.zeros([block], tl.float32)
    for down in tl.static_range(kernel):
        for along in tl.static_range(kernel):
            y = row - down
            x = column - along
            there = inside & (x >= 0) & (x < tl.where((y >= 0) & (y < rows), columns, 0))
            offset = (y * columns + x) * taps + (down * kernel + along) * channels
            total += tl.load(begin + offset + at % channels, there, 0.0).to(tl.float32)
    was = tl.load(entered + line * (width * channels) + at, inside, 0.0).to(tl.float32)
    tl.store(out + line * (width * channels) + at, tl.where(was > 0, total, 0.0), inside)


@triton.jit
def mask(chance, out, samples, layer, threshold, scale, units: tl.constexpr, lanes: tl.constexpr,
         layers: tl.constexpr, sample_bits: tl.constexpr, word_bits: tl.constexpr, golden: tl.constexpr,
         mix_1: tl.constexpr, mix_2: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """The masks of one sample: a word of SplitMix64 for every four units."""
    line = tl.program_id(0).to(tl.int64)
    client = line // samples
    key = tl.load(chance + client * 2)
    step = tl.load(chance + client * 2 + 1)
    word = tl.program_id(1) * block + tl.arange(0, block)
    z = ((step * layers + layer << sample_bits) + line % samples << word_bits) + word + 1
    z = z * golden + key
    z = (z ^ (z >> 30 & 0x3FFFFFFFF)) * mix_1
    z = (z ^ (z >> 27 & 0x1FFFFFFFFF)) * mix_2
    z = z ^ (z >> 31 & 0x1FFFFFFFF)
    lane = tl.arange(0, lanes)
    bits = z[:, None] >> (lane * 16)[None, :] & 0xFFFF
    kept = (bits ^ 0x8000) - 0x8000 >= threshold
    unit = word[:, None] * lanes + lane[None, :]
    tl.store(out + line * units + unit, tl.where(kept, scale, 0.0), unit < units)


@triton.jit
def adadelta(parameters, gradients, square, moved, rates, size, decay, small, block: tl.constexpr):
    """A part of one client's step with Adadelta."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    here = tl.program_id(1).to(tl.int64) * size + at
    gradient = tl.load(gradients + here, inside, 0.0)
    squares = tl.load(square + here, inside, 0.0) * decay + (1 - decay) * gradient * gradient
    moves = tl.load(moved + here, inside, 0.0)
    change = gradient * tl.sqrt((moves + small) / (squares + small))
    tl.store(square + here, squares, inside)
    tl.store(moved + here, moves * decay + (1 - decay) * change * change, inside)
    value = tl.load(parameters + here, inside, 0.0)
    tl.store(parameters + here, value - tl.load(rates + tl.program_id(1)) * change, inside)


@triton.jit
def adam(parameters, gradients, mean, square, rates, corrections, size, decay, decay_2, small, block: tl.constexpr):
    """A part of one client's step with Adam."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    here = tl.program_id(1).to(tl.int64) * size + at
    gradient = tl.load(gradients + here, inside, 0.0)
    means = tl.load(mean + here, inside, 0.0) * decay + (1 - decay) * gradient
    squares = tl.load(square + here, inside, 0.0) * decay_2 + (1 - decay_2) * gradient * gradient
    tl.store(mean + here, means, inside)
    tl.store(square + here, squares, inside)
    root = (tl.sqrt(squares / tl.load(corrections + 1)) + small) * tl.load(corrections)
    value = tl.load(parameters + here, inside, 0.0)
    tl.store(parameters + here, value - tl.load(rates + tl.program_id(1)) * (means / root), inside)
