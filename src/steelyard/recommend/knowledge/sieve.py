"""Which features are kept: those of enough items and not of nearly all, and at most so many of each hop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from steelyard.recommend.interactions import Codes, Flags
from steelyard.recommend.knowledge.features import Csr, ItemFeatures, build
from steelyard.recommend.knowledge.naming import readable
from steelyard.recommend.knowledge.report import HopCount


@dataclass(frozen=True)
class Limits:
    """How often a feature may and must occur."""

    min_items: int = 10
    max_share: float = 1.0
    max_features: int | None = None


@dataclass(eq=False)
class _HopFeatures:
    """The features of one number of hops that are left so far, and how many were dropped."""

    found: int = 0
    rare: int = 0
    common: int = 0
    chains: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    objects: list[str] = field(default_factory=list[str])
    items: list[Codes] = field(default_factory=list[Codes])
    features: list[Codes] = field(default_factory=list[Codes])


class Sieve:
    """Takes features chain by chain, keeps those within the limits, and counts what it drops.

    The first `items` rows of every matrix are the data set's items; features are counted over all rows.
    """

    def __init__(self, items: int, limits: Limits) -> None:
        self.items = items
        self.limits = limits
        self._hops: dict[int, _HopFeatures] = {}

    def add(self, chains: Sequence[tuple[str, ...]], objects: Sequence[str], matrix: Csr) -> None:
        """Take the columns of a CSC matrix as features, each with its chain and its object."""
        hops = np.fromiter(map(len, chains), dtype=np.int64, count=len(chains))
        keep, rare, common = self._within(matrix)
        for hop in np.unique(hops).tolist():
            into = self._hops.setdefault(hop, _HopFeatures())
            mine = hops == hop
            into.found += int(mine.sum())
            into.rare += int((rare & mine).sum())
            into.common += int((common & mine).sum())
            columns = np.flatnonzero(keep & mine)
            part = matrix[: self.items, columns].tocoo()
            into.items.append(part.row.astype(np.int64))
            into.features.append(part.col.astype(np.int64) + len(into.objects))
            into.objects += [objects[column] for column in columns.tolist()]
            into.chains += [chains[column] for column in columns.tolist()]

    def _within(self, matrix: Csr) -> tuple[Flags, Flags, Flags]:
        """Return which columns are kept, which are too rare (or no item of the data has them), which too common."""
        counts = np.diff(matrix.indptr)
        here = counts if matrix.shape[0] == self.items else np.diff(matrix[: self.items].indptr)
        rare = (counts < self.limits.min_items) | (here == 0)
        common = ~rare & (counts > self.limits.max_share * matrix.shape[0])
        return ~rare & ~common, rare, common

    def result(self, labels: dict[str, str]) -> tuple[ItemFeatures, list[HopCount]]:
        """Return the features that are kept, ordered by hop, chain and object, and the count of each hop."""
        chains: list[tuple[str, ...]] = []
        objects: list[str] = []
        items: list[Codes] = []
        features: list[Codes] = []
        counts: list[HopCount] = []
        for hop, kept in sorted(self._hops.items()):
            number, item, feature = self._capped(kept)
            items.append(item)
            features.append(feature + len(objects))
            objects += [kept.objects[each] for each in number]
            chains += [kept.chains[each] for each in number]
            beyond = len(kept.objects) - len(number)
            counts.append(HopCount(hop, kept.found, kept.rare, kept.common, beyond, len(item)))
        hops = np.array([len(chain) for chain in chains], dtype=np.int8)
        none = np.zeros(0, dtype=np.int64)
        pairs = (np.concatenate([*items, none]), np.concatenate([*features, none]))
        return build(*pairs, self.items, readable(chains, objects, labels), hops), counts

    def _capped(self, kept: _HopFeatures) -> tuple[list[int], Codes, Codes]:
        """Return the features of one hop that stay, in order, and their pairs with the features numbered anew."""
        none = np.zeros(0, dtype=np.int64)
        item, feature = np.concatenate([*kept.items, none]), np.concatenate([*kept.features, none])
        order = sorted(range(len(kept.objects)), key=lambda each: (kept.chains[each], kept.objects[each]))
        most = self.limits.max_features
        if most is not None and len(order) > most:
            times = np.bincount(feature, minlength=len(order))
            best = sorted(order, key=lambda each: -int(times[each]))[:most]
            chosen = set(best)
            order = [each for each in order if each in chosen]
        number = np.full(len(kept.objects), -1, dtype=np.int64)
        number[np.array(order, dtype=np.int64)] = np.arange(len(order))
        stays = number[feature] >= 0
        return order, item[stays], number[feature[stays]]
