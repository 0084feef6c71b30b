"""What the kernels work on: images and measures; how they are cut into programs, in which arithmetic they multiply.

Both convolutions gather windows and pool; these parts of their kernels stand here.
"""
# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
# No postponed annotations: Triton reads those of its kernels.

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Images:
    """The images of a step: samples of the data set as they lie there, and which of them each client takes."""

    features: torch.Tensor
    """[rows, depth · height · width], bytes or float32."""
    rows: torch.Tensor
    """[steps, clients, samples] or [1, 1, samples] for images that every client looks at."""
    counter: torch.Tensor
    """The step."""
    samples: int

    @property
    def strides(self) -> tuple[int, int]:
        """From client to client and from step to step."""
        return (0 if self.rows.shape[1] == 1 else self.rows.stride(1)), self.rows.stride(0)


@dataclass(frozen=True)
class Shape:
    """A convolution: the images that enter and the kernels."""

    height: int
    width: int
    channels: int
    kernel: int
    outputs: int
    rectified: bool = True
    """Whether ReLU follows the pooling."""

    @property
    def pooled(self) -> tuple[int, int]:
        """The grid after pooling."""
        return self.height // 2, self.width // 2

    @property
    def area(self) -> int:
        """Pooled positions of an image."""
        return self.pooled[0] * self.pooled[1]

    @property
    def taps(self) -> int:
        """Numbers of one kernel."""
        return self.kernel**2 * self.channels

    @property
    def fixed(self) -> dict[str, int]:
        """What the kernels are compiled for."""
        return {
            "height": self.height,
            "width": self.width,
            "channels": self.channels,
            "kernel": self.kernel,
            "outputs": self.outputs,
        }

    @property
    def raw(self) -> dict[str, int]:
        """The same for images as they lie in the data set, channel by channel."""
        return {("depth" if name == "channels" else name): value for name, value in self.fixed.items()}

    @property
    def square(self) -> tuple[int, int]:
        """Sizes of the gradient by corner: outputs, and the square under four windows with the 1 of the bias."""
        return power(self.outputs), power((self.kernel + 1) ** 2 * self.channels + 1)


def power(number: int) -> int:
    """The power of two that holds this many, 16 at the least: what matrix units take."""
    return max(16, 1 << (number - 1).bit_length())


class Arithmetic(NamedTuple):
    """How a product is formed: the kind of its operands, and what matrix units do with float32."""

    kind: Any
    precision: str
    name: str


ARITHMETIC = {
    # Three products of shortened numbers and their remainders come as close to exact as float32 itself does.
    "float32": Arithmetic(tl.float32, "tf32x3", "float32"),
    "tf32": Arithmetic(tl.float32, "tf32", "tf32"),
    "bfloat16": Arithmetic(tl.bfloat16, "tf32", "bfloat16"),
}


class Tile(NamedTuple):
    """How a kernel is cut into programs."""

    block: int
    """Positions, samples or rows of weights that a program takes at a time."""
    chunk: int
    """How much of the other axis it takes at a time."""
    warps: int
    stages: int
    programs: int = 0
    """Programs to aim for where the work can be shared out further."""


TILES: dict[tuple[str, str], Tile] = {
    # (kernel, arithmetic, with "+" for large stacks). Small ones were timed on 10 × 10 and 37 × 10 samples, large ones
    # on 100 × 600; where the two small stacks disagreed, the tile with the least sum of slow-downs stands here.
    ("first", "float32"): Tile(64, 0, 4, 1),
    ("first", "tf32"): Tile(64, 0, 4, 1),
    ("first", "bfloat16"): Tile(64, 0, 4, 1),
    ("first", "tf32+"): Tile(128, 0, 4, 1),
    ("first", "bfloat16+"): Tile(128, 0, 4, 1),
    ("first back", "float32"): Tile(32, 0, 4, 1, 264),
    ("first back", "tf32"): Tile(32, 0, 4, 1, 264),
    ("first back", "bfloat16"): Tile(32, 0, 4, 1, 264),
    ("first back", "float32+"): Tile(32, 0, 4, 1, 1056),
    ("first back", "tf32+"): Tile(32, 0, 4, 1, 1056),
    ("first back", "bfloat16+"): Tile(32, 0, 4, 2, 1056),
    ("second", "float32"): Tile(16, 32, 2, 3),
    ("second", "tf32"): Tile(64, 32, 4, 3),
    ("second", "bfloat16"): Tile(64, 32, 4, 3),
    ("second", "float32+"): Tile(64, 32, 4, 2),
    ("second", "tf32+"): Tile(128, 32, 8, 3),
    ("below", "float32"): Tile(64, 64, 4, 3),
    ("below", "tf32"): Tile(64, 64, 4, 3),
    ("below", "bfloat16"): Tile(64, 64, 4, 4),
    ("below", "float32+"): Tile(128, 32, 8, 3),
    ("below", "tf32+"): Tile(256, 32, 4, 3),
    ("below", "bfloat16+"): Tile(256, 64, 8, 3),
    # Two warps: matrix units that four warps share want float32 the other way round in memory, and turning it costs
    # more than they gain. bfloat16 they take either way.
    ("second back", "float32"): Tile(32, 32, 2, 3, 264),
    ("second back", "tf32"): Tile(32, 64, 2, 2, 528),
    ("second back", "bfloat16"): Tile(64, 128, 4, 2, 528),
    ("second back", "float32+"): Tile(32, 64, 2, 3, 2112),
    ("second back", "tf32+"): Tile(64, 64, 2, 2, 1056),
    ("second back", "bfloat16+"): Tile(64, 128, 4, 3, 1056),
    ("dense", "float32"): Tile(64, 64, 2, 5, 264),
    ("dense", "tf32"): Tile(64, 64, 4, 3, 264),
    ("dense back", "float32"): Tile(32, 64, 4, 3),
    ("dense back", "tf32"): Tile(64, 64, 4, 3),
    ("head", "float32"): Tile(0, 64, 4, 1),
    ("head", "tf32"): Tile(0, 64, 4, 1),
}
LARGE = 4096
"""Samples of a whole stack from which there is work for every multiprocessor whatever the tile."""


SHARED_MEMORY = 227 << 10
"""Bytes of fast memory beside a multiprocessor that the tiles count on, as on an H100 or H200."""


@cache
def enough_shared_memory() -> bool:
    """Whether the device has that much; elsewhere the small tiles are used, one stage deep."""
    if not torch.cuda.is_available():
        return True
    return getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 0) >= SHARED_MEMORY


def tile(what: str, how: Arithmetic, samples: int) -> Tile:
    """Return how to cut a kernel for a stack with this many samples in all."""
    if not enough_shared_memory():
        return TILES[what, how.name]._replace(stages=1)
    large = TILES.get((what, f"{how.name}+"))
    return large if large is not None and samples >= LARGE else TILES[what, how.name]


@triton.jit
def windows(source, base, y, x, inside, tap, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
            kernel: tl.constexpr, kind: tl.constexpr, raw: tl.constexpr):  # fmt: skip
    """The numbers under a kernel around (y, x): [positions, taps]. `base` is where each position's image begins.

    `raw`: images as they lie in the data set, channel by channel, with a 1 after the last tap; else channels are last.
    """
    taps: tl.constexpr = kernel * kernel * channels
    pixel: tl.constexpr = 1 if raw else channels
    plane: tl.constexpr = height * width if raw else 1
    down = tap // channels // kernel - kernel // 2
    along = tap // channels % kernel - kernel // 2
    row = y[:, None] + down[None, :]
    column = x[:, None] + along[None, :]
    there = (row >= 0) & (row < height) & (column >= 0) & (column < width) & (tap < taps)[None, :] & inside[:, None]
    offset = tap % channels * plane + (down * width + along) * pixel
    value = tl.load(source + (base + (y * width + x) * pixel)[:, None] + offset[None, :], there, 0)
    if raw:
        value = value.to(tl.float32)
        if source.dtype.element_ty == tl.uint8:
            value *= 1 / 255
        value = tl.where((tap == taps)[None, :], 1.0, value).to(kind)
    return value


@triton.jit
def larger(best, code, other, number: tl.constexpr):
    """The larger of two numbers, and the code of which it is; what is no number counts as the largest."""
    won = (other > best) | (other != other)
    return tl.where(won, other, best), tl.where(won, number, code)


@triton.jit
def keep_pooled(pooled, codes, best, code, client, position, inside, out, count, outputs: tl.constexpr,
                coded: tl.constexpr, rectified: tl.constexpr):  # fmt: skip
    """Cut off at 0 and store pooled numbers and their codes; `count` positions has each client."""
    if rectified:
        code = tl.where(best <= 0, 4, code)
        best = tl.where(best <= 0, 0.0, best)
    target = (client * count + position)[:, None] * outputs + out[None, :]
    known = inside[:, None] & (out < outputs)[None, :]
    tl.store(pooled + target, best.to(pooled.dtype.element_ty), known)
    if coded:
        tl.store(codes + target, code.to(tl.uint8), known)
