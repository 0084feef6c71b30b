"""KGFlex with all data in one place: mini-batches of triples, in which private and shared parameters move together."""

from __future__ import annotations

import numpy as np

from steelyard.base.randomness import generator, words_at
from steelyard.recommend.fpl import Learning, descent_weight
from steelyard.recommend.interactions import Codes
from steelyard.recommend.kgflex.intersections import Block
from steelyard.recommend.kgflex.model import Knowledge
from steelyard.recommend.ranking import Floats
from steelyard.recommend.sampling import Histories, Items, draw_triples, round_keys, user_keys
from steelyard.recommend.sparse import Floats32, add_rows


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
