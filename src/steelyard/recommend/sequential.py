"""Rounds of a single user each, one after the other (sFPL, sFPL+), done many at a time with the same result.

Which user is next and which items she draws does not depend on the model, so all rounds of an epoch are known
beforehand. Two rounds that share neither the user nor an item do not touch each other: they may be done together. Each
round is put into the first group after all earlier rounds it shares something with, and a group is one vectorised local
pass.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.messages.updates import Floats
from steelyard.recommend.fpl import Learning, LocalPass, local_pass
from steelyard.recommend.histories import Triples
from steelyard.recommend.interactions import Codes, Flags
from steelyard.recommend.sparse import Floats32, add_rows

ResultT = TypeVar("ResultT")


def independent_groups(users: Codes, triples: Triples) -> Codes:
    """Return the group of each round: one more than that of the last earlier round it shares something with."""
    last_of_user: dict[int, int] = {}
    groups: list[int] = []
    if triples.positives.shape[1] == 1:
        # Two items a round: dictionaries are faster than arrays here.
        last_of_item: dict[int, int] = {}
        pairs = zip(users.tolist(), triples.positives[:, 0].tolist(), triples.negatives[:, 0].tolist(), strict=True)
        for user, liked, other in pairs:
            group = 1 + max(last_of_user.get(user, -1), last_of_item.get(liked, -1), last_of_item.get(other, -1))
            last_of_user[user] = last_of_item[liked] = last_of_item[other] = group
            groups.append(group)
        return np.array(groups, dtype=np.int64)
    items = np.concatenate([triples.positives, triples.negatives], axis=1)
    last = np.full(int(items.max(initial=0)) + 1, -1, dtype=np.int64)
    for user, touched in zip(users.tolist(), items, strict=True):
        group = 1 + max(last_of_user.get(user, -1), int(last[touched].max()))
        last_of_user[user] = last[touched] = group
        groups.append(group)
    return np.array(groups, dtype=np.int64)


def ahead(work: Callable[[int], ResultT], items: Iterable[int], threads: int) -> Iterator[ResultT]:
    """Yield `work` of each item in order; with two threads or more the next one is done meanwhile."""
    if threads < 2:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(1) as pool:
        following = deque[Future[ResultT]]()
        for item in items:
            following.append(pool.submit(work, item))
            if len(following) > 1:
                yield following.popleft().result()
        while following:
            yield following.popleft().result()


def sequential_rounds(
    table: Floats32, vectors: Floats32, users: Codes, triples: Triples, sent: Flags, learning: Learning
) -> Floats32:
    """Do one round per entry of `users`, each on the table that the one before left; return their mean losses.

    `table` and `vectors` (one row per user of the population) are themselves changed.
    """
    losses = np.empty(len(users), dtype=np.float32)
    groups = independent_groups(users, triples)
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups)) if len(groups) else np.zeros(0, dtype=np.int64)
    begin = 0
    for end in ends.tolist():
        rounds = order[begin:end]
        begin = end
        mine = triples.select(rounds)
        alone = len(rounds) == 1 and mine.real is None
        done = (single_pass if alone else local_pass)(table, vectors[users[rounds]], mine, learning)
        vectors[users[rounds]] = done.vectors
        losses[rounds] = done.losses.mean(axis=1)
        _add_changes(table, mine, sent[rounds], done.gradients, learning)
    return losses


def single_pass(table: Floats32, vector: Floats32, triples: Triples, learning: Learning) -> LocalPass:
    """Do the local pass of one user by herself, with as few calls per step as can be; no decoys.

    Use it for long chains of one-user rounds. It equals `local_pass` up to the rounding of the inner product.
    """
    differences = table[triples.positives[0]] - table[triples.negatives[0]]
    moves = differences * np.float32(learning.rate)
    moves[:, -1] = 0.0  # the bias is part of the score, not of the user's step
    extended = np.ones(table.shape[1], dtype=np.float32)
    extended[:-1] = vector[0]
    shrinkage = learning.shrinkage()
    gradients, margins = np.empty_like(differences), np.empty(len(differences), dtype=np.float32)
    for step, (difference, move) in enumerate(zip(differences, moves, strict=True)):
        margin = float(difference @ extended)
        weight = np.float32(1.0 / (1.0 + math.exp(min(margin, 80.0))))  # s = σ(−x̂), as in fpl
        margins[step] = margin
        np.multiply(extended, weight, out=gradients[step])
        extended *= shrinkage
        extended += weight * move
    return LocalPass(extended[None, :-1].copy(), gradients[None], np.logaddexp(np.float32(0), -margins)[None])


def _add_changes(table: Floats32, triples: Triples, sent: Flags, gradients: Floats32, learning: Learning) -> None:
    """Add what these rounds send to the table: α Δ of each (see `fpl.changes`)."""
    _, positive, negative = learning.decays
    passed = sent.reshape(-1)
    liked, other = triples.positives.reshape(-1)[passed], triples.negatives.reshape(-1)
    flat = gradients.reshape(-1, table.shape[1])
    up, down = flat[passed] * np.float32(learning.rate), flat * np.float32(-learning.rate)
    up[:, :-1] -= np.float32(learning.rate * positive) * table[liked, :-1]
    down[:, :-1] -= np.float32(learning.rate * negative) * table[other, :-1]
    if gradients.shape[1] == 1:
        # No item occurs twice in a group of single triples, so plain indexing adds each row once.
        table[liked] += up
        table[other] += down
        return
    add_rows(table, liked, up)
    add_rows(table, other, down)


@dataclass(frozen=True, eq=False)
class TableChange:
    """The change of the shared table over many one-user rounds: with one user a round, nothing is weighed."""

    clients: int
    change: torch.Tensor

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        found = parameters.detach().cpu() + self.change
        return found.repeat(len(weights), 1) if np.ndim(weights) > 1 else found

    def divergence(self, parameters: torch.Tensor) -> Floats:
        return np.full(self.clients, float(torch.linalg.vector_norm(self.change)))

    def gram(self, parameters: torch.Tensor) -> Floats:
        return np.full((self.clients, self.clients), float(self.change.double().square().sum()))

    def select(self, keep: Sequence[int]) -> TableChange:
        return TableChange(len(keep), self.change)

    def finite(self) -> NDArray[np.bool_]:
        return np.full(self.clients, bool(torch.isfinite(self.change).all()))

    def content(self) -> None:
        """Return None: each user's change went into the table before the next user's was made."""
