"""Intervals, paired tests and Holm's correction, against hand-computed numbers and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steelyard.report.statistics import estimate, holm, paired_p, verdict


def test_mean_and_interval_of_three_seeds():
    found = estimate([1.0, 2.0, 3.0])
    # s = 1, t(.975, 2) = 4.302653, half = t/√3.
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.302653 / math.sqrt(3), abs=1e-6)
    assert found.low == pytest.approx(2.0 - found.half)


def test_one_seed_has_no_interval_and_none_has_nothing():
    assert estimate([4.0]).mean == 4.0
    assert math.isnan(estimate([4.0]).low)
    assert math.isnan(estimate([]).mean)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_the_paired_test_is_scipys(values):
    differences = np.round(values, 3)
    if np.ptp(differences) > 1e-6:
        expected = stats.ttest_rel(differences, np.zeros(len(differences))).pvalue
        assert paired_p(differences.tolist()) == pytest.approx(expected, rel=1e-9)


def test_differences_without_spread():
    assert paired_p([0.0, 0.0, 0.0]) == 1.0
    assert paired_p([1.0, 1.0]) == 0.5
    assert paired_p([1.0] * 10) == pytest.approx(2 / 1024)
    assert paired_p([1.0]) is None


def test_holm_on_a_worked_example():
    # Sorted: .005·4 = .02, .01·3 = .03, .03·2 = .06, .04·1 = .04, which may not fall below .06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0]


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_never_lowers_a_p_value_and_keeps_their_order(values):
    adjusted = holm(values)
    assert all(a is not None and a >= p for a, p in zip(adjusted, values, strict=True))
    assert [adjusted[i] for i in np.argsort(values, kind="stable")] == sorted(a for a in adjusted if a is not None)


def test_verdicts():
    assert verdict(1.0, 0.01) == "better"
    assert verdict(-1.0, 0.049) == "worse"
    assert verdict(-1.0, 0.05) == "not distinguishable"
    assert verdict(3.0, None) == "untested"
