"""A round's local pass of many users at once: one number per feature in place of vectors (see `model`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.recommend.fpl import Learning, descent_weight
from steelyard.recommend.interactions import Codes, Flags
from steelyard.recommend.kgflex.intersections import Block, Intersections
from steelyard.recommend.kgflex.model import Knowledge
from steelyard.recommend.sampling import Items, Triples
from steelyard.recommend.sparse import Floats32, SparseRows

_LOOKUPS = 1 << 22
"""About how many features of items are looked up together; it bounds the memory of a block."""


@dataclass(frozen=True, eq=False)
class FeaturePass:
    """What a local pass leaves: new private vectors, what is sent, and the loss of each triple."""

    entries: Codes
    """The entries of the selection that are the users', in their order."""
    vectors: Floats32
    """[entries, factors]"""
    changes: SparseRows
    losses: Floats32
    """[users, T]: −ln σ(x̂) of each triple when it was visited."""


def local_pass(
    table: Floats32,
    views: Floats32,
    knowledge: Knowledge,
    users: Codes,
    triples: Triples,
    sent: Flags,
    learning: Learning,
    threads: int = 1,
    own_rate: float | None = None,
) -> FeaturePass:
    """Let each user visit her triples in order; users go through in blocks, whose size does not change the numbers.

    `own_rate` is the step of users' own vectors, the shared rate unless it is given.
    """
    per_item = knowledge.items.matrix.nnz / max(knowledge.items.items, 1)
    lookups = max(1, int(2 * per_item * triples.positives.shape[1]))
    step = max(16, min(1024, _LOOKUPS // lookups))

    def part(start: int) -> FeaturePass:
        rows = slice(start, start + step)
        work = _Pass(table, views, knowledge, users[rows], learning, learning.rate if own_rate is None else own_rate)
        return work.through(triples.select(rows), sent[rows])

    if len(users) <= step:
        return part(0)
    with ThreadPoolExecutor(threads) as pool:
        return _joined(list(pool.map(part, range(0, len(users), step))), learning.rate)


def _joined(parts: list[FeaturePass], rate: float) -> FeaturePass:
    firsts = np.cumsum([0, *(part.changes.clients for part in parts)])
    owners = [part.changes.owners + int(first) for part, first in zip(parts, firsts, strict=False)]
    changes = SparseRows(
        clients=int(firsts[-1]),
        owners=np.concatenate(owners).astype(np.int32),
        rows=np.concatenate([part.changes.rows for part in parts]),
        values=np.concatenate([part.changes.values for part in parts]),
        rate=rate,
    )
    return FeaturePass(
        entries=np.concatenate([part.entries for part in parts]),
        vectors=np.concatenate([part.vectors for part in parts]),
        changes=changes,
        losses=np.concatenate([part.losses for part in parts]),
    )


class _Pass:
    """The pass of one block; every array has a number per entry of the block, that is per user and feature of hers."""

    def __init__(
        self,
        table: Floats32,
        views: Floats32,
        knowledge: Knowledge,
        users: Codes,
        learning: Learning,
        own_rate: float,
    ) -> None:
        self.learning, self.own_rate = learning, own_rate
        self.block = block = Block(knowledge.selection, users, knowledge.items)
        self.features = knowledge.selection.features[block.own]
        self.gains = knowledge.selection.weights[block.own]
        self.views, self.shared = views[block.own], table[self.features]
        vectors, self.biases = self.shared[:, :-1], self.shared[:, -1]
        self.products = np.einsum("ef,ef->e", self.views, vectors)
        """p_f · g_f, kept up to date."""
        self.norms = np.einsum("ef,ef->e", vectors, vectors)
        count = len(block.own)
        self.scale, self.along = np.ones(count, np.float32), np.zeros(count, np.float32)
        """p_f = scale p_f⁰ + along g_f"""
        self.on_view, self.on_shared, self.on_bias, self.decay = (np.zeros(count, np.float32) for _ in range(4))
        """What is sent: on_view p_f⁰ + (on_shared − decay) g_f for the vector, on_bias for the bias."""
        self.touched = np.zeros(count, np.bool_)
        self._mark = np.zeros(count, np.float32)

    def through(self, triples: Triples, sent: Flags) -> FeaturePass:
        """Visit all triples; all users take their t-th triple together."""
        users, count = triples.positives.shape
        liked, other = (self._meet(items) for items in (triples.positives, triples.negatives))
        margins = np.empty((users, count), dtype=np.float32)
        every = bool(sent.all())
        with np.errstate(over="ignore", invalid="ignore"):
            for t in range(count):
                real = None if triples.real is None else triples.real[:, t]
                sides = (_of_step(liked, t, users), _of_step(other, t, users))
                margins[:, t] = self._step(*sides, None if every else sent[:, t], real)
            vectors = self.scale[:, None] * self.views
            vectors += self.along[:, None] * self.shared[:, :-1]
            losses = np.logaddexp(np.float32(0), -margins)
            return FeaturePass(self.block.own, vectors, self._changes(users), losses)

    def _meet(self, items: Items) -> Intersections:
        """Look up all triples' items, those of the first step first."""
        users, count = items.shape
        return self.block.meet(np.tile(np.arange(users), count), np.ascontiguousarray(items.T).reshape(-1))

    def _step(
        self,
        liked: tuple[Items, Items],
        other: tuple[Items, Items],
        sent: Flags | None,
        real: NDArray[np.bool_] | None,
    ) -> Floats32:
        """Let each user visit one triple; return the margins x̂."""
        mark = self._mark
        mark[liked[0]] = 1
        mark[other[0]] -= 1
        entries = np.concatenate([liked[0], other[0]])
        rows = np.concatenate([liked[1], other[1]])
        signs = mark[entries]  # c_f
        mark[entries] = 0
        # What both items have stands here twice, with sign 0; of the others each entry stands here once.
        differ = np.flatnonzero(signs)
        moved, owner, sign = entries[differ], rows[differ], signs[differ]
        gain: Floats32 = self.gains[moved] * sign
        parts = gain * (self.products[moved] + self.biases[moved])
        margin = np.bincount(owner, parts, len(self.block.users)).astype(np.float32)
        weight = descent_weight(margin)
        step = weight[owner] * gain
        if sent is None:
            self._collect(moved, step, sign)
        else:
            self._collect_sent(entries, rows, signs, len(liked[0]), sent, weight)
        if real is not None:
            hers = real[owner]
            moved, step = moved[hers], step[hers]
        self._move(moved, step)
        return margin

    def _collect_sent(
        self, entries: Items, rows: Items, signs: Floats32, liked: int, sent: Flags, weight: Floats32
    ) -> None:
        """Collect what is sent where some positive items' parts are not."""
        shown = sent[rows]
        signs = np.where(shown, signs, np.float32(-1))
        signs[:liked][~shown[:liked]] = 0
        kept = np.flatnonzero(signs)
        entries, sign = entries[kept], signs[kept]
        self._collect(entries, weight[rows[kept]] * self.gains[entries] * sign, sign)

    def _collect(self, entries: Items, step: Floats32, sign: Floats32) -> None:
        """Add the changes of shared rows, with p_f as it is now."""
        self.on_view[entries] += step * self.scale[entries]
        self.on_shared[entries] += step * self.along[entries]
        self.on_bias[entries] += step
        _, positive, negative = self.learning.decays
        if positive or negative:
            self.decay[entries] += np.where(sign > 0, np.float32(positive), np.float32(negative))
        self.touched[entries] = True

    def _move(self, entries: Items, step: Floats32) -> None:
        """Move the users' own vectors along g_f."""
        shrinkage = np.float32(1 - self.own_rate * self.learning.decays[0])
        change = np.float32(self.own_rate) * step
        self.products[entries] = shrinkage * self.products[entries] + change * self.norms[entries]
        self.scale[entries] *= shrinkage
        self.along[entries] = shrinkage * self.along[entries] + change

    def _changes(self, users: int) -> SparseRows:
        """Return the rows that are sent: each feature once, those that no triple told apart left out."""
        rows = np.flatnonzero(self.touched)
        values = np.empty((len(rows), self.shared.shape[1]), dtype=np.float32)
        values[:, :-1] = self.on_view[rows, None] * self.views[rows]
        values[:, :-1] += (self.on_shared - self.decay)[rows, None] * self.shared[rows, :-1]
        values[:, -1] = self.on_bias[rows]
        return SparseRows(users, self.block.owners[rows], self.features[rows], values, self.learning.rate)


def _of_step(found: Intersections, step: int, users: int) -> tuple[Items, Items]:
    """Return the entries and their users of one step's pairs."""
    part = slice(int(found.starts[step * users]), int(found.starts[(step + 1) * users]))
    return found.entries[part], found.rows[part]
