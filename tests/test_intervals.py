"""Intervals of figures, and how they are written, against hand-computed numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steelyard.intervals import estimate, show_estimate, wilson


def test_mean_and_interval_of_three_seeds():
    found = estimate([1.0, 2.0, 3.0])
    # s = 1, half = t/√3; with two degrees of freedom t has a closed form, p√2/√(1 − p²) = 4.302653 at p = .95.
    assert found.mean == 2.0
    assert found.half == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3), rel=1e-12)
    assert found.low == pytest.approx(2.0 - found.half)


def test_one_seed_has_no_interval_and_none_has_nothing():
    one, none = estimate([4.0]), estimate([])
    assert (one.mean, one.values) == (4.0, (4.0,))
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert none.values == ()
    assert all(map(math.isnan, (none.mean, none.low, none.high)))


@given(st.floats(0, 1), st.integers(1, 2_000))
def test_wilsons_interval_holds_the_share_and_narrows_with_rows(share: float, rows: int) -> None:
    low, high = wilson(share, rows)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1
    wider = wilson(share, rows / 4)
    assert high - low <= wider[1] - wider[0] + 1e-12


def test_wilsons_interval_by_hand() -> None:
    # 0 of 10: z² / (n + z²) = 3.8415 / 13.8415; 15 of 20: (.75 + .09604) / 1.19207 ± 1.96 √(.009375 + .0024) / 1.19207.
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=5e-5)
    assert wilson(0.75, 20) == pytest.approx((0.5313, 0.8881), abs=5e-5)
    assert wilson(1.0, 0) == (0.0, 1.0)


def test_an_estimate_is_written_with_half_its_interval() -> None:
    found = estimate([0.91, 0.93]).as_json()  # t(1) = 12.706, s/√2 = .01
    assert show_estimate(found, 1, 100.0) == "92.0 ± 12.7"
    assert show_estimate(found, 1, 100.0, unit=" %", between="±") == "92.0 %±12.7"
    assert show_estimate(estimate([-0.02]).as_json(), 1, 100.0, signed=True) == "−2.0"
    assert show_estimate(estimate([0.02]).as_json(), 1, 100.0, signed=True) == "+2.0"
    assert show_estimate(estimate([-0.0001]).as_json()) == "0.0"
    assert [show_estimate(value) for value in (None, estimate([]).as_json())] == ["–", "–"]


def test_the_interval_is_scipys():
    values = [0.3, 0.1, 0.7, 0.2]
    found = estimate(values)
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-12)
    assert found.as_json() == {"mean": found.mean, "low": found.low, "high": found.high, "values": values}
