"""Cutting each user's interactions into what she trains on and what she is tested on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from steelyard.base.errors import UserError
from steelyard.base.randomness import stream_keys, words
from steelyard.recommend.interactions import Flags, Interactions

SplitKind = Literal["temporal", "random", "shuffled", "newest"]
DRAWN = frozenset({"random", "shuffled"})
"""The kinds that draw rows without a look at their times."""


@dataclass(frozen=True, eq=False)
class Split:
    """The two sides of a split, which share one numbering of users and items."""

    train: Interactions
    test: Interactions

    @property
    def users(self) -> int:
        return len(self.train.users)

    @property
    def items(self) -> int:
        return len(self.train.items)


def split(data: Interactions, kind: SplitKind, *, share: float = 0.2, count: int = 1, seed: int = 42) -> Split:
    """Split in the way of that name; `count` is for "newest", `seed` for "random" and "shuffled".

    Use it where the kind comes from a setting or a command.
    """
    match kind:
        case "temporal":
            return temporal(data, share)
        case "random":
            return random(data, share, seed)
        case "shuffled":
            return shuffled(data, share, seed)
        case "newest":
            return newest(data, count)


def validation(train: Interactions, share: float, seed: int = 42, *, drawn: bool = False) -> Split:
    """Split a training part again: its newest int(share · n) rows of each user are what settings are chosen on.

    Use it for every choice that must not see the test set. Without times, and where the test rows themselves were
    `drawn`, they are drawn from each user's own stream: to foretell what a user takes later is another task than to
    fill gaps, so settings chosen on one need not suit the other.
    """
    return random(train, share, seed, "validation") if drawn or train.time is None else temporal(train, share)


def by_flag(data: Interactions, test: Flags) -> Split:
    """Split by a flag per row; use it where the split comes from elsewhere."""
    return Split(data.select(~test, renumber=False), data.select(test, renumber=False))


def temporal(data: Interactions, share: float = 0.2) -> Split:
    """Test on the newest int(share · n) of each user's n interactions; of equal times, those higher up in the file.

    Use it by default: it asks for what a user took later, given what she took before (thesis §4.5.3, share 0.2).
    """
    if data.time is None:
        raise UserError("split: got 'temporal', but the data has no time column; allowed: random, shuffled")
    counts = data.per_user()
    held = (counts * _share(share)).astype(np.int64)
    return by_flag(data, _rank(data, -data.time) < held[data.user])


def newest(data: Interactions, count: int = 1) -> Split:
    """Test on each user's newest `count` interactions (leave-one-out); users with no more than that are not tested."""
    if data.time is None:
        raise UserError("split: got 'newest', but the data has no time column; allowed: random, shuffled")
    counts = data.per_user()
    held = np.where(counts > count, count, 0)
    return by_flag(data, _rank(data, -data.time) < held[data.user])


def random(data: Interactions, share: float = 0.2, seed: int = 1, purpose: str = "split") -> Split:
    """Test on int(share · n) of each user's interactions, drawn from her own stream.

    Use it where there are no times; adding or removing other users does not change a user's draw.
    """
    counts = data.per_user()
    held = (counts * _share(share)).astype(np.int64)
    position = _rank(data, np.zeros(len(data)))
    keys = stream_keys(seed, 0, data.users.tolist(), purpose)
    drawn = words(keys[data.user] + position.astype(np.uint64), 1)[:, 0]
    return by_flag(data, _rank(data, drawn) < held[data.user])


def shuffled(data: Interactions, share: float = 0.2, seed: int = 42) -> Split:
    """Split as the public comparisons of KGFlex do: one NumPy RandomState for all users, in ascending order.

    Per user [0]·floor((1 − share)·n) + [1]·rest is shuffled and laid over her rows in the file's order. Use it to
    meet published figures; `random` is the better split otherwise.
    """
    source = np.random.RandomState(seed)
    test = np.zeros(len(data), dtype=np.bool_)
    order = np.argsort(data.user, kind="stable")
    for rows in np.split(order, np.cumsum(data.per_user())[:-1]):
        train = int(np.floor(len(rows) * (1 - _share(share))))
        marks = np.array([0] * train + [1] * (len(rows) - train))
        source.shuffle(marks)
        test[rows] = marks == 1
    return by_flag(data, test)


def _share(share: float) -> float:
    if not 0 < share < 1:
        raise UserError(f"split share: got {share}; allowed: above 0 and below 1")
    return share


def _rank(data: Interactions, key: np.ndarray) -> np.ndarray:
    """Return each row's rank from 0 among its user's rows, ordered by the key (ties: the file's order)."""
    order = np.lexsort((key, data.user))
    starts = np.cumsum(data.per_user()) - data.per_user()
    rank = np.empty(len(data), dtype=np.int64)
    rank[order] = np.arange(len(data)) - np.repeat(starts, data.per_user())
    return rank
