"""The metrics of the thesis' chapter 2, one small class each: `Precision()(view)` is P@k for the view's k.

Metrics of the kind `PerUser` also give one number per user, for paired tests; their value is the mean over users who
have a relevant test item. The others look at all lists together. A metric that is not defined (no user to average, an
empty group) is nan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from steelyard.recommend.ranking import Codes, Floats, View


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

    Over the whole catalogue of n items, those never shown included; 1 is equality, so more is better.
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
        head_unseen = int((head_size - truth.train_in_head[listed]).sum())
        tail_unseen = int((truth.items - head_size - truth.train_in_tail[listed]).sum())
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
