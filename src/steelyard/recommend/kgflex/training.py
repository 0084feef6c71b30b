"""KGFlex in training: a round's local pass of many users at once, and batches with all data in one place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.base.randomness import generator, words_at
from steelyard.recommend.fpl import Learning, descent_weight
from steelyard.recommend.histories import Histories, Items, Triples, draw_triples, round_keys, stretches, user_keys
from steelyard.recommend.interactions import Codes, Flags
from steelyard.recommend.kgflex.model import Knowledge
from steelyard.recommend.kgflex.selection import Selection
from steelyard.recommend.knowledge.features import ItemFeatures
from steelyard.recommend.ranking import Floats
from steelyard.recommend.sparse import Floats32, SparseRows, add_rows


@dataclass(frozen=True, eq=False)
class Intersections:
    """The meeting features of pairs in CSR form: pair j has entries[starts[j] : starts[j + 1]], ascending."""

    starts: Codes
    entries: Items
    """Positions in the block's part of the selection: 0 is the first entry of its first user."""
    rows: Items
    """For each entry, the position of its user in the block."""


class Block:
    """Some users whose features are looked up together; a table of users × features says where each one's lie."""

    def __init__(self, selection: Selection, users: Codes, features: ItemFeatures) -> None:
        self.users, self.sizes = users, selection.sizes[users]
        self.own = stretches(selection.starts[users], self.sizes)
        """The entries of the selection that are these users', in their order."""
        self.owners = np.repeat(np.arange(len(users), dtype=np.int32), self.sizes)
        self._width = features.features
        self._index, self._items = features.matrix.indices, features.matrix.indptr.astype(np.int64)
        self._counts = features.per_item()
        self._where = np.full(len(users) * self._width, -1, dtype=np.int32)
        cells = self.owners.astype(np.int64) * self._width + selection.features[self.own]
        self._where[cells] = np.arange(len(self.own), dtype=np.int32)

    def meet(self, rows: Codes, items: Items) -> Intersections:
        """Return F_u ∩ F_i of pairs, each of a user by her position in the block and an item."""
        counts = self._counts[items]
        pair = np.repeat(np.arange(len(items), dtype=np.int32), counts)
        found = self._where[np.repeat(rows * self._width, counts) + self._index[stretches(self._items[items], counts)]]
        met = np.flatnonzero(found >= 0)
        pair = pair[met]
        starts = np.concatenate([[0], np.cumsum(np.bincount(pair, minlength=len(items)))])
        return Intersections(starts, found[met], rows.astype(np.int32)[pair])


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


# All data in one place: mini-batches of triples, in which private and shared parameters move together.


def central_epoch(
    table: Floats32,
    views: Floats32,
    knowledge: Knowledge,
    histories: Histories,
    users: Codes,
    learning: Learning,
    *,
    batch: int,
    seed: int,
    epoch: int,
    own_rate: float | None = None,
) -> tuple[Floats32, Floats]:
    """Visit as many triples as there are positives; `views` are moved, the new table and users' mean losses returned.

    A triple's user is drawn by her number of items, so that every interaction counts the same; the steps of a batch
    are taken together, all from the parameters before it.
    """
    table = table.copy()
    count = int(histories.drawn_from[users].sum())
    weights = histories.drawn_from[users] / max(count, 1)
    drawn = users[generator(seed, epoch, "", "kgflex central").choice(len(users), size=count, p=weights)]
    keys = round_keys(user_keys(seed, histories.names, "kgflex central")[drawn], epoch)
    # A user who comes up several times in an epoch draws from another position of her stream each time.
    keys = words_at(keys, np.arange(count, dtype=np.uint64))
    triples = draw_triples(histories, drawn, keys, 1)
    losses = np.zeros(histories.users)
    for begin in range(0, count, batch):
        part = slice(begin, begin + batch)
        pairs = (drawn[part], triples.positives[part, 0], triples.negatives[part, 0])
        margins = _batch(table, views, knowledge, *pairs, learning, own_rate or learning.rate)
        losses += np.bincount(drawn[part], np.logaddexp(0, -margins), histories.users)
    return table, losses / np.maximum(np.bincount(drawn, minlength=histories.users), 1)


def _batch(
    table: Floats32,
    views: Floats32,
    knowledge: Knowledge,
    users: Codes,
    liked: Items,
    others: Items,
    learning: Learning,
    own_rate: float,
) -> Floats32:
    """Take one batch's step on both sides; return the margins x̂ of its triples."""
    hers, row = np.unique(users, return_inverse=True)
    block = Block(knowledge.selection, hers, knowledge.items)
    entries, triple, sign = _differences(block, row, liked, others)
    own = block.own[entries]
    feature, gain = knowledge.selection.features[own], knowledge.selection.weights[own] * sign
    with np.errstate(over="ignore", invalid="ignore"):
        mine, shared = views[own], table[feature]
        parts = gain * (np.einsum("ef,ef->e", mine, shared[:, :-1]) + shared[:, -1])
        margins = np.bincount(triple, parts, len(users)).astype(np.float32)
        step: Floats32 = gain * descent_weight(margins)[triple]
        rate, (user, positive, negative) = np.float32(learning.rate), learning.decays
        change: Floats32 = step[:, None] * shared[:, :-1]
        change -= np.float32(user) * mine
        change *= np.float32(own_rate)
        add_rows(views, own, change)
        rows = np.empty_like(shared)
        decay = np.where(sign > 0, np.float32(positive), np.float32(negative))
        rows[:, :-1] = step[:, None] * mine - decay[:, None] * shared[:, :-1]
        rows[:, -1] = step
        add_rows(table, feature, rate * rows)
    return margins


def _differences(block: Block, row: Codes, liked: Items, others: Items) -> tuple[Items, Codes, Floats32]:
    """Return the entries in which the two items of each triple differ, their triples, and c_f."""
    sides = [block.meet(row, items) for items in (liked, others)]
    entries = np.concatenate([side.entries for side in sides])
    triple = np.concatenate([np.repeat(np.arange(len(row)), np.diff(side.starts)) for side in sides])
    sign = np.ones(len(entries), dtype=np.float32)
    sign[len(sides[0].entries) :] = -1
    # A feature of both items stands here twice, next to itself once sorted by triple and entry: both are left out.
    key = triple * max(len(block.own), 1) + entries
    order = np.argsort(key, kind="stable")
    same = key[order][1:] == key[order][:-1]
    alone = ~(np.append(same, False) | np.insert(same, 0, False)) if len(key) else np.zeros(0, dtype=np.bool_)
    kept = order[alone]
    return entries[kept], triple[kept], sign[kept]
