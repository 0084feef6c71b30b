"""The kernels themselves, in Triton; `kernels` calls them and says what each one does."""
# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl


@triton.jit
def pool(raw, bias, pooled, codes, size, samples, step, height: tl.constexpr, width: tl.constexpr,
         channels: tl.constexpr, has_bias: tl.constexpr, wide: tl.constexpr, block: tl.constexpr):  # fmt: skip
    place = tl.program_id(0) * block + tl.arange(0, block)
    if wide:
        place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    channel = place % channels
    rest = place // channels
    column = rest % (width // 2)
    rest = rest // (width // 2)
    row = rest % (height // 2)
    image = rest // (height // 2)
    corner = raw + ((image * height + 2 * row) * width + 2 * column) * channels + channel
    best = tl.load(corner, inside, 0.0).to(tl.float32)
    code = tl.zeros((block,), tl.int32)
    for other in tl.static_range(1, 4):
        value = tl.load(corner + ((other // 2) * width + other % 2) * channels, inside, 0.0).to(tl.float32)
        larger = (value > best) | (value != value)
        best = tl.where(larger, value, best)
        code = tl.where(larger, other, code)
    if has_bias:
        best += tl.load(bias + (image // samples) * step + channel, inside, 0.0).to(tl.float32)
    dead = best <= 0
    tl.store(pooled + place, tl.where(dead, 0.0, best).to(pooled.dtype.element_ty), inside)
    tl.store(codes + place, tl.where(dead, 4, code).to(tl.uint8), inside)


@triton.jit
def unpool(slope, codes, spread, size, rows: tl.constexpr, columns: tl.constexpr, height: tl.constexpr,
           width: tl.constexpr, channels: tl.constexpr, wide: tl.constexpr, block: tl.constexpr):  # fmt: skip
    place = tl.program_id(0) * block + tl.arange(0, block)
    if wide:
        place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    channel = place % channels
    rest = place // channels
    column = rest % columns
    rest = rest // columns
    row = rest % rows
    image = rest // rows
    corner = spread + ((image * height + 2 * row) * width + 2 * column) * channels + channel
    value = tl.load(slope + place, inside, 0.0)
    code = tl.load(codes + place, inside, 4).to(tl.int32)
    for other in tl.static_range(0, 4):
        target = corner + ((other // 2) * width + other % 2) * channels
        tl.store(target, tl.where(code == other, value, 0.0), inside)


@triton.jit
def windows(images, out, count, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
            taps: tl.constexpr, kernel: tl.constexpr, ones: tl.constexpr, turned: tl.constexpr,
            chunk: tl.constexpr, span: tl.constexpr):  # fmt: skip
    position = tl.program_id(0) * chunk + tl.arange(0, chunk)
    tap = tl.program_id(1) * span + tl.arange(0, span)
    column = position % width
    row = position // width % height
    image = position // width // height
    channel = tap % channels
    across = tap // channels % kernel
    down = tap // channels // kernel
    real = down < kernel
    if turned:
        across = kernel - 1 - across
        down = kernel - 1 - down
    y = row[:, None] + (down - kernel // 2)[None, :]
    x = column[:, None] + (across - kernel // 2)[None, :]
    there = (y >= 0) & (y < height) & (x >= 0) & (x < width) & real[None, :]
    wanted = (position < count)[:, None] & (tap < taps)[None, :]
    source = images + (((image.to(tl.int64)[:, None] * height + y) * width + x) * channels + channel[None, :])
    value = tl.load(source, there & wanted, 0.0)
    if ones:
        value = tl.where((tap == kernel * kernel * channels)[None, :], 1.0, value)
    tl.store(out + position.to(tl.int64)[:, None] * taps + tap[None, :], value.to(out.dtype.element_ty), wanted)
