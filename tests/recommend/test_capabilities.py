"""What users of a recommender offer to criteria, and the Gram matrix of the rows that they send."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.experiment.recommend import RecommendDescription
from steelyard.recommend import sparse
from steelyard.recommend.capabilities import USER_CAPABILITIES
from steelyard.recommend.sparse import SparseRows
from steelyard.weighing.criteria import LocalData, client_criterion, get
from steelyard.weighing.needs import unmet


def described(criterion: str) -> RecommendDescription:
    return RecommendDescription.model_validate(
        {"interactions": {"path": "ratings.csv"}, "weighing": {"criteria": [criterion]}}
    )


def test_a_criterion_of_ones_own_may_have_any_name() -> None:
    for name in ("VISITED", "IS3", "CBX"):

        @client_criterion(name, about="user")
        def measured(local: LocalData) -> float:
            return local.user.get("visits", 0.0)

        assert described(name).criteria() == [get(name)]


def test_built_in_criteria_are_told_apart_by_what_they_need() -> None:
    fits = {name for name in ("DS", "LD", "CB", "IS", "EQ", "MD", "VP", "VS", "VF", "VE", "EX") if _fits(name)}
    assert fits == {"DS", "LD", "EQ", "MD"}
    for name in ("CB", "IS", "VP", "VE", "EX"):
        with pytest.raises(ValueError, match=f"{name} has no meaning for users of a recommender; allowed: EQ, DS, LD"):
            described(name)


def _fits(name: str) -> bool:
    return unmet(get(name).needs, USER_CAPABILITIES, {}) is None


@given(st.integers(0, 4), st.integers(0, 12), st.integers(0, 2**31))
def test_the_gram_matrix_equals_the_products_of_whole_tables(users: int, count: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    count = count if users else 0
    owners = np.sort(chance.integers(0, max(users, 1), count)).astype(np.int32)
    rows = chance.integers(0, 5, count).astype(np.int32)
    values = chance.normal(size=(count, 3)).astype(np.float32)
    payload = SparseRows(users, owners, rows, values, 0.5)
    tables = np.zeros((users, 5, 3))
    for owner, row, change in zip(owners, rows, payload.values, strict=True):
        tables[owner, row] += change
    moved = 0.5 * tables.reshape(users, 15)
    found = payload.gram(torch.zeros(15))
    assert np.array_equal(found, found.T)
    # What a user sends for one item is summed in float32.
    assert found == pytest.approx(moved @ moved.T, rel=1e-5, abs=1e-5)
    assert np.sqrt(np.diag(found)) == pytest.approx(payload.divergence(torch.zeros(15)))


def test_a_gram_matrix_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = SparseRows(
        3, np.array([0, 1, 2], np.int32), np.array([0, 0, 1], np.int32), np.ones((3, 2), np.float32), 2.0
    )
    whole = payload.gram(torch.zeros(4))
    assert whole.tolist() == [[8.0, 8.0, 0.0], [8.0, 8.0, 0.0], [0.0, 0.0, 8.0]]
    monkeypatch.setattr(sparse, "GRAM_BLOCK", 2)
    assert payload.gram(torch.zeros(4)).tolist() == whole.tolist()
