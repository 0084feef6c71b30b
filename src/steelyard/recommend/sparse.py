"""Updates as sparse rows of a shared table: what users send, and how the server sums it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.messages import Floats
from steelyard.recommend.fpl import Floats32, Learning
from steelyard.recommend.interactions import Codes, Flags
from steelyard.recommend.sampling import Items

GRAM_BLOCK = 256
"""Users whose inner products with all others are computed together."""


@dataclass(frozen=True, eq=False)
class SparseRows:
    """The changes that users ask of some rows of the shared table; a row may be named more than once by a user.

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
        many = np.atleast_2d(np.asarray(weights, dtype=np.float64))
        table = parameters.detach().cpu()
        found = [table + torch.from_numpy(self._sum(row, table.numel())) for row in many]
        return torch.stack(found) if np.ndim(weights) > 1 else found[0]

    def _sum(self, weights: Floats, size: int) -> Floats32:
        """Return α · n · Σ w_u Δ_u as a flat vector; rows are added in the order of users."""
        from scipy import sparse

        say = (self.rate * self.clients * weights).astype(np.float32)
        width = self.values.shape[1]
        # One column per row sent, with one entry: the product walks through the rows in order and adds each to its
        # place in a table that fits the cache, which is faster than any scatter.
        places = (say[self.owners], self.rows, np.arange(len(self.rows) + 1, dtype=np.int32))
        scatter = sparse.csc_array(places, shape=(size // width, len(self.rows)))
        return np.asarray(scatter @ self.values, dtype=np.float32).reshape(-1)

    @cached_property
    def _merged(self) -> SparseRows:
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

    def sent(self) -> SparseRows:
        """Return the rows as each user sends them: every item once, changes summed, in ascending order."""
        return self._merged

    def divergence(self, parameters: torch.Tensor) -> Floats:
        whole = self._merged
        squares = np.square(whole.values.astype(np.float64)).sum(axis=1)
        return self.rate * np.sqrt(np.bincount(whole.owners, weights=squares, minlength=self.clients))

    def gram(self, parameters: torch.Tensor) -> Floats:
        from scipy import sparse  # late, for a quick start

        whole = self._merged
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

    def select(self, keep: Sequence[int]) -> SparseRows:
        place = np.full(self.clients, -1, dtype=np.int32)
        place[list(keep)] = np.arange(len(keep), dtype=np.int32)
        owners = place[self.owners]
        kept = np.flatnonzero(owners >= 0)
        # Positions may come in another order than before; sums run in the order of users.
        kept = kept[np.argsort(owners[kept], kind="stable")]
        return SparseRows(len(keep), owners[kept], self.rows[kept], self.values[kept], self.rate)

    def finite(self) -> NDArray[np.bool_]:
        good = np.isfinite(self.values.sum(axis=1))
        return np.bincount(self.owners[~good], minlength=self.clients) == 0


@dataclass(frozen=True, eq=False)
class PairRows:
    """The sparse rows of a whole simulated cohort, kept as the triples they come from: half the memory, the same sum.

    A triple changes two rows by the same push with opposite signs, less the decay of each: push − λ⁺ (q⁺, 0) for i⁺,
    if π lets it through, and −push − λ⁻ (q⁻, 0) for i⁻. `sparse()` writes out what each user really sends.
    """

    positives: Items
    """[users, T]"""
    passed: Flags
    """[users, T]: which positive changes are sent."""
    negatives: Items
    push: Floats32
    """[users, T, width]"""
    table: Floats32
    """[items, width]: the shared table as it was at the start of the round."""
    learning: Learning

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        many = np.atleast_2d(np.asarray(weights, dtype=np.float64))
        start = parameters.detach().cpu()
        found = [start + torch.from_numpy(self._sum(row).reshape(-1)) for row in many]
        return torch.stack(found) if np.ndim(weights) > 1 else found[0]

    def _sum(self, weights: Floats) -> Floats32:
        """Return α · n · Σ w_u Δ_u, [items, width]; triples are added in the order of users."""
        from scipy import sparse

        (users, steps), (items, width) = self.positives.shape, self.table.shape
        say = (self.learning.rate * users * weights).astype(np.float32)
        up = np.where(self.passed, say[:, None], np.float32(0))
        down = np.broadcast_to(say[:, None], (users, steps))
        # One column per triple with two entries: the product walks through the pushes in order and adds each to two
        # places in a table that fits the cache, which is faster than any scatter.
        signs = np.stack([up, -down], axis=2).reshape(-1)
        rows = np.stack([self.positives, self.negatives], axis=2).reshape(-1)
        ends = np.arange(0, 2 * users * steps + 1, 2, dtype=np.int32)
        scatter = sparse.csc_array((signs, rows, ends), shape=(items, users * steps))
        total = np.asarray(scatter @ self.push.reshape(-1, width), dtype=np.float32)
        _, positive, negative = self.learning.decays
        decay = positive * np.bincount(self.positives.reshape(-1), up.reshape(-1), items)
        decay += negative * np.bincount(self.negatives.reshape(-1), down.reshape(-1), items)
        total[:, :-1] -= decay[:, None].astype(np.float32) * self.table[:, :-1]
        return total

    def sparse(self) -> SparseRows:
        """Return what the users send, row by row: every negative, and the positives that π lets through."""
        users, steps, width = self.push.shape
        _, positive, negative = self.learning.decays
        values = np.stack([self.push, -self.push], axis=2)
        values[:, :, 0, :-1] -= np.float32(positive) * self.table[self.positives][..., :-1]
        values[:, :, 1, :-1] -= np.float32(negative) * self.table[self.negatives][..., :-1]
        keep = np.stack([self.passed, np.ones_like(self.passed)], axis=2).reshape(-1)
        rows = np.stack([self.positives, self.negatives], axis=2).reshape(-1)
        owners = np.repeat(np.arange(users, dtype=np.int32), 2 * steps)
        return SparseRows(users, owners[keep], rows[keep], values.reshape(-1, width)[keep], self.learning.rate)

    def sent(self) -> SparseRows:
        """Return the rows as each user sends them: every item once, changes summed, in ascending order."""
        return self.sparse().sent()

    def divergence(self, parameters: torch.Tensor) -> Floats:
        return self.sparse().divergence(parameters)

    def gram(self, parameters: torch.Tensor) -> Floats:
        return self.sparse().gram(parameters)

    def select(self, keep: Sequence[int]) -> PairRows:
        rows = list(keep)
        return replace(
            self,
            positives=self.positives[rows],
            passed=self.passed[rows],
            negatives=self.negatives[rows],
            push=self.push[rows],
        )

    def finite(self) -> NDArray[np.bool_]:
        # One sum over everything is finite in all but broken rounds; only then is it worth looking at each user.
        with np.errstate(over="ignore", invalid="ignore"):
            whole = bool(np.isfinite(self.push.sum()))
        if whole:
            return np.ones(len(self.push), dtype=np.bool_)
        return np.asarray(np.isfinite(self.push).reshape(len(self.push), -1).all(axis=1))


def distinct_rows(positives: Items, sent: Flags, negatives: Items) -> Codes:
    """Return how many distinct rows each user sends; positives and negatives never overlap."""
    return _distinct(np.where(sent, positives, -1)) + _distinct(negatives)


def _distinct(items: Items) -> Codes:
    ordered = np.sort(items, axis=1)
    fresh = np.ones(ordered.shape, dtype=np.bool_)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return (fresh & (ordered >= 0)).sum(axis=1)
