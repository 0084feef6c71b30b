"""Intervals, paired tests and Holm's correction, against hand-computed numbers and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steelyard.report.statistics import equivalence_p, holm, paired_p, verdict


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_the_paired_test_is_scipys(values):
    differences = np.round(values, 3)
    if np.ptp(differences) > 1e-6:
        for test in (stats.ttest_rel(differences, np.zeros(len(differences))), stats.ttest_1samp(differences, 0.0)):
            # Both sum up to eight numbers below 100 that differ by 0.001 or more: cancellation costs about 5 digits.
            assert paired_p(differences.tolist()) == pytest.approx(test.pvalue, rel=1e-9)


@given(st.lists(st.floats(-0.05, 0.05), min_size=2, max_size=12), st.floats(0.005, 0.05))
def test_equivalence_is_the_larger_of_two_one_sided_tests(values, margin):
    found = equivalence_p(values, margin)
    if max(values) - min(values) < 1e-9:
        return
    below = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    above = stats.ttest_1samp(values, margin, alternative="less").pvalue
    assert found == pytest.approx(max(below, above), abs=1e-9)


def test_equivalence_without_spread_and_without_seeds():
    assert equivalence_p([0.1], 1) is None
    assert equivalence_p([0.0, 0.0, 0.0], 0.01) == 1 / 8
    assert equivalence_p([0.02, 0.02, 0.02], 0.01) == 1
    # No difference that was seen is not the same as no difference.
    noisy = [0.05, -0.05, 0.04, -0.04]
    assert paired_p(noisy) == 1
    assert equivalence_p(noisy, 0.01) > 0.05


def test_differences_without_spread():
    assert paired_p([0.0, 0.0, 0.0]) == 1.0
    assert paired_p([1.0, 1.0]) == 0.5
    assert paired_p([1.0] * 10) == pytest.approx(2 / 1024)
    assert paired_p([1.0]) is None
    assert paired_p([]) is None


def test_spread_and_means_that_are_rounding_are_none():
    # A millionth of a millionth of the mean, but at least of 1, is what sums round by.
    assert paired_p([1e6, 1e6 + 1e-7]) == 0.5
    assert paired_p([-1e6, -1e6 - 1e-7]) == 0.5
    assert paired_p([1e-13] * 3) == 1.0
    assert paired_p([-1e-13] * 3) == 1.0
    assert paired_p([1e-11] * 3) == 0.25
    # s = √2 · 1.2e-12 is more than what is rounded away around 0: t = 1 again.
    assert paired_p([0.0, 2.4e-12]) == pytest.approx(0.5)
    assert paired_p([-1e-11] * 3) == 0.25
    # More than that is a spread: ±1e-9 around 1e-9 has t = 1 with one degree of freedom, p = 1/2 by Cauchy's arctan.
    assert paired_p([0.0, 2e-9]) == pytest.approx(0.5)
    # t = 2 with one degree of freedom: p = 1 − 2 arctan(2)/π.
    assert paired_p([1.0, 3.0]) == pytest.approx(1 - 2 * math.atan(2) / math.pi, rel=1e-12)
    assert paired_p([-1.0, -3.0]) == pytest.approx(1 - 2 * math.atan(2) / math.pi, rel=1e-12)


def test_holm_on_a_worked_example():
    # Sorted: .005·4 = .02, .01·3 = .03, .03·2 = .06, .04·1 = .04, which may not fall below .06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0]
    assert holm([0.8, 0.9, 0.95]) == [1.0, 1.0, 1.0]


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_never_lowers_a_p_value_and_keeps_their_order(values):
    adjusted = holm(values)
    assert all(a is not None and a >= p for a, p in zip(adjusted, values, strict=True))
    assert [adjusted[i] for i in np.argsort(values, kind="stable")] == sorted(a for a in adjusted if a is not None)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_rejects_what_the_step_down_procedure_rejects(values):
    """At any level: go up from the smallest p, reject while p ≤ level / (tests left), stop at the first that is not."""
    adjusted = holm(values)
    for level in (0.01, 0.05, 0.2):
        rejected: set[int] = set()
        for step, index in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
            if (len(values) - step) * values[index] > level:
                break
            rejected.add(index)
        assert {index for index, p in enumerate(adjusted) if p is not None and p <= level} == rejected


def test_holm_corrects_one_test_by_nothing_and_the_least_of_many_as_bonferroni():
    assert holm([0.03]) == [0.03]
    values = [0.2, 0.011, 0.5]
    assert holm(values)[1] == pytest.approx(3 * 0.011, rel=1e-15)


def test_verdicts():
    assert verdict(1.0, 0.01) == "better"
    assert verdict(-1.0, 0.049) == "worse"
    assert verdict(-1.0, 0.05) == "not distinguishable"
    assert verdict(3.0, None) == "untested"
    assert verdict(0.5, 0.01) == "better"
    assert verdict(-0.5, 0.0) == "worse"
    assert verdict(0.0, 0.01) == "not distinguishable"
