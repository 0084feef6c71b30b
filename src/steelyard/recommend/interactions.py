"""Who took what: the interactions of users with items, filtered and split, with an account of all that was dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from steelyard.base.errors import UserError
from steelyard.base.randomness import stream_keys, words
from steelyard.base.settings import Section

Codes = NDArray[np.int64]
Flags = NDArray[np.bool_]
Names = NDArray[np.str_]
SECOND_FILE = "second_file"
"""Column of joined interactions that says where a row came from: "yes" or "no"."""


@dataclass(frozen=True)
class Dropped:
    """One step of a filter: how much it took away and why; read it to see what an experiment does not contain."""

    why: str
    interactions: int
    users: int
    items: int

    def __str__(self) -> str:
        return f"{self.why}: dropped {self.interactions:,} interactions, {self.users:,} users, {self.items:,} items"


@dataclass(frozen=True, eq=False)
class Interactions:
    """A table of interactions with users and items numbered in ascending order of their ids.

    Ids that are all whole numbers ascend as numbers, others as text, so "ties by ascending id" is "ties by number"
    everywhere. Use it as the one form in which the recommenders, the metrics and the baselines see data.
    """

    users: Names
    items: Names
    user: Codes
    """The user of each row, as a position in `users`."""
    item: Codes
    rating: NDArray[np.float64]
    """The rating of each row; 1 where the source has none."""
    time: NDArray[np.float64] | None = None
    """Seconds since 1970, or whatever number the source orders its rows by."""
    columns: Mapping[str, Names] = field(default_factory=dict[str, Names])
    """Further columns of the source, as text (a venue's category, a user's own π)."""
    dropped: tuple[Dropped, ...] = ()

    def __len__(self) -> int:
        return len(self.user)

    def __str__(self) -> str:
        return f"{len(self):,} interactions of {len(self.users):,} users with {len(self.items):,} items"

    def select(self, keep: Flags, why: str = "", *, renumber: bool = True) -> Interactions:
        """Return some of the rows; with a reason, what is gone is added to `dropped`.

        With `renumber=False` users and items keep their numbers even when none of their rows is left: that is what
        the two sides of a split need.
        """
        rows = np.flatnonzero(keep)
        kept = replace(
            self,
            user=self.user[rows],
            item=self.item[rows],
            rating=self.rating[rows],
            time=None if self.time is None else self.time[rows],
            columns={name: values[rows] for name, values in self.columns.items()},
        )
        if renumber:
            users, user = np.unique(kept.user, return_inverse=True)
            items, item = np.unique(kept.item, return_inverse=True)
            kept = replace(kept, users=self.users[users], items=self.items[items], user=user, item=item)
        if why:
            note = Dropped(
                why,
                len(self) - len(kept),
                len(self.users) - len(kept.users),
                len(self.items) - len(kept.items),
            )
            kept = replace(kept, dropped=(*self.dropped, note))
        return kept

    def per_user(self) -> Codes:
        """Return the number of rows of each user."""
        return np.bincount(self.user, minlength=len(self.users))

    def per_item(self) -> Codes:
        """Return the number of rows of each item: its popularity."""
        return np.bincount(self.item, minlength=len(self.items))

    def report(self) -> list[str]:
        """Return what was dropped and what is left, one line each, for people to read."""
        return [*(str(step) for step in self.dropped), f"left: {self}"]


def ascending(names: Iterable[str]) -> list[str]:
    """Return distinct ids in ascending order: as numbers if all are whole numbers, else as text."""
    distinct = set(names)
    # Python counts in numbers of up to 4,300 digits; longer ids are names.
    if all(name.isascii() and name.isdigit() and len(name) <= 4000 for name in distinct):
        return sorted(distinct, key=lambda name: (int(name), name))
    return sorted(distinct)


def numbered(names: Sequence[str] | NDArray[np.object_], vocabulary: Sequence[str] | Names) -> Codes:
    """Return the position of each name in the vocabulary, -1 for a name that is not in it."""
    # For speed of start: much of the package reads no tables.
    import pandas as pd

    return np.asarray(pd.Index(np.asarray(vocabulary, dtype=object)).get_indexer(pd.Index(names)), dtype=np.int64)


def build(
    users: Sequence[str],
    items: Sequence[str],
    rating: Sequence[float] | None = None,
    time: Sequence[float] | None = None,
    columns: Mapping[str, Sequence[str]] | None = None,
    *,
    all_users: Iterable[str] = (),
    all_items: Iterable[str] = (),
) -> Interactions:
    """Make interactions from columns in memory; `all_users` and `all_items` may add ids that have no row.

    Use it where the data does not come from a file, or where several tables must share one numbering.
    """
    user_names = np.array(ascending([*map(str, set(users)), *all_users]), dtype=np.str_)
    item_names = np.array(ascending([*map(str, set(items)), *all_items]), dtype=np.str_)
    return Interactions(
        users=user_names,
        items=item_names,
        user=numbered(np.asarray([str(u) for u in users], dtype=object), user_names),
        item=numbered(np.asarray([str(i) for i in items], dtype=object), item_names),
        rating=np.ones(len(users)) if rating is None else np.asarray(rating, dtype=np.float64),
        time=None if time is None else np.asarray(time, dtype=np.float64),
        columns={name: np.asarray(values, dtype=np.str_) for name, values in (columns or {}).items()},
    )


def joined(first: Interactions, second: Interactions) -> Interactions:
    """Return the rows of two tables, one after the other, in one numbering; `SECOND_FILE` tells them apart.

    Use it for data that comes as a training and a test file. Times and further columns stay where both have them.
    """
    tables = (first, second)
    users = [str(name) for table in tables for name in table.users[table.user]]
    items = [str(name) for table in tables for name in table.items[table.item]]
    times = [table.time for table in tables if table.time is not None]
    shared = [name for name in first.columns if name in second.columns]
    columns: dict[str, Sequence[str]] = {
        name: [str(value) for table in tables for value in table.columns[name]] for name in shared
    }
    columns[SECOND_FILE] = ["no"] * len(first) + ["yes"] * len(second)
    return build(
        users,
        items,
        np.concatenate([table.rating for table in tables]).tolist(),
        np.concatenate(times).tolist() if len(times) == len(tables) else None,
        columns,
    )


# Filters: what is kept of the interactions before they are split.


Duplicates = Literal["first", "last", "mean", "keep"]


def single(data: Interactions, keep: Duplicates = "first") -> Interactions:
    """Leave one row per user and item: the earliest, the latest, or the first with the mean rating.

    Use it on check-ins and other logs in which a pair may repeat: a pair on both sides of a split would be a leak.
    Without times, earlier means higher up in the file.
    """
    if keep == "keep" or not len(data):
        return data
    pair = data.user * len(data.items) + data.item
    order = np.arange(len(data)) if data.time is None else np.argsort(data.time, kind="stable")
    if keep == "last":
        order = order[::-1]
    pairs, first, inverse = np.unique(pair[order], return_index=True, return_inverse=True)
    if len(pairs) == len(data):
        return data
    flags = np.zeros(len(data), dtype=np.bool_)
    flags[order[first]] = True
    if keep == "mean":
        sums = np.bincount(inverse, weights=data.rating[order])
        means = np.empty(len(data))
        means[order] = (sums / np.bincount(inverse))[inverse]
        data = replace(data, rating=means)
    return data.select(flags, f"repeated pairs (kept: {keep})")


def at_least(data: Interactions, threshold: float) -> Interactions:
    """Keep the rows with a rating of at least the threshold; use it to read likes out of ratings."""
    keep = data.rating >= threshold
    return data if keep.all() else data.select(keep, f"rating below {threshold:g}")


def core(data: Interactions, users: int = 0, items: int = 0) -> Interactions:
    """Keep users with at least `users` rows and items with at least `items`, again and again until both hold.

    With the same number for both this is the k-core; with `items=0` it is a plain minimum per user.
    """
    user_alive = np.ones(len(data.users), dtype=np.bool_)
    item_alive = np.ones(len(data.items), dtype=np.bool_)
    alive = np.ones(len(data), dtype=np.bool_)
    while True:
        user_alive = np.bincount(data.user[alive], minlength=len(data.users)) >= max(users, 1)
        item_alive = np.bincount(data.item[alive], minlength=len(data.items)) >= max(items, 1)
        still = alive & user_alive[data.user] & item_alive[data.item]
        if np.array_equal(still, alive):
            break
        alive = still
    if alive.all():
        return data
    return data.select(alive, f"core: users with fewer than {users}, items with fewer than {items}")


# Splits: what each user trains on and what she is tested on.


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


# The section of an experiment.


class InteractionSettings(Section):
    """[interactions]: the data, what is kept of it, and how each user's part is split."""

    path: Path
    """File of interactions in any known form; relative paths are looked for here, in STEELYARD_DATA, ../shared/data."""
    catalogue: Path | None = None
    """File of all item ids, also those nobody took; devices that hold only their own rows need it to number items."""
    columns: dict[Literal["user", "item", "rating", "time"], str] = Field(default_factory=dict)
    """The header's own names for user, item, rating and time, where they are not the usual ones."""
    duplicates: Duplicates = "first"
    """What stays of a repeated pair: its first row, its last, the first with the mean rating, or all ("keep")."""
    threshold: float | None = None
    """Keep rows rated at least this, as likes; default: keep all."""
    core: int = Field(default=0, ge=0)
    """Keep the k-core: users and items with at least k rows, until both hold."""
    min_user: int = Field(default=0, ge=0)
    """Keep users with at least this many rows."""
    min_item: int = Field(default=0, ge=0)
    """Keep items with at least this many rows; with min_user, again and again until both hold."""
    test: Path | None = None
    """A second file whose rows follow those of `path` before anything is dropped; split = "fixed" tests on them."""
    split: Literal["temporal", "random", "shuffled", "newest", "fixed"] = "temporal"
    """How each user's rows are cut: her newest, her own random draw, one shuffle for all, leave-the-newest-out, or
    "fixed": the rows of the file `test`."""
    share: float = Field(default=0.2, gt=0, lt=1)
    """Share of each user's rows that is tested on."""
    count: int = Field(default=1, ge=1)
    """For split = "newest": how many rows of each user are tested on."""
    validation: float | None = Field(default=None, gt=0, lt=1)
    """Share of each user's training part to be tested on in place of the test set, which is then not touched: for
    choosing settings. Her latest rows, or drawn where the split is random or shuffled. Default: use the test set."""
    split_seed: int = Field(default=42, ge=0)
    """Seed of the random and shuffled splits; kept apart from the experiment's seed, so that seeds share a split."""
    category_column: str | None = None
    """A column of the interactions that holds the item's category (Foursquare: "type")."""
    pi_column: str | None = None
    """A column of the interactions that holds the user's own π; her first row counts."""

    @model_validator(mode="after")
    def _test_file(self) -> Self:
        if self.split == "fixed" and self.test is None:
            raise UserError("split: got 'fixed' without a file of test rows; allowed: with interactions.test")
        return self

    def keep(self, data: Interactions) -> Interactions:
        """Apply all filters in their order: repeated pairs, ratings below the threshold, users and items with few."""
        data = single(data, self.duplicates)
        if self.threshold is not None:
            data = at_least(data, self.threshold)
        return core(data, max(self.core, self.min_user), max(self.core, self.min_item))

    def cut(self, data: Interactions) -> Split:
        """Cut off the test set; use `cut_again` on its training part where settings are to be chosen."""
        match self.split:
            case "temporal":
                return temporal(data, self.share)
            case "random":
                return random(data, self.share, self.split_seed)
            case "shuffled":
                return shuffled(data, self.share, self.split_seed)
            case "newest":
                return newest(data, self.count)
            case "fixed":
                return by_flag(data, data.columns[SECOND_FILE] == "yes")

    def cut_again(self, train: Interactions, share: float) -> Split:
        """Cut a training part: int(share · n) rows of each user are what settings are chosen on.

        They are her newest; without times, and where the test rows themselves were drawn, they are drawn from her own
        stream: to foretell what a user takes later is another task than to fill gaps, so settings chosen on one need
        not suit the other.
        """
        if train.time is None or self.split in ("random", "shuffled"):
            return random(train, share, self.split_seed, "validation")
        return temporal(train, share)
