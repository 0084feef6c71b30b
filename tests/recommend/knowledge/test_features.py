"""Item features: the matrix, its names and hops, and what restricting them leaves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.recommend.knowledge.features import ItemFeatures, build

NAMES = ("director: Kubrick", "genre: War", "director → birthPlace: Manhattan")


def few() -> ItemFeatures:
    """Three films of four have features; the pair (0, 2) is given twice."""
    pairs = np.array([(0, 2), (0, 0), (2, 1), (0, 2), (3, 0), (3, 1)])
    return build(pairs[:, 0], pairs[:, 1], 4, NAMES, [1, 1, 2])


def test_rows_are_items_with_ascending_features() -> None:
    found = few()
    assert found.matrix.toarray().tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 0]]
    assert found.of(0).tolist() == [0, 2]
    assert found.names_of(0) == ["director: Kubrick", "director → birthPlace: Manhattan"]
    assert found.names_of(1) == []
    assert found.per_feature().tolist() == [2, 2, 1]
    assert found.per_item().tolist() == [2, 0, 1, 2]
    assert found.by_hop() == {1: 2, 2: 1}
    assert str(found) == "3 features (2 of 1 hop, 1 of 2 hops) of 4 items in 5 pairs"
    assert found.matrix.dtype == np.int8


def test_a_pair_given_often_counts_once() -> None:
    found = build(np.zeros(300, dtype=np.int64), np.zeros(300, dtype=np.int64), 1, ["a"])
    assert found.matrix.toarray().tolist() == [[1]]
    assert found.hops.tolist() == [1]


def test_names_hops_and_columns_must_agree() -> None:
    whole = few()
    with pytest.raises(ValueError, match="3 columns, 2 names and 3 hops"):
        ItemFeatures(whole.matrix, whole.names[:2], whole.hops)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=40))
def test_building_loses_no_pair_and_sorts_each_row(pairs: list[tuple[int, int]]) -> None:
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    found = build(table[:, 0], table[:, 1], 6, [f"f{i}" for i in range(8)])
    for item in range(6):
        assert found.of(item).tolist() == sorted({feature for owner, feature in pairs if owner == item})
