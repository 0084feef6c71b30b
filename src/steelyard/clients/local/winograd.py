"""A convolution with fewer multiplications (Winograd's minimal filtering), pooled, for small batches on the CPU.

Four outputs in a row of a k-tap filter need k + 3 products instead of 4k, when inputs, filter and outputs are moved
to the values of polynomials at k + 3 points and back (Toom and Cook's multiplication): y = Aᵀ[(G g) ⊙ (Bᵀ d)].
In both directions, tiles of 4×4 outputs take (k + 3)² products instead of 16k²: 64 instead of 400 for k = 5. Over
channels each of them is one matrix product; the ways back are the transposed ones. Sums of float32 lose about one
digit against the direct way (errors of 3e-6 of the size of the result instead of 5e-7).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from math import prod

import torch

from steelyard.clients.local.pooled import Corners, largest, send_back

TILE = 4
"""Outputs of a tile in each direction: two pools."""
POINTS = (0, 1, -1, 2, -2, Fraction(1, 2), Fraction(-1, 2))
"""Where polynomials are evaluated, besides at infinity; small numbers keep the sums well behaved."""
KERNELS = (3, 5)


class WinogradConvolution:
    """A `PooledConvolution` in tiles of 4×4; use it for batches whose tiles stay near the core."""

    def __init__(self, kernel: int) -> None:
        self.kernel = kernel
        self.side = kernel + TILE - 1
        self.moves = transforms(kernel)
        self._kept: dict[str, torch.Tensor] = {}
        self._clean: torch.Size | None = None

    def forward(self, images: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        count, height, width, channels = self.shape = images.shape
        self.tiles = (-(-height // TILE), -(-width // TILE))
        taps = self.kernel**2
        self.inputs = self._moved("inputs", self.moves.inputs, self._cut(images)).view(self.side**2, -1, channels)
        turned = kernels.view(-1, taps, channels).permute(1, 2, 0).reshape(taps, -1)
        self.filters = self._moved("filters", self.moves.filters, turned).view(self.side**2, channels, -1)
        products = self._room("products", self.side**2, self.inputs.shape[1], len(kernels))
        torch.bmm(self.inputs, self.filters, out=products)
        self.outputs = self._moved("outputs", self.moves.outputs, products.view(self.side**2, -1))
        self.top = largest(self._corners())
        # [pool down, pool across, image, tile down, tile across, out] → [image, down, across, out]
        whole = self.top.permute(2, 3, 0, 4, 1, 5).reshape(count, 2 * self.tiles[0], 2 * self.tiles[1], -1)
        return whole[:, : height // 2, : width // 2].contiguous()

    def backward(self, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        down, across = self.tiles
        padded = slope.new_zeros((len(slope), 2 * down, 2 * across, slope.shape[-1]))
        padded[:, : slope.shape[1], : slope.shape[2]] = slope
        pools = padded.view(len(slope), down, 2, across, 2, -1).permute(2, 4, 0, 1, 3, 5)
        send_back(pools, self._corners(), self.top)
        products = self._moved("products", self.moves.outputs.t(), self.outputs)
        products = products.view(self.side**2, -1, slope.shape[-1])
        inputs = self._room("tiles", *self.inputs.shape)
        torch.bmm(products, self.filters.transpose(1, 2), out=inputs)
        filters = torch.bmm(self.inputs.transpose(1, 2), products, out=self.filters)
        at_kernels = self.moves.filters.t() @ filters.view(self.side**2, -1)
        at_images = self._join(self._moved("inputs", self.moves.inputs.t(), inputs.view(self.side**2, -1)))
        turned = at_kernels.view(self.kernel**2, -1, slope.shape[-1]).permute(2, 0, 1)
        return at_images, turned.reshape(slope.shape[-1], -1)

    def _room(self, name: str, *shape: int) -> torch.Tensor:
        """The same memory for the same thing in every step: it is still near the core then."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < prod(shape):
            kept = self._kept[name] = torch.empty(prod(shape))
        return kept[: prod(shape)].view(shape)

    def _moved(self, name: str, move: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return torch.mm(move, numbers, out=self._room(name, len(move), numbers.shape[1]))

    def _corners(self) -> Corners:
        """The outputs' four corners of every pool: [pool down, pool across, image, tile down, tile across, out]."""
        count, (down, across) = self.shape[0], self.tiles
        whole = self.outputs.view(2, 2, 2, 2, count, down, across, -1)
        return tuple(whole[:, a, :, b] for a, b in product((0, 1), (0, 1)))

    def _cut(self, images: torch.Tensor) -> torch.Tensor:
        """Return overlapping tiles, [side², images · tiles · channels]."""
        count, height, width, channels = self.shape
        edge, (down, across) = self.kernel // 2, self.tiles
        around = TILE * down + self.kernel - 1, TILE * across + self.kernel - 1
        padded = self._room("padded", count, *around, channels)
        if padded.shape != self._clean:  # the border stays 0 from step to step
            padded.zero_()
            self._clean = padded.shape
        padded[:, edge : edge + height, edge : edge + width] = images
        image, row, column, channel = padded.stride()
        tiles = padded.as_strided(
            (self.side, self.side, count, down, across, channels),
            (row, column, image, TILE * row, TILE * column, channel),
        )
        return self._room("tiles", *tiles.shape).copy_(tiles).view(self.side**2, -1)

    def _join(self, tiles: torch.Tensor) -> torch.Tensor:
        """Sum overlapping tiles back into images; a tile reaches into as many others as its side holds fours."""
        count, height, width, channels = self.shape
        edge, (down, across) = self.kernel // 2, self.tiles
        reach = -(-self.side // TILE)
        padded = self._room("joined", count, down + reach - 1, TILE, across + reach - 1, TILE, channels).zero_()
        grid = tiles.view(self.side, self.side, count, down, across, channels)
        for p, q in product(range(reach), range(reach)):
            part = grid[TILE * p : TILE * (p + 1), TILE * q : TILE * (q + 1)].permute(2, 3, 0, 4, 1, 5)
            padded[:, p : p + down, : part.shape[2], q : q + across, : part.shape[4]].add_(part)
        whole = padded.view(count, TILE * (down + reach - 1), TILE * (across + reach - 1), channels)
        return whole[:, edge : edge + height, edge : edge + width]


@dataclass(frozen=True, eq=False)
class Moves:
    """The three linear maps of both directions at once: kron(Bᵀ, Bᵀ), kron(G, G) and kron(Aᵀ, Aᵀ)."""

    inputs: torch.Tensor
    filters: torch.Tensor
    outputs: torch.Tensor


@cache
def transforms(kernel: int) -> Moves:
    """Return the maps of F(4, kernel), exact until they are rounded to float32."""
    side = kernel + TILE - 1
    inputs = [list(column) for column in zip(*_inverse(_values(side, side)), strict=True)]
    outputs = [list(column) for column in zip(*_values(side, TILE), strict=True)]
    return Moves(*(_both(rows) for rows in (inputs, _values(side, kernel), outputs)))


def _values(points: int, length: int) -> list[list[Fraction]]:
    """The matrix that evaluates a polynomial of `length` coefficients at `points` points, the last one infinity."""
    finite = [[Fraction(point) ** power for power in range(length)] for point in POINTS[: points - 1]]
    return [*finite, [Fraction(int(power == length - 1)) for power in range(length)]]


def _inverse(rows: list[list[Fraction]]) -> list[list[Fraction]]:
    """Gauss and Jordan, in fractions."""
    size = len(rows)
    work = [[*row, *(Fraction(int(place == number)) for place in range(size))] for number, row in enumerate(rows)]
    for column in range(size):
        pivot = next(number for number in range(column, size) if work[number][column])
        work[column], work[pivot] = work[pivot], work[column]
        work[column] = [value / work[column][column] for value in work[column]]
        for number in range(size):
            if number != column:
                factor = work[number][column]
                work[number] = [a - factor * b for a, b in zip(work[number], work[column], strict=True)]
    return [row[size:] for row in work]


def _both(rows: list[list[Fraction]]) -> torch.Tensor:
    single = torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)
    return torch.kron(single, single).float()
