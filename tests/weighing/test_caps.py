"""The cap on weights holds, keeps the sum, and shares the surplus out in proportion."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steelyard.weighing.weights import cap_of, capped


def test_the_surplus_goes_to_the_others_in_proportion() -> None:
    np.testing.assert_allclose(capped(np.array([0.7, 0.2, 0.1]), 0.4), [0.4, 0.4, 0.2])
    np.testing.assert_allclose(capped(np.array([0.8, 0.1, 0.05, 0.05]), 0.4), [0.4, 0.3, 0.15, 0.15])
    # The first surplus lifts the second above the cap too.
    np.testing.assert_allclose(capped(np.array([0.7, 0.25, 0.05, 0.0]), 0.4), [0.4, 0.4, 0.2, 0.0])


def test_clients_without_weight_share_what_nobody_else_may_have() -> None:
    np.testing.assert_allclose(capped(np.array([1.0, 0.0, 0.0]), 0.5), [0.5, 0.25, 0.25])


def test_a_cap_that_cannot_hold_all_weight_makes_them_equal() -> None:
    np.testing.assert_allclose(capped(np.array([0.9, 0.1]), 0.3), [0.5, 0.5])


def test_weights_under_the_cap_stay_to_the_bit() -> None:
    weights = np.array([0.3, 0.3, 0.4])
    assert capped(weights, 0.4).tolist() == weights.tolist()


@pytest.mark.parametrize(
    ("clients", "share", "shares", "cap"),
    [(10, None, None, 1.0), (10, 0.3, None, 0.3), (10, None, 2.0, 0.2), (10, 0.15, 2.0, 0.15), (1, None, 2.0, 1.0)],
)
def test_the_cap_of_a_cohort(clients: int, share: float | None, shares: float | None, cap: float) -> None:
    assert cap_of(clients, share, shares) == pytest.approx(cap)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(1e-3, 1))
@example([1.0, 2.225073858507e-311], 0.75)
def test_no_weight_above_the_cap(raw: list[float], cap: float) -> None:
    given_weights = np.array(raw) / sum(raw) if sum(raw) > 0 else np.full(len(raw), 1 / len(raw))
    found = capped(given_weights, cap)
    assert found.sum() == pytest.approx(1.0)
    assert found.max() <= max(cap, 1 / len(raw)) + 1e-12
    assert (found[np.argsort(given_weights, kind="stable")][:-1] <= found[np.argsort(given_weights)][1:] + 1e-9).all()
