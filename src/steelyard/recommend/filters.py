"""What is kept of the interactions before they are split: each step records what it dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from steelyard.recommend.interactions import Interactions

Duplicates = Literal["first", "last", "mean", "keep"]


def keep(
    data: Interactions,
    *,
    duplicates: Duplicates = "first",
    threshold: float | None = None,
    k_core: int = 0,
    min_user: int = 0,
    min_item: int = 0,
) -> Interactions:
    """Apply all filters in their order: repeated pairs, ratings below the threshold, users and items with few rows.

    Use it where the filters come from settings or a command.
    """
    data = single(data, duplicates)
    if threshold is not None:
        data = at_least(data, threshold)
    return core(data, max(k_core, min_user), max(k_core, min_item))


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
