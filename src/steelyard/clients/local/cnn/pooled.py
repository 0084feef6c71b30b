"""A convolution with the 2×2 pooling behind it, forward and back, for one client at a time on the CPU.

Two ways to the same numbers: the library's convolution, and Winograd's with fewer multiplications. Images stand
channels last; bias and ReLU come after the pooling, where a quarter of the numbers is left, and are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from numpy.polynomial.polynomial import polyfromroots
from numpy.typing import NDArray
from torch.nn import functional

aten = torch.ops.aten
Corners = tuple[torch.Tensor, ...]
"""The four numbers of each 2×2 pool: upper left, upper right, lower left, lower right."""


class PooledConvolution(Protocol):
    """A convolution and its pooling; `forward` first, then `backward` of the same batch.

    What `backward` returns may lie in memory that the next `forward` uses again.
    """

    def forward(self, images: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """Return the pooled convolution [n, h/2, w/2, out] of images [n, h, w, in] with kernels [out, k · k · in]."""
        ...

    def backward(self, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients at the images and at the kernels from the slope at what `forward` returned."""
        ...


class LibraryConvolution:
    """The library's convolution; use it for large batches, and in half precision, where matrix units do the work."""

    def __init__(self, kernel: int, dtype: torch.dtype = torch.float32) -> None:
        self.kernel, self.dtype = kernel, dtype

    def forward(self, images: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        self.images = images.permute(0, 3, 1, 2).to(self.dtype)  # channels last in memory all the same
        grid = kernels.view(len(kernels), self.kernel, self.kernel, -1)
        self.kernels = grid.permute(0, 3, 1, 2).to(self.dtype)
        raw = functional.conv2d(self.images, self.kernels, padding=self.kernel // 2)
        self.raw = raw.permute(0, 2, 3, 1)
        self.top = largest(corners_of(self.raw))
        return self.top.float().contiguous()  # the library may answer a single image channels first

    def backward(self, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raw, top = self.raw, self.top
        corners = corners_of(raw)
        for corner in corners:
            corner.eq_(top)
        send_back(slope.to(self.dtype), corners)
        raw[:, 2 * top.shape[1] :].zero_()  # an odd last row or column is in no pool
        raw[:, :, 2 * top.shape[2] :].zero_()
        # Asked for together, the two gradients take longer than one by one.
        at_images, at_kernels = self._gradient(raw, inputs=True), self._gradient(raw, inputs=False)
        turned = at_kernels.permute(0, 2, 3, 1).reshape(len(at_kernels), -1)
        return at_images.permute(0, 2, 3, 1).float(), turned.float()

    def _gradient(self, slope: torch.Tensor, *, inputs: bool) -> torch.Tensor:
        edge = [self.kernel // 2] * 2
        wanted = [inputs, not inputs, False]
        both = aten.convolution_backward(
            slope.permute(0, 3, 1, 2), self.images, self.kernels, None, [1, 1], edge, [1, 1], False, [0, 0], 1, wanted
        )
        return both[0] if inputs else both[1]


def corners_of(images: torch.Tensor) -> Corners:
    """Return the four corners of the 2×2 pools of images [n, height, width, channels], as views."""
    height, width = images.shape[1] // 2 * 2, images.shape[2] // 2 * 2
    whole = images[:, :height, :width]
    return whole[:, ::2, ::2], whole[:, ::2, 1::2], whole[:, 1::2, ::2], whole[:, 1::2, 1::2]


def largest(corners: Corners, top: torch.Tensor | None = None) -> torch.Tensor:
    """Return the largest of four corners, number by number."""
    top = torch.maximum(corners[0], corners[1], out=top)
    torch.maximum(top, corners[2], out=top)
    return torch.maximum(top, corners[3], out=top)


def send_back(slope: torch.Tensor, corners: Corners) -> None:
    """Send each slope back to the first corner that holds a 1 (the largest); corners become slopes.

    In the corners' own memory and in floats throughout: torch's comparisons into bytes, and what is done with those,
    take several times as long, and its own way back through a pool fills fresh memory with zeros first.
    """
    first, second, third, fourth = corners
    left = slope - first.mul_(slope)
    left.sub_(second.mul_(left))
    left.sub_(third.mul_(left))
    fourth.mul_(left)


class Scratch:
    """Scratch memory that every step uses again: the same tensor lies at the same address, still near the core."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._most = 0

    def grown(self, samples: int) -> bool:
        """Say whether a batch is larger than any before; then all views are stale and are to be made anew."""
        if samples <= self._most:
            return False
        self._most = samples
        self._kept.clear()
        return True

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return memory of this name in this shape; what the largest batch took serves the smaller ones too."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < prod(shape):
            kept = self._kept[name] = torch.empty(prod(shape))
        return kept[: prod(shape)].view(shape)


# Winograd's minimal filtering. Four outputs in a row of a k-tap filter need k + 3 products instead of 4k, when inputs,
# filter and outputs are moved to the values of polynomials at k + 3 points and back (Toom and Cook's multiplication):
# y = Aᵀ[(G g) ⊙ (Bᵀ d)]. In both directions, tiles of 4×4 outputs take (k + 3)² products instead of 16k²: 64 instead of
# 400 for k = 5. Over channels each of them is one matrix product; the ways back are the transposed ones. Sums of
# float32 lose about one digit against the direct way (errors of 3e-6 of the size of the result instead of 5e-7).


TILE = 4
"""Outputs of a tile in each direction: two pools."""
POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)
"""Where polynomials are evaluated, besides at infinity; small numbers keep the sums well behaved."""
KERNELS = (3, 5)


@dataclass(frozen=True, eq=False)
class _Table:
    """Memory and views for batches of one shape; made once, since threads wait for each other over every call.

    Tiles and products are [side², tiles of all images, channels], and the same memory as matrices with side² rows.
    """

    inner: torch.Tensor
    """The images inside their borders of 0."""
    overlapping: torch.Tensor
    tiles: tuple[torch.Tensor, torch.Tensor]
    """The tiles as cut, and later their slopes: as laid out, and as a matrix."""
    inputs: tuple[torch.Tensor, torch.Tensor]
    products: tuple[torch.Tensor, torch.Tensor]
    outputs: torch.Tensor
    whole: torch.Tensor
    """The outputs as [pool down, 2, pool across, 2, image, tile down, tile across, out]."""
    corners: Corners
    top: torch.Tensor
    spread: torch.Tensor
    """`top` so that it stands beside `whole`."""
    joined: torch.Tensor
    joins: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Where each part of the tiles' slopes is added."""
    images: torch.Tensor


class WinogradConvolution:
    """A `PooledConvolution` in tiles of 4×4; use it for batches whose tiles stay near the core, one on every thread."""

    def __init__(self, kernel: int) -> None:
        self.kernel = kernel
        self.side = kernel + TILE - 1
        self.moves = transforms(kernel)
        self._scratch = Scratch()
        self._tables: dict[tuple[int, ...], _Table] = {}

    def forward(self, images: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        count, height, width, channels = images.shape
        key = (*images.shape, len(kernels))
        table = self._table = self._tables.get(key) or self._laid(key)
        table.inner.copy_(images)
        table.tiles[0].copy_(table.overlapping)
        torch.mm(self.moves.inputs, table.tiles[1], out=table.inputs[1])
        turned = kernels.view(-1, self.kernel**2, channels).permute(1, 2, 0).reshape(self.kernel**2, -1)
        self._filters = torch.mm(self.moves.filters, turned).view(self.side**2, channels, -1)
        torch.bmm(table.inputs[0], self._filters, out=table.products[0])
        torch.mm(self.moves.outputs, table.products[1], out=table.outputs)
        largest(table.corners, table.top)
        # [pool down, pool across, image, tile down, tile across, out] → [image, down, across, out]
        pools = table.top.permute(2, 3, 0, 4, 1, 5)
        whole = pools.reshape(count, 2 * pools.shape[1], 2 * pools.shape[3], -1)
        return whole[:, : height // 2, : width // 2].contiguous()

    def backward(self, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table, filters = self._table, self._filters
        _, _, count, down, across, channels = table.top.shape
        padded = slope.new_zeros((count, 2 * down, 2 * across, channels))
        padded[:, : slope.shape[1], : slope.shape[2]] = slope
        table.whole.eq_(table.spread)
        send_back(padded.view(count, down, 2, across, 2, channels).permute(2, 4, 0, 1, 3, 5), table.corners)
        torch.mm(self.moves.outputs.t(), table.outputs, out=table.products[1])
        torch.bmm(table.products[0], filters.transpose(1, 2), out=table.tiles[0].view(table.inputs[0].shape))
        torch.bmm(table.inputs[0].transpose(1, 2), table.products[0], out=filters)
        torch.mm(self.moves.inputs.t(), table.tiles[1], out=table.inputs[1])
        table.joined.zero_()
        for target, part in table.joins:
            target.add_(part)
        turned = self.moves.filters.t() @ filters.view(self.side**2, -1)
        return table.images, turned.view(self.kernel**2, -1, channels).permute(2, 0, 1).reshape(channels, -1)

    def _laid(self, key: tuple[int, ...]) -> _Table:
        count, height, width, channels, filters = key
        side, edge, scratch = self.side, self.kernel // 2, self._scratch.tensor
        down, across = -(-height // TILE), -(-width // TILE)
        if self._scratch.grown(count):
            self._tables.clear()
        # The borders must stay 0, so batches of another size have images of their own.
        around = (TILE * down + self.kernel - 1, TILE * across + self.kernel - 1)
        padded = scratch(f"images {count}", count, *around, channels).zero_()
        image, row, column, channel = padded.stride()
        shape = (side, side, count, down, across, channels)
        steps = (row, column, image, TILE * row, TILE * column, channel)
        tiles, inputs = scratch("tiles", *shape), scratch("inputs", side**2, count * down * across, channels)
        products = scratch("products", side**2, count * down * across, filters)
        outputs = scratch("outputs", TILE**2, count * down * across * filters)
        whole = outputs.view(2, 2, 2, 2, count, down, across, filters)
        top = scratch("top", 2, 2, count, down, across, filters)
        joined, joins = self._joins(inputs.view(shape))
        table = _Table(
            inner=padded[:, edge : edge + height, edge : edge + width],
            overlapping=padded.as_strided(shape, steps),
            tiles=(tiles, tiles.view(side**2, -1)),
            inputs=(inputs, inputs.view(side**2, -1)),
            products=(products, products.view(side**2, -1)),
            outputs=outputs,
            whole=whole,
            corners=tuple(whole[:, a, :, b] for a, b in product((0, 1), (0, 1))),
            top=top,
            spread=top[:, None, :, None],
            joined=joined,
            joins=joins,
            images=joined.flatten(1, 2).flatten(2, 3)[:, edge : edge + height, edge : edge + width],
        )
        self._tables[key] = table
        return table

    def _joins(self, slopes: torch.Tensor) -> tuple[torch.Tensor, tuple[tuple[torch.Tensor, torch.Tensor], ...]]:
        """Lay out how overlapping tiles are summed: a tile reaches into as many others as its side holds fours."""
        _, _, count, down, across, channels = slopes.shape
        reach = -(-self.side // TILE)
        shape = (count, down + reach - 1, TILE, across + reach - 1, TILE, channels)
        joined = self._scratch.tensor("joined", *shape)
        joins: list[tuple[torch.Tensor, torch.Tensor]] = []
        for p, q in product(range(reach), range(reach)):
            part = slopes[TILE * p : TILE * (p + 1), TILE * q : TILE * (q + 1)].permute(2, 3, 0, 4, 1, 5)
            joins.append((joined[:, p : p + down, : part.shape[2], q : q + across, : part.shape[4]], part))
        return joined, tuple(joins)


@dataclass(frozen=True, eq=False)
class Moves:
    """The three linear maps of both directions at once: kron(Bᵀ, Bᵀ), kron(G, G) and kron(Aᵀ, Aᵀ)."""

    inputs: torch.Tensor
    filters: torch.Tensor
    outputs: torch.Tensor


@cache
def transforms(kernel: int) -> Moves:
    """Return the maps of F(4, kernel), exact until they are rounded to float32."""
    points = POINTS[: kernel + TILE - 2]
    maps = (_interpolating(points), _evaluating(points, kernel), _evaluating(points, TILE).T)
    return Moves(*(torch.from_numpy(np.kron(rows, rows)).float() for rows in maps))


def _evaluating(points: tuple[float, ...], length: int) -> NDArray[np.floating[Any]]:
    """Return the matrix that evaluates a polynomial of so many coefficients at the points, and at infinity."""
    return np.vstack([np.vander(points, length, increasing=True), np.eye(length)[-1]])


def _interpolating(points: tuple[float, ...]) -> NDArray[np.floating[Any]]:
    """Return a row of coefficients for each point: of the polynomial that is 1 there and 0 at all others."""
    others = [[*points[:place], *points[place + 1 :]] for place in range(len(points))]
    steps = [prod(point - other for other in rest) for point, rest in zip(points, others, strict=True)]
    finite = np.array([polyfromroots(rest) for rest in others]) / np.array(steps)[:, None]
    return np.vstack([np.pad(finite, ((0, 0), (0, 1))), polyfromroots(points)]) + 0.0  # no −0
