"""Features as files give them: pairs of an item and a feature, each feature a predicate chain and an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steelyard.recommend.interactions import Codes
from steelyard.recommend.knowledge.graph import Texts


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """Which item has which features, before any filter; ids are text and items may be ones that no data set has."""

    item: Texts
    """The item of each pair."""
    feature: Codes
    """The feature of each pair, as an index into `chains` and `objects`."""
    chains: Sequence[tuple[str, ...]]
    """The predicate chain of each feature."""
    objects: Sequence[str]
    """The object of each feature."""

    def __len__(self) -> int:
        return len(self.feature)


def from_columns(item: Texts, chain: Codes, chains: Sequence[tuple[str, ...]], value: Texts) -> FeatureTable:
    """Number the features of three columns: item, chain (as an index into `chains`) and object."""
    # For speed of start: much of the package reads no tables.
    import pandas as pd

    codes, objects = pd.factorize(np.asarray(value, dtype=object), sort=True)
    packed = np.asarray(chain, dtype=np.int64) * max(len(objects), 1) + codes
    distinct, feature = np.unique(packed, return_inverse=True)
    width = max(len(objects), 1)
    return FeatureTable(
        item=item,
        feature=np.asarray(feature, dtype=np.int64).reshape(-1),
        chains=[chains[index] for index in (distinct // width).tolist()],
        objects=[str(objects[index]) for index in (distinct % width).tolist()],
    )


def renamed(table: FeatureTable, names: Mapping[str, Sequence[str]]) -> FeatureTable:
    """Return the pairs of a table with its items under the names given: none, one or several for each."""
    items = [names.get(str(item), ()) for item in table.item]
    times = np.array([len(each) for each in items], dtype=np.int64)
    fresh = np.array([name for each in items for name in each], dtype=object)
    return replace(table, item=fresh, feature=np.repeat(table.feature, times))


def joined(tables: Sequence[FeatureTable]) -> FeatureTable:
    """Join several tables; a feature that two of them name by the same chain and object is one."""
    features = [pair for table in tables for pair in zip(table.chains, table.objects, strict=True)]
    numbers: dict[tuple[tuple[str, ...], str], int] = {}
    code: NDArray[np.int64] = np.array([numbers.setdefault(pair, len(numbers)) for pair in features], dtype=np.int64)
    starts = np.cumsum([0, *(len(table.chains) for table in tables)])
    shifted = [code[start : start + len(t.chains)][t.feature] for t, start in zip(tables, starts, strict=False)]
    return FeatureTable(
        item=np.concatenate([np.asarray(table.item, dtype=object) for table in tables]),
        feature=np.concatenate(shifted),
        chains=[chain for chain, _ in numbers],
        objects=[value for _, value in numbers],
    )
