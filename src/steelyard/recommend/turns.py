"""Rounds of a single user each, one after the other (sFPL, sFPL+), done many at a time with the same result.

Which user has a turn and which items she draws does not depend on the model, so all turns of an epoch are known
beforehand. Two turns that share neither the user nor an item do not touch each other: they may be done together. Each
turn gets the first step after all earlier turns it shares something with, and the turns of a step are one vectorised
local pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.messages import Floats
from steelyard.recommend.fpl import Floats32, Learning, local_pass, single_pass
from steelyard.recommend.interactions import Codes, Flags
from steelyard.recommend.sampling import Triples


def steps_of(users: Codes, triples: Triples) -> Codes:
    """Return the step in which each turn can be done: one more than the last earlier turn it shares something with."""
    last_user: dict[int, int] = {}
    steps: list[int] = []
    if triples.positives.shape[1] == 1:
        last_item: dict[int, int] = {}
        pairs = zip(users.tolist(), triples.positives[:, 0].tolist(), triples.negatives[:, 0].tolist(), strict=True)
        for user, liked, other in pairs:
            step = 1 + max(last_user.get(user, -1), last_item.get(liked, -1), last_item.get(other, -1))
            last_user[user] = last_item[liked] = last_item[other] = step
            steps.append(step)
        return np.array(steps, dtype=np.int64)
    items = np.concatenate([triples.positives, triples.negatives], axis=1)
    last = np.full(int(items.max(initial=0)) + 1, -1, dtype=np.int64)
    for user, touched in zip(users.tolist(), items, strict=True):
        step = 1 + max(last_user.get(user, -1), int(last[touched].max()))
        last_user[user] = last[touched] = step
        steps.append(step)
    return np.array(steps, dtype=np.int64)


def take_turns(
    table: Floats32, vectors: Floats32, users: Codes, triples: Triples, sent: Flags, learning: Learning
) -> Floats32:
    """Do all turns in order: each user starts from the table that the turn before left. Returns the turns' mean losses.

    `table` and `vectors` (one row per user of the population) are changed in place.
    """
    losses = np.empty(len(users), dtype=np.float32)
    steps = steps_of(users, triples)
    order = np.argsort(steps, kind="stable")
    ends = np.cumsum(np.bincount(steps)) if len(steps) else np.zeros(0, dtype=np.int64)
    begin = 0
    for end in ends.tolist():
        turns = order[begin:end]
        begin = end
        real = None if triples.real is None else triples.real[turns]
        mine = Triples(triples.positives[turns], triples.negatives[turns], real)
        alone = len(turns) == 1 and real is None
        done = (single_pass if alone else local_pass)(table, vectors[users[turns]], mine, learning)
        vectors[users[turns]] = done.vectors
        losses[turns] = done.losses.mean(axis=1)
        _apply(table, mine, sent[turns], done.push, learning)
    return losses


def _apply(table: Floats32, triples: Triples, sent: Flags, push: Floats32, learning: Learning) -> None:
    """Add what these turns send to the table."""
    width = table.shape[1]
    _, positive, negative = learning.decays
    passed = sent.reshape(-1)
    liked, other = triples.positives.reshape(-1)[passed], triples.negatives.reshape(-1)
    gradient = push.reshape(-1, width)
    up, down = gradient[passed] * np.float32(learning.rate), gradient * np.float32(-learning.rate)
    up[:, :-1] -= np.float32(learning.rate * positive) * table[liked, :-1]
    down[:, :-1] -= np.float32(learning.rate * negative) * table[other, :-1]
    if push.shape[1] == 1:
        # No item occurs twice in a step of single triples, so plain indexing adds each row once.
        table[liked] += up
        table[other] += down
        return
    _add(table, liked, up)
    _add(table, other, down)


def _add(table: Floats32, rows: NDArray[np.int32], values: Floats32) -> None:
    """Add values to rows of the table, also where a row is named several times."""
    from scipy import sparse

    distinct, place = np.unique(rows, return_inverse=True)
    scatter = sparse.csc_array(
        (np.ones(len(rows), np.float32), place, np.arange(len(rows) + 1)), shape=(len(distinct), len(rows))
    )
    table[distinct] += np.asarray(scatter @ values, dtype=np.float32)


@dataclass(frozen=True, eq=False)
class Moved:
    """The change of the shared table over a chain of one-user rounds: with one user a round, nothing is weighed."""

    clients: int
    change: torch.Tensor

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        found = parameters.detach().cpu() + self.change
        return found.repeat(len(weights), 1) if np.ndim(weights) > 1 else found

    def divergence(self, parameters: torch.Tensor) -> Floats:
        return np.full(self.clients, float(torch.linalg.vector_norm(self.change)))

    def select(self, keep: Sequence[int]) -> Moved:
        return Moved(len(keep), self.change)

    def finite(self) -> NDArray[np.bool_]:
        return np.full(self.clients, bool(torch.isfinite(self.change).all()))
