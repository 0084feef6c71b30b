"""Ranked lists against what users took later: the ground truth that metrics are computed from.

"All unrated items" protocol: a list may hold any item that the user did not train on; what counts as a hit is decided
by her relevant test items alone. Lists, test and training share one numbering of users and items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from steelyard.recommend.interactions import Codes, Flags, Interactions, Split, numbered

Floats = NDArray[np.float64]
HEAD_SHARE = (4, 5)
"""The short head holds 80 % of the training interactions; a fraction, so that the border is exact."""


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """What lists are judged by: training and relevant test pairs, the catalogue, and categories of items.

    Build it once per split with `GroundTruth.of`; then `view(lists, k)` gives what each metric reads.
    """

    users: int
    items: int
    train_user: Codes
    train_item: Codes
    test_user: Codes
    """User of each relevant test pair, ascending; pairs are distinct."""
    test_item: Codes
    liked: Flags | None = None
    """Which training rows are positive feedback (bias disparity counts these alone); None for all."""
    categories: tuple[str, ...] = ()
    member_item: Codes = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Items of the (item, category) pairs; an item may be in several categories."""
    member_category: Codes = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @classmethod
    def of(cls, split: Split, threshold: float | None = None) -> GroundTruth:
        """Judge by a split; test rows rated below the threshold are not relevant."""
        return cls.between(split.train, split.test, threshold)

    @classmethod
    def between(cls, train: Interactions, test: Interactions, threshold: float | None = None) -> GroundTruth:
        """Judge by two tables that share one numbering."""
        relevant = np.ones(len(test), dtype=np.bool_) if threshold is None else test.rating >= threshold
        pairs = np.unique(test.user[relevant] * len(test.items) + test.item[relevant])
        return cls(
            users=len(train.users),
            items=len(train.items),
            train_user=train.user,
            train_item=train.item,
            test_user=pairs // max(len(test.items), 1),
            test_item=pairs % max(len(test.items), 1),
            liked=None if threshold is None else train.rating >= threshold,
        )

    def with_categories(self, items: Sequence[str], pairs: Iterable[tuple[str, str]]) -> GroundTruth:
        """Add (item, category) pairs; items that are not in the catalogue are passed over."""
        known = sorted(set(pairs))
        labels = sorted({label for _, label in known})
        item = numbered(np.array([item for item, _ in known], dtype=object), items)
        label = numbered(np.array([label for _, label in known], dtype=object), labels)
        inside = item >= 0
        return replace(self, categories=tuple(labels), member_item=item[inside], member_category=label[inside])

    @cached_property
    def relevant(self) -> Codes:
        """Number of relevant test items of each user."""
        return np.bincount(self.test_user, minlength=self.users)

    @cached_property
    def popularity(self) -> Codes:
        """Number of training interactions of each item."""
        return np.bincount(self.train_item, minlength=self.items)

    @cached_property
    def short_head(self) -> Flags:
        """The most popular training items, up to and including the one at which 80 % of the interactions is passed.

        Ties go by ascending item id; every other item of the catalogue is in the long tail.
        """
        order = np.lexsort((np.arange(self.items), -self.popularity))
        reached = np.cumsum(self.popularity[order]) * HEAD_SHARE[1] >= self.popularity.sum() * HEAD_SHARE[0]
        head = np.zeros(self.items, dtype=np.bool_)
        if self.popularity.sum():
            head[order[: int(np.argmax(reached)) + 1]] = True
        return head

    @cached_property
    def train_in_head(self) -> Codes:
        """Number of distinct short-head items in each user's training set."""
        return self._distinct_train(self.short_head)

    @cached_property
    def train_in_tail(self) -> Codes:
        """Number of distinct long-tail items in each user's training set."""
        return self._distinct_train(~self.short_head)

    def _distinct_train(self, group: Flags) -> Codes:
        inside = group[self.train_item]
        pairs = np.unique(self.train_user[inside] * self.items + self.train_item[inside])
        return np.bincount(pairs // max(self.items, 1), minlength=self.users)

    @cached_property
    def _test_pairs(self) -> Codes:
        return self.test_user * self.items + self.test_item

    def view(self, lists: Codes, cutoff: int) -> View:
        """Return what the metrics read: lists[users, ranks] of item numbers (-1 for none), cut at k."""
        top = lists[:, :cutoff]
        shown = top >= 0
        if not len(self._test_pairs):
            return View(self, cutoff, top, shown, np.zeros(top.shape, dtype=np.bool_))
        wanted = np.arange(self.users)[:, None] * self.items + top
        index = np.minimum(np.searchsorted(self._test_pairs, wanted), len(self._test_pairs) - 1)
        return View(self, cutoff, top, shown, shown & (self._test_pairs[index] == wanted))


def memberships(items: Sequence[str], labels: Sequence[str]) -> list[tuple[str, str]]:
    """Return (item, category) pairs from two columns; a cell may join several categories by `|`."""
    return [
        (str(item), part.strip())
        for item, label in zip(items, labels, strict=True)
        for part in str(label).split("|")
        if part.strip()
    ]


@dataclass(frozen=True, eq=False)
class View:
    """The lists of all users cut at k, and which of their ranks are hits; what every metric is computed from."""

    truth: GroundTruth
    cutoff: int
    lists: Codes
    shown: Flags
    hits: Flags

    @cached_property
    def judged(self) -> Flags:
        """Users with at least one relevant test item: means run over these."""
        return self.truth.relevant > 0

    @cached_property
    def hit_counts(self) -> Codes:
        return self.hits.sum(axis=1)

    @cached_property
    def times_shown(self) -> Codes:
        """How often each item of the catalogue is recommended, items never recommended included."""
        return np.bincount(self.lists[self.shown], minlength=self.truth.items)


def top(scores: NDArray[np.floating], seen: Flags, cutoff: int) -> Codes:
    """Return the numbers of the k best items per row of scores, best first, ties by ascending number.

    Items marked `seen`, and those whose score is not a number, are left out; ranks that cannot be filled are -1. Use
    it for any system that scores all items.
    """
    # For speed of start: whoever has lists already needs no torch.
    import torch

    masked = np.where(seen | np.isnan(scores), -np.inf, scores)
    rows, items = masked.shape
    count = min(cutoff, items)
    if rows == 0 or count == 0:
        return np.full((rows, cutoff), -1, dtype=np.int64)
    found, indices = torch.topk(torch.from_numpy(masked), count, dim=1)
    values, chosen = found.numpy(), indices.numpy().copy()
    # Of items that tie at the border, the library takes any; ours are those with the lowest numbers.
    for row in np.flatnonzero((masked >= values[:, -1:]).sum(axis=1) > count).tolist():
        border = values[row, -1]
        above = np.flatnonzero(masked[row] > border)
        chosen[row] = np.concatenate([above, np.flatnonzero(masked[row] == border)[: count - len(above)]])
    values = np.take_along_axis(masked, chosen, axis=1)
    order = np.lexsort((chosen, -values), axis=1)
    best = np.take_along_axis(chosen, order, axis=1)
    best = np.where(np.isneginf(np.take_along_axis(values, order, axis=1)), -1, best)
    return np.pad(best, ((0, 0), (0, cutoff - count)), constant_values=-1).astype(np.int64)


# Ranked lists of any system that scores all items.


Scores = Callable[[Codes], NDArray[np.floating]]
"""Gives the scores of all items for some users, [users, items]."""
