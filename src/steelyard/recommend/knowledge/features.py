"""Item features: what is known of each item, as one sparse matrix of items × features with readable names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.recommend.interactions import Codes
from steelyard.recommend.knowledge.naming import counted

Hops = NDArray[np.int8]
Csr = Any
"""A scipy.sparse.csr_array, which has no types of its own."""


@dataclass(frozen=True, eq=False)
class ItemFeatures:
    """F_i of every item (thesis Eq. 6.1): row i of `matrix` marks the features ⟨ρ, ω⟩ of item i.

    Rows stand in the order of the data set's items, an item without features has an empty row. Use it as the one form
    in which content-based recommenders see a knowledge graph, genres or any other attributes.
    """

    matrix: Csr
    """[items, features], ones as int8; the column indices of each row ascend."""
    names: tuple[str, ...]
    """Each feature in words: predicate chain and object, as in "director: Steven Spielberg"."""
    hops: Hops
    """Length of each feature's predicate chain: 1 or 2, or more if the exploration went further."""

    def __post_init__(self) -> None:
        features = self.matrix.shape[1]
        if not features == len(self.names) == len(self.hops):
            raise ValueError(f"{features} columns, {len(self.names)} names and {len(self.hops)} hops of features")
        if not self.matrix.has_sorted_indices:
            raise ValueError("the column indices of each item must ascend")

    def __str__(self) -> str:
        items, features = self.matrix.shape
        by_hop = ", ".join(f"{count:,} of {counted(hop, 'hop')}" for hop, count in self.by_hop().items())
        shown = f"{counted(features, 'feature')} ({by_hop})" if features else "no features"
        return f"{shown} of {counted(items, 'item')} in {counted(self.matrix.nnz, 'pair')}"

    @property
    def items(self) -> int:
        """Number of items, also those without features."""
        return int(self.matrix.shape[0])

    @property
    def features(self) -> int:
        """Number of features."""
        return int(self.matrix.shape[1])

    def of(self, item: int) -> Codes:
        """Return the features of one item, ascending."""
        return self.matrix.indices[self.matrix.indptr[item] : self.matrix.indptr[item + 1]].astype(np.int64)

    def names_of(self, item: int) -> list[str]:
        """Return the features of one item in words."""
        return [self.names[feature] for feature in self.of(item).tolist()]

    def per_feature(self) -> Codes:
        """Return the number of items that have each feature."""
        return np.bincount(self.matrix.indices, minlength=self.features)

    def per_item(self) -> Codes:
        """Return the number of features of each item."""
        return np.diff(self.matrix.indptr).astype(np.int64)

    def by_hop(self) -> Mapping[int, int]:
        """Return how many features there are of each number of hops."""
        hops, counts = np.unique(self.hops, return_counts=True)
        return {int(hop): int(count) for hop, count in zip(hops, counts, strict=True)}


def build(
    items: Codes, features: Codes, count: int, names: Sequence[str], hops: Sequence[int] | Hops | None = None
) -> ItemFeatures:
    """Make item features from pairs of item and feature numbers; repeated pairs count once, hops default to 1.

    `count` is the number of items of the data set, also those that no pair names.
    """
    from scipy import sparse  # For speed of start: much of the package needs no SciPy.

    ones = np.ones(len(items), dtype=np.int8)
    found = sparse.coo_array((ones, (items, features)), shape=(count, len(names))).tocsr()
    # Repeated pairs are summed, which 128 of them would overflow.
    found.data = np.ones(found.nnz, dtype=np.int8)
    found.sort_indices()
    return ItemFeatures(
        found, tuple(names), np.ones(len(names), dtype=np.int8) if hops is None else np.asarray(hops, dtype=np.int8)
    )
