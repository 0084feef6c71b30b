"""Intervals, paired tests and Holm's correction by hand and by scipy; a test that may be looked at after every seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steelyard.report.statistics import (
    ALPHA,
    LEAST_SEEDS,
    MOST_SEEDS,
    anytime_equivalence_p,
    anytime_p,
    detectable,
    equivalence_p,
    holm,
    paired_p,
    paired_tests,
    seeds_for,
    spent,
    verdict,
)

SEEDS = 40


def test_equality_is_shown_within_the_margin_only() -> None:
    draws = np.random.default_rng(5)
    inside = draws.normal(0, 0.005, (100, SEEDS)).tolist()
    at_the_edge = draws.normal(0.01, 0.01, (1000, SEEDS)).tolist()
    assert sum(anytime_equivalence_p(row, 0.01) <= 0.005 for row in inside) / 100 > 0.9
    assert sum(anytime_equivalence_p(row, 0.01) <= ALPHA for row in at_the_edge) / 1000 <= ALPHA


def test_differences_that_are_all_the_same_or_none_decide_as_coins_would() -> None:
    assert anytime_p([]) == anytime_p([0.0] * 20) == 1.0
    assert 2.0**-12 < anytime_p([0.01] * 12) < anytime_p([0.0, *[0.01] * 12]) < 0.002
    assert anytime_equivalence_p([0.0] * 12, 0.01) < 0.001


def test_the_bets_on_signs_by_hand() -> None:
    """Stakes: one half, then tanh(m|d|/s²) with the mean and variance of what came before, and .95 at the most."""
    # Before the second: m = 1/2, s² = 1 − 1/4; before the third m = 2/3, s² = 1 − 4/9.
    second = math.tanh(0.5 / 0.75)
    wealth = [1.5, 1.5 * (1 + second), 1.5 * (1 + second) * 1.95]  # tanh(2/3 · 2 / (5/9)) = .98
    down = 0.5  # who bet on the other sign stakes nothing more
    assert anytime_p([1.0]) == 1.0
    assert anytime_p([1.0, 1.0]) == pytest.approx(2 / (wealth[1] + down))
    assert anytime_p([-1.0, -1.0]) == pytest.approx(anytime_p([1.0, 1.0]))
    assert anytime_p([1.0, 1.0, 2.0]) == pytest.approx(2 / (wealth[2] + down))
    assert anytime_p([1.0, 1.0, -2.0]) == pytest.approx(2 / (wealth[1] + down))  # what was shown stays shown
    third = math.tanh(2 / 3 * 0.1 / (5 / 9))
    assert anytime_p([1.0, 1.0, 0.1]) == pytest.approx(2 / (wealth[1] * (1 + third) + down))
    assert anytime_p([1.0, 0.0]) == 1.0
    # Equal within a half: both 1/2 and 1/2 away from its ends; one beyond an end is beyond.
    assert anytime_equivalence_p([0.0], 0.5) == pytest.approx(1 / 1.5)
    assert anytime_equivalence_p([1.0], 0.5) == anytime_equivalence_p([-1.0], 0.5) == 1.0
    assert anytime_equivalence_p([0.0, 0.25], 0.5) == pytest.approx(1 / (1.5 * (1 + math.tanh(0.25 * 0.25 / 0.1875))))
    assert (spent(0.05, 1), spent(0.06, 2)) == pytest.approx((0.025, 0.01))


def test_each_rule_is_tested_and_all_of_them_are_one_family() -> None:
    """Differences 1, 2, 3 have t = √12, and p = .0742 with two degrees of freedom."""
    found = paired_tests({"A": [1.0, 2.0, 3.0], "B": [-1.0, -2.0, -3.0], "C": [0.5]})
    assert list(found) == ["A", "B", "C"]
    p = 1 - math.sqrt(12 / 14)  # 1 − t / √(2 + t²)
    for rule, mean in (("A", 2.0), ("B", -2.0)):
        each = found[rule]
        assert (each.mean, each.p, each.p_holm, each.verdict) == pytest.approx((mean, p, 2 * p, "not distinguishable"))
        assert each.high - each.mean == pytest.approx(4.302653 / math.sqrt(3))
        assert each.values == tuple(abs(value) * mean / 2 for value in (1.0, 2.0, 3.0))
    assert (found["C"].p, found["C"].p_holm, found["C"].verdict) == (None, None, "untested")
    assert paired_tests({"A": [1.0, 1.1, 1.2]})["A"].verdict == "better"


def test_how_many_seeds_are_needed_is_the_least_that_see_it() -> None:
    assert seeds_for(100.0, 1.0) == LEAST_SEEDS
    least = detectable(1.0, MOST_SEEDS)
    assert seeds_for(least, 1.0) == MOST_SEEDS
    assert seeds_for(least * 0.999, 1.0) is None
    assert [seeds_for(detectable(1.0, seeds, 2), 1.0, 2) for seeds in (4, 10, 501)] == [4, 10, 501]
    # Cohen's small, medium and large effect at 5 % and 80 % power, in the tables of paired tests.
    assert [seeds_for(effect, 1.0) for effect in (0.2, 0.5, 0.8, 1.0)] == [199, 34, 15, 10]
    assert seeds_for(1.0, 2.0) == 34
    assert seeds_for(least, 1.0, 9) is None
    assert detectable(2.0, 10) == 2 * detectable(1.0, 10) < detectable(2.0, 10, 3)


@pytest.mark.parametrize("kind", ["heavy tails", "rows of a test set", "ties"])
def test_of_a_thousand_comparisons_without_a_difference_one_in_twenty_is_decided_at_most(kind: str) -> None:
    """Looked at after every one of 40 seeds. The bound is exact, so only the noise of 1,000 draws may be added."""
    draws = np.random.default_rng(32)
    shape = (2, 1000, SEEDS)
    made = {
        "heavy tails": lambda: draws.standard_t(2, shape),
        "rows of a test set": lambda: draws.binomial(400, 0.9, shape) / 400,
        "ties": lambda: draws.integers(0, 2, shape).astype(float),
    }[kind]()
    wrong = sum(anytime_p(row.tolist()) <= ALPHA for row in made[0] - made[1])
    assert wrong / 1000 <= ALPHA


def test_however_many_candidates_open_the_held_out_seeds_they_share_one_level() -> None:
    assert math.fsum(spent(ALPHA, number) for number in range(1, 10_000)) <= ALPHA


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
    assert equivalence_p([0.5, 0.5, 0.5], 0.5) == 1
    assert equivalence_p([1e6, 1e6 + 1e-7], 1e7) == 1 / 4
    assert equivalence_p([0.0, 2.4e-12], 1.2e-12) == 0.5  # as far from its middle as the margin
    # No difference that was seen is not the same as no difference.
    noisy = [0.05, -0.05, 0.04, -0.04]
    assert paired_p(noisy) == 1
    assert equivalence_p(noisy, 0.01) > 0.05


def test_holm_on_a_worked_example():
    # Sorted: .005·4 = .02, .01·3 = .03, .03·2 = .06, .04·1 = .04, which may not fall below .06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.03]) == [0.03]
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0]
    assert holm([0.8, 0.9, 0.95]) == [1.0, 1.0, 1.0]


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


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([0.0, 0.0, 0.0], 1.0),
        ([1.0, 1.0], 0.5),
        ([1.0] * 10, 2 / 1024),
        ([], None),
        # A millionth of a millionth of the mean, but at least of 1, is what sums round by.
        ([1e6, 1e6 + 1e-7], 0.5),
        ([1e-13] * 3, 1.0),
        ([-1e-11] * 3, 0.25),
        # s = √2 · 1.2e-12 is more than what is rounded away around 0: t = 1 again, p = 1/2 by Cauchy's arctan.
        ([0.0, 2.4e-12], 0.5),
        # t = 2 with one degree of freedom: p = 1 − 2 arctan(2)/π.
        ([1.0, 3.0], 1 - 2 * math.atan(2) / math.pi),
    ],
)
def test_differences_with_little_or_no_spread(differences: list[float], p: float | None) -> None:
    assert paired_p(differences) == (p if p is None else pytest.approx(p))


@pytest.mark.parametrize(
    ("mean", "p", "told"),
    [
        (0.5, 0.01, "better"),
        (-0.5, 0.049, "worse"),
        (-1.0, 0.05, "not distinguishable"),
        (3.0, None, "untested"),
        (0.0, 0.01, "not distinguishable"),
    ],
)
def test_verdicts(mean: float, p: float | None, told: str) -> None:
    assert verdict(mean, p) == told
