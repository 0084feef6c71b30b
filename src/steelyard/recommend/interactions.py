"""Who took what: the interactions of users with items, and an account of everything that was dropped on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

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
