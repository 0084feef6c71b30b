"""Updates as sparse rows of a shared table: what users send, and how the server adds it up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from steelyard.messages.payloads import Floats, Payload
from steelyard.privacy.noise import Source, lattice_step, normals
from steelyard.recommend.fpl import Learning
from steelyard.recommend.histories import Floats32, Items, Triples
from steelyard.recommend.interactions import Flags

if TYPE_CHECKING:
    import torch

GRAM_BLOCK = 256
"""Users whose inner products with all others are computed together."""


def combine_each(parameters: torch.Tensor, weights: Floats, change: Callable[[Floats], Floats32]) -> torch.Tensor:
    """Return parameters + change(w) for weights[clients], or one row per candidate for [candidates, clients]."""
    import torch  # For speed of start: settings of recommenders are read without it.

    start = parameters.detach().cpu()
    candidates = np.atleast_2d(np.asarray(weights, dtype=np.float64))
    found = [start + torch.from_numpy(change(each)) for each in candidates]
    return torch.stack(found) if np.ndim(weights) > 1 else found[0]


@dataclass(frozen=True, eq=False)
class SparseRows(Payload):
    """The changes that users send for some rows of the shared table; a user may name a row more than once.

    With weights w the new table is Θ + α · n · Σ_u w_u · Δ_u: uniform weights w = 1/n give Eq. 4.10, the plain sum.
    """

    clients: int
    """Number of users n, also those who sent nothing."""
    owners: Items
    """Position of the sender of each row, ascending."""
    rows: Items
    """Number of the item of each row."""
    values: Floats32
    """[rows, width]"""
    rate: float
    """The server's α."""

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        return combine_each(parameters, weights, lambda each: self._sum(each, parameters.numel()))

    def _sum(self, weights: Floats, size: int) -> Floats32:
        """Return α · n · Σ w_u Δ_u as a flat vector; rows are added in the order of users."""
        from scipy import sparse  # For speed of start: only a round that is summed needs it.

        scale = (self.rate * self.clients * weights).astype(np.float32)
        width = self.values.shape[1]
        # One column per row sent, with one entry: the product goes through the rows in order and adds each to its row
        # of a table that fits the cache, which is faster than any scatter.
        entries = (scale[self.owners], self.rows, np.arange(len(self.rows) + 1, dtype=np.int32))
        scatter = sparse.csc_array(entries, shape=(size // width, len(self.rows)))
        return np.asarray(scatter @ self.values, dtype=np.float32).reshape(-1)

    @cached_property
    def merged(self) -> SparseRows:
        """The rows as each user sends them: every item once, changes summed, in ascending order."""
        key = self.owners.astype(np.int64) << 32 | self.rows
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        if not len(key):
            return self
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        sums = np.add.reduceat(self.values[order].astype(np.float64), starts).astype(np.float32)
        distinct = ordered[starts]
        owners, rows = (distinct >> 32).astype(np.int32), (distinct & 0xFFFFFFFF).astype(np.int32)
        return SparseRows(self.clients, owners, rows, sums, self.rate)

    def divergence(self, parameters: torch.Tensor) -> Floats:
        whole = self.merged
        squares = np.square(whole.values.astype(np.float64)).sum(axis=1)
        return self.rate * np.sqrt(np.bincount(whole.owners, weights=squares, minlength=self.clients))

    def gram(self, parameters: torch.Tensor) -> Floats:
        from scipy import sparse  # For speed of start: few criteria ask for it.

        whole = self.merged
        width = whole.values.shape[1]
        starts = np.searchsorted(whole.owners, np.arange(self.clients + 1)) * width
        columns = (whole.rows.astype(np.int64)[:, None] * width + np.arange(width)).reshape(-1)
        values = self.rate * whole.values.astype(np.float64).reshape(-1)
        updates = sparse.csr_array((values, columns, starts), shape=(self.clients, parameters.numel()))
        found = np.zeros((self.clients, self.clients))
        # Some users at a time: the product of all with all has far more intermediate entries than the matrix itself.
        for begin in range(0, self.clients, GRAM_BLOCK):
            found[begin : begin + GRAM_BLOCK] = (updates[begin : begin + GRAM_BLOCK] @ updates.T).toarray()
        return np.tril(found) + np.tril(found, -1).T

    def with_noise(self, items: int, clip: float, deviation: float, source: Source) -> SparseRows:
        """Return what users send with local noise: each one's change clipped to a length, noise on every row.

        Every item gets a row: which items a user names would disclose as much as what she says of them.
        """
        # For speed of start: settings of recommenders are read without torch.
        from steelyard.privacy.clipping import clip_factors

        whole, width = self.merged, self.values.shape[1]
        fine = lattice_step(deviation)
        squares = np.square(whole.values.astype(np.float64)).sum(axis=1)
        factors = clip_factors(np.sqrt(np.bincount(whole.owners, weights=squares, minlength=self.clients)), clip)
        noisy = np.rint(normals(source, self.clients * items * width) * (deviation / fine))
        noisy = noisy.reshape(self.clients, items, width)
        # A change without a length is not sent at all: where it is NaN would disclose the user without noise.
        sound = factors[whole.owners] > 0
        owners, changes = whole.owners[sound], whole.values[sound]
        noisy[owners, whole.rows[sound]] += np.trunc(changes * (factors[owners, None] / fine))
        values = (noisy * fine).astype(np.float32).reshape(-1, width)
        owners = np.repeat(np.arange(self.clients, dtype=np.int32), items)
        return SparseRows(
            self.clients, owners, np.tile(np.arange(items, dtype=np.int32), self.clients), values, self.rate
        )

    def select(self, keep: Sequence[int]) -> SparseRows:
        position = np.full(self.clients, -1, dtype=np.int32)
        position[list(keep)] = np.arange(len(keep), dtype=np.int32)
        owners = position[self.owners]
        kept = np.flatnonzero(owners >= 0)
        # Positions may come in another order than before; sums run in the order of users.
        kept = kept[np.argsort(owners[kept], kind="stable")]
        return SparseRows(len(keep), owners[kept], self.rows[kept], self.values[kept], self.rate)

    def finite(self) -> NDArray[np.bool_]:
        # In float64 a sum of float32 numbers is finite exactly when every term is.
        good = np.isfinite(self.values.sum(axis=1, dtype=np.float64))
        return np.bincount(self.owners[~good], minlength=self.clients) == 0

    def content(self) -> Sequence[NDArray[np.int32]]:
        """Return for each user her rows one after the other: the item's number, then its values."""
        rows = np.concatenate([self.rows[:, None], np.ascontiguousarray(self.values).view(np.int32)], axis=1)
        return np.split(rows, np.searchsorted(self.owners, np.arange(1, self.clients)))


@dataclass(frozen=True, eq=False)
class PairRows(Payload):
    """The changes of a whole simulated cohort, kept as the triples they come from: half the memory, the same sum.

    A triple changes two rows by the same gradient with opposite signs, less the decay of each (see `fpl`). `sparse()`
    writes out what each user really sends.
    """

    triples: Triples
    sent: Flags
    """[users, T]: which positive changes are sent."""
    gradients: Floats32
    """[users, T, width]"""
    table: Floats32
    """[items, width]: the shared table as it was at the start of the round."""
    learning: Learning

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        return combine_each(parameters, weights, lambda each: self._sum(each).reshape(-1))

    def _sum(self, weights: Floats) -> Floats32:
        """Return α · n · Σ w_u Δ_u as a table; rows are added in the order of users."""
        from scipy import sparse  # For speed of start: only a round that is summed needs it.

        positives, negatives = self.triples.positives, self.triples.negatives
        (users, count), (items, width) = positives.shape, self.table.shape
        scale = (self.learning.rate * users * weights).astype(np.float32)
        up = np.where(self.sent, scale[:, None], np.float32(0))
        down = np.broadcast_to(scale[:, None], (users, count))
        # One column per triple with two entries: the product goes through the gradients in order and adds each to two
        # rows of a table that fits the cache, which is faster than any scatter.
        signs = np.stack([up, -down], axis=2).reshape(-1)
        rows = np.stack([positives, negatives], axis=2).reshape(-1)
        ends = np.arange(0, 2 * users * count + 1, 2, dtype=np.int32)
        scatter = sparse.csc_array((signs, rows, ends), shape=(items, users * count))
        total = np.asarray(scatter @ self.gradients.reshape(-1, width), dtype=np.float32)
        _, positive, negative = self.learning.decays
        decay = positive * np.bincount(positives.reshape(-1), up.reshape(-1), items)
        decay += negative * np.bincount(negatives.reshape(-1), down.reshape(-1), items)
        total[:, :-1] -= decay[:, None].astype(np.float32) * self.table[:, :-1]
        return total

    def sparse(self) -> SparseRows:
        """Return Δ_u of each user, row by row (steps 3 and 4 in `fpl`); an item has one row per triple it stands in."""
        users, count, width = self.gradients.shape
        _, positive, negative = self.learning.decays
        liked, others = self.triples.positives, self.triples.negatives
        values = np.stack([self.gradients, -self.gradients], axis=2)
        values[:, :, 0, :-1] -= np.float32(positive) * self.table[liked][..., :-1]
        values[:, :, 1, :-1] -= np.float32(negative) * self.table[others][..., :-1]
        keep = np.stack([self.sent, np.ones_like(self.sent)], axis=2).reshape(-1)
        rows = np.stack([liked, others], axis=2).reshape(-1)
        owners = np.repeat(np.arange(users, dtype=np.int32), 2 * count)
        return SparseRows(users, owners[keep], rows[keep], values.reshape(-1, width)[keep], self.learning.rate)

    def noised(self, clip: float, deviation: float, source: Source) -> SparseRows:
        """Return what the users send with local noise on every row of the table."""
        return self.sparse().with_noise(len(self.table), clip, deviation, source)

    @property
    def merged(self) -> SparseRows:
        """The rows as each user sends them."""
        return self.sparse().merged

    def divergence(self, parameters: torch.Tensor) -> Floats:
        return self.sparse().divergence(parameters)

    def gram(self, parameters: torch.Tensor) -> Floats:
        return self.sparse().gram(parameters)

    def select(self, keep: Sequence[int]) -> PairRows:
        rows = list(keep)
        return PairRows(self.triples.select(rows), self.sent[rows], self.gradients[rows], self.table, self.learning)

    def finite(self) -> NDArray[np.bool_]:
        # One sum over everything is finite in all but broken rounds; only then is it worth looking at each user.
        with np.errstate(over="ignore", invalid="ignore"):
            whole = bool(np.isfinite(self.gradients.sum()))
        if whole:
            return np.ones(len(self.gradients), dtype=np.bool_)
        return np.asarray(np.isfinite(self.gradients).reshape(len(self.gradients), -1).all(axis=1))

    def content(self) -> None:
        """Return None: nobody sends these triples, and each user's change can be made again from the seed."""


@dataclass(frozen=True, eq=False)
class TableChange(Payload):
    """The change of the shared table over many one-user rounds: with one user a round, nothing is weighed."""

    clients: int
    change: torch.Tensor

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        found = parameters.detach().cpu() + self.change
        return found.repeat(len(weights), 1) if np.ndim(weights) > 1 else found

    def divergence(self, parameters: torch.Tensor) -> Floats:
        return np.full(self.clients, float(self.change.norm()))

    def gram(self, parameters: torch.Tensor) -> Floats:
        return np.full((self.clients, self.clients), float(self.change.double().square().sum()))

    def select(self, keep: Sequence[int]) -> TableChange:
        return TableChange(len(keep), self.change)

    def finite(self) -> NDArray[np.bool_]:
        return np.full(self.clients, bool(self.change.isfinite().all()))

    def content(self) -> None:
        """Return None: each user's change went into the table before the next user's was made."""
