"""Rounds of many users at once (pFPL, pFPL+), for whole simulated populations: threads, and a compact payload."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.messages.updates import Floats
from steelyard.privacy.noise import Source
from steelyard.recommend.fpl import Learning, LocalPass, changes, local_pass
from steelyard.recommend.histories import Items, Triples
from steelyard.recommend.interactions import Codes, Flags
from steelyard.recommend.sparse import Floats32, SparseRows, combine_each


def local_pass_in_blocks(
    table: Floats32, vectors: Floats32, triples: Triples, learning: Learning, threads: int = 1, block: int = 1024
) -> LocalPass:
    """Do a local pass in blocks of users, on several threads; the numbers are those of one big block.

    Use it for whole populations: a block's vectors stay in the processor's cache through all its steps.
    """
    users, count = triples.positives.shape
    if users <= block:
        return local_pass(table, vectors, triples, learning)
    gradients = np.empty((users, count, table.shape[1]), dtype=np.float32)

    def part(start: int) -> LocalPass:
        rows = slice(start, start + block)
        return local_pass(table, vectors[rows], triples.select(rows), learning, gradients[rows])

    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(part, range(0, users, block)))
    return LocalPass(np.concatenate([p.vectors for p in parts]), gradients, np.concatenate([p.losses for p in parts]))


@dataclass(frozen=True, eq=False)
class PairRows:
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
        """Return what the users send, one row per triple and item."""
        return changes(self.table, self.triples, self.sent, self.gradients, self.learning)

    def noised(self, clip: float, deviation: float, source: Source) -> SparseRows:
        """Return what the users send with local noise on every row of the table."""
        return self.sparse().noised(len(self.table), clip, deviation, source)

    def merged(self) -> SparseRows:
        """Return the rows as each user sends them: every item once, changes summed, in ascending order."""
        return self.sparse().merged()

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


def distinct_rows(triples: Triples, sent: Flags) -> Codes:
    """Return how many distinct rows each user sends; her positives and negatives never overlap."""
    return _distinct(np.where(sent, triples.positives, -1)) + _distinct(triples.negatives)


def _distinct(items: Items) -> Codes:
    ordered = np.sort(items, axis=1)
    fresh = np.ones(ordered.shape, dtype=np.bool_)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return (fresh & (ordered >= 0)).sum(axis=1)
