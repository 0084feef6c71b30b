"""What ranked lists are judged by: the ground truth, and the metrics of the thesis' chapter 2, one small class each.

"All unrated items" protocol: a list may hold any item that the user did not train on; what counts as a hit is decided
by her relevant test items alone. Lists, test and training share one numbering of users and items.

`Precision()(view)` is P@k for the view's k.
Metrics of the kind `PerUser` also give one number per user, for paired tests; their value is the mean over users who
have a relevant test item. The others look at all lists together. A metric that is not defined (no user to average, an
empty group) is nan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

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

    def distinct_train(self, group: Flags) -> Codes:
        """Return how many distinct items of a group each user has in her training set."""
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


Scores = Callable[[Codes], NDArray[np.floating]]
"""Gives the scores of all items for some users, [users, items]."""


# The metrics.


class Metric(ABC):
    """One number for a set of lists; derive from it to add a metric of your own."""

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, view: View) -> float:
        """Return the metric's value for lists cut at k."""


class PerUser(Metric):
    """A metric that is a mean over users; derive from it where each user has a value of her own."""

    @abstractmethod
    def per_user(self, view: View) -> Floats:
        """Return one value per user; users without relevant test items have meaningless ones."""

    def __call__(self, view: View) -> float:
        values = self.per_user(view)[view.judged]
        return float(values.mean()) if len(values) else float("nan")


class Precision(PerUser):
    """P@k = hits / k (Eq. 2.5), also where the list is shorter than k."""

    name = "precision"

    def per_user(self, view: View) -> Floats:
        return view.hit_counts / view.cutoff


class Recall(PerUser):
    """R@k = hits / relevant test items (Eq. 2.6)."""

    name = "recall"

    def per_user(self, view: View) -> Floats:
        return view.hit_counts / np.maximum(view.truth.relevant, 1)


class F1(Metric):
    """F1@k = 2 P R / (P + R) of the mean P@k and the mean R@k (Eq. 2.7)."""

    name = "f1"

    def __call__(self, view: View) -> float:
        precision, recall = Precision()(view), Recall()(view)
        return 2 * precision * recall / (precision + recall) if precision + recall != 0 else 0.0


class UserF1(PerUser):
    """The mean of each user's own F1@k, as other libraries report it; use it for paired tests on F1."""

    name = "f1_per_user"

    def per_user(self, view: View) -> Floats:
        # 2PR/(P+R) with P = h/k and R = h/r is 2h/(k + r).
        return 2 * view.hit_counts / (view.cutoff + view.truth.relevant)


class HitRate(PerUser):
    """HR@k: 1 for a user with at least one hit, else 0."""

    name = "hit_rate"

    def per_user(self, view: View) -> Floats:
        return (view.hit_counts > 0).astype(np.float64)


class NDCG(PerUser):
    """nDCG@k with binary gain: Σ hit_i / log2(i + 1) over the same sum for min(relevant, k) hits at the top.

    Eq. 2.8 as printed lacks the ideal in the denominator.
    """

    name = "ndcg"

    def per_user(self, view: View) -> Floats:
        discount = 1.0 / np.log2(np.arange(2, view.cutoff + 2))
        ideal = np.concatenate([[np.inf], np.cumsum(discount)])
        gain = view.hits @ discount[: view.hits.shape[1]]
        return gain / ideal[np.minimum(view.truth.relevant, view.cutoff)]


class ItemCoverage(Metric):
    """IC@k as a count: how many items are shown to at least one user (the numerator of Eq. 2.9)."""

    name = "item_coverage"

    def __call__(self, view: View) -> float:
        return int(np.count_nonzero(view.times_shown))


class ItemCoverageShare(Metric):
    """IC@k as a share of the catalogue (Eq. 2.9)."""

    name = "item_coverage_share"

    def __call__(self, view: View) -> float:
        return ItemCoverage()(view) / view.truth.items if view.truth.items else float("nan")


class Gini(Metric):
    """G@k = 1 − Σ_i (2i − n − 1) m(i) / ((n − 1) Σ m), items ascending by how often they are shown (Eq. 2.10).

    Over the whole catalogue of n items, those never shown included, where the printed equation has those shown alone:
    the thesis' tables are met this way. 1 is equality, so more is better.
    """

    name = "gini"

    def __call__(self, view: View) -> float:
        shown = np.sort(view.times_shown)
        n, total = len(shown), shown.sum()
        if n < 2 or total == 0:
            return float("nan")
        return float(1 - (2 * np.arange(1, n + 1) - n - 1) @ shown / ((n - 1) * total))


@dataclass(frozen=True)
class ShannonEntropy(Metric):
    """SE@k = −Σ p log p with p the share of each item in all lists (Eq. 2.11); natural logarithm by default."""

    base: float = np.e
    name = "shannon_entropy"

    def __call__(self, view: View) -> float:
        shown = view.times_shown[view.times_shown > 0]
        if not len(shown):
            return float("nan")
        share = shown / shown.sum()
        return max(0.0, float(-(share @ np.log(share)) / np.log(self.base)))


class ACLT(PerUser):
    """ACLT@k: the mean number of long-tail items in a list (Eq. 2.12)."""

    name = "aclt"

    def per_user(self, view: View) -> Floats:
        return _in_group(view, head=False).sum(axis=1, dtype=np.float64)


class PopREO(Metric):
    """Equal opportunity: |a − b| / (a + b), a and b the recall over all users within short head and long tail."""

    name = "pop_reo"

    def __call__(self, view: View) -> float:
        relevant_head = int(view.truth.short_head[view.truth.test_item].sum())
        relevant_tail = len(view.truth.test_item) - relevant_head
        head = int((view.hits & _in_group(view, head=True)).sum())
        tail = int((view.hits & _in_group(view, head=False)).sum())
        return _unevenness((head, relevant_head), (tail, relevant_tail))


class PopRSP(Metric):
    """Statistical parity: |a − b| / (a + b), a and b the ranks given to short head and long tail over what could be.

    What could be is Σ_u (size of the group − the user's training items in it), over users who got a list.
    """

    name = "pop_rsp"

    def __call__(self, view: View) -> float:
        truth, listed = view.truth, view.shown.any(axis=1)
        head_size = int(truth.short_head.sum())
        head_unseen = int((head_size - truth.distinct_train(truth.short_head)[listed]).sum())
        tail_unseen = int((truth.items - head_size - truth.distinct_train(~truth.short_head)[listed]).sum())
        head = int(_in_group(view, head=True).sum())
        tail = int(_in_group(view, head=False).sum())
        return _unevenness((head, head_unseen), (tail, tail_unseen))


def _in_group(view: View, head: bool) -> np.ndarray:
    """Mark the ranks of the lists that hold an item of the short head, or of the long tail."""
    return view.shown & (view.truth.short_head[view.lists] == head)


def _unevenness(first: tuple[int, int], second: tuple[int, int]) -> float:
    """Standard deviation over mean of two rates: |a − b| / (a + b); nan where a rate has nothing to stand on."""
    if first[1] <= 0 or second[1] <= 0:
        return float("nan")
    a, b = first[0] / first[1], second[0] / second[1]
    return abs(a - b) / (a + b) if a + b else float("nan")


@dataclass(frozen=True, eq=False)
class Bias:
    """Bias of training data and of lists towards each category, and the disparity between the two."""

    categories: tuple[str, ...]
    source: Floats
    recommended: Floats

    @property
    def disparity(self) -> Floats:
        """BD(C) = (B_R(C) − B_T(C)) / B_T(C) (Eq. 2.13); nan for a category without training interactions."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.source > 0, (self.recommended - self.source) / self.source, np.nan)


def bias_disparity(view: View) -> Bias:
    """Return B_T (Eq. 2.14), B_R (Eq. 2.15) and BD by category; use it where items carry categories."""
    truth = view.truth
    liked = truth.train_item if truth.liked is None else truth.train_item[truth.liked]
    taken = np.bincount(liked, minlength=truth.items)

    def preference(counts: Codes) -> Floats:
        within = np.bincount(
            truth.member_category,
            weights=counts[truth.member_item],
            minlength=len(truth.categories),
        )
        return within / max(int(counts.sum()), 1)

    size = np.bincount(truth.member_category, minlength=len(truth.categories)) / max(truth.items, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Bias(truth.categories, preference(taken) / size, preference(view.times_shown) / size)


METRICS: tuple[Metric, ...] = (
    *(Precision(), Recall(), F1(), UserF1(), HitRate(), NDCG(), ItemCoverage(), ItemCoverageShare(), Gini()),
    *(ShannonEntropy(), ACLT(), PopREO(), PopRSP()),
)
"""Every metric that needs nothing but lists and a split, in the order in which they are reported."""


def measure(view: View) -> dict[str, float]:
    """Return every metric of a view by name."""
    return {metric.name: metric(view) for metric in METRICS}
