"""The one place that knows what scores are; intervals of figures, and how they are written, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.base.measures import MEASURES, TASKS, Measure, estimate, measure_of, show_estimate, wilson
from steelyard.learning import evaluation
from steelyard.weighing import criterion as registry


def test_a_score_with_a_standard_error_has_students_interval_within_its_range() -> None:
    index = MEASURES["c_index"]
    # t for 9 degrees of freedom is 2.262.
    assert index.interval(0.7, 10, 0.05) == pytest.approx((0.5869, 0.8131), abs=5e-5)
    assert index.interval(0.9, 10, 0.1) == pytest.approx((0.6738, 1.0), abs=5e-5)
    # Two perfect rows show nothing of a third; one row shows nothing at all.
    assert index.interval(1.0, 2, 0.0) == wilson(1.0, 2)
    assert index.interval(1.0, 1, math.nan) == (0.0, 1.0)
    assert index.interval(0.5, 1, 0.1) == (0.0, 1.0)
    # Half a degree of freedom more than one row are something.
    low, high = index.interval(0.5, 1.5, 0.0001) or (0.0, 1.0)
    assert 0.0 < low < 0.5 < high < 1.0
    # A correlation of 0.5 is three quarters of the way from -1 to 1.
    part = wilson(0.75, 9)
    found = Measure("a correlation", low=-1.0, high=1.0).interval(0.5, 9, 0.0)
    assert found == pytest.approx((2 * part[0] - 1, 2 * part[1] - 1))
    for rows, error in ((1, math.nan), (1, 0.1), (9, 0.0), (9, math.nan)):
        nothing = MEASURES["rmse"].interval(2.0, rows, error)
        assert nothing is not None
        assert all(math.isnan(end) for end in nothing)
    assert MEASURES["rmse"].interval(1.0, 10, 1.0) == pytest.approx((0.0, 3.262), abs=5e-4)
    assert MEASURES["accuracy"].interval(0.5, 30) == wilson(0.5, 30)


def test_few_rows_and_wide_intervals_rank_nobody() -> None:
    accuracy, error = MEASURES["accuracy"], MEASURES["minus_rmse"]
    assert accuracy.too_few(9, *wilson(1.0, 9))
    assert accuracy.too_few(10, *wilson(0.5, 10))  # 24 to 76 %
    assert not accuracy.too_few(30, *wilson(0.5, 30))
    assert MEASURES["macro_f1"].too_few(500, 0.2, 0.8)
    assert not MEASURES["macro_f1"].too_few(500, 0.25, 0.75)  # half of its range is not more than half
    correlation = Measure("a correlation", low=-1.0, high=1.0)
    assert [correlation.too_few(500, -0.4, high) for high in (0.7, 0.5)] == [True, False]
    assert error.too_few(500, math.nan, -1.0)
    assert error.too_few(9, -2.0, -1.0)
    assert not error.too_few(10, -2.0, -1.0)


def brute(score: object, rows: int) -> float:
    """The jackknife as it is written: the score without each row."""
    without = [float(score([j for j in range(rows) if j != i])) for i in range(rows)]  # type: ignore[operator]
    mean = sum(without) / rows
    return math.sqrt((rows - 1) / rows * sum((one - mean) ** 2 for one in without))


def test_standard_errors_are_those_of_scores_without_each_row() -> None:
    chance = np.random.default_rng(3)
    guess, truth = (torch.from_numpy(chance.normal(size=12)) for _ in range(2))
    times = torch.from_numpy(chance.integers(1, 7, 12) * chance.choice([-1.0, 1.0], 12))
    expected = brute(lambda rows: evaluation.errors(guess[rows], truth[rows])["rmse"], 12)
    assert evaluation.rmse_error(guess, truth) == pytest.approx(expected)
    expected = brute(lambda rows: evaluation.concordance(guess[rows], times[rows]), 12)
    assert evaluation.concordance_error(guess, times) == pytest.approx(expected)
    wanted, found = (torch.from_numpy(chance.integers(0, 2, (12, 3))) for _ in range(2))
    expected = brute(lambda rows: evaluation.label_f1(found[rows], wanted[rows])["macro_f1"], 12)
    assert evaluation.ERRORS["multi-label"](found, wanted) == pytest.approx(expected)
    assert math.isnan(evaluation.rmse_error(guess[:1], truth[:1]))
    assert math.isnan(evaluation.concordance_error(guess, -times.abs()))
    # Without its only event nothing is left to compare.
    assert math.isnan(evaluation.concordance_error(guess[:3], torch.tensor([1.0, -2.0, -3.0])))


@pytest.mark.parametrize(
    ("name", "low", "high", "shown"),
    [
        ("accuracy", 0.6049, 0.9385, "[60–94]"),
        ("macro F1", 0.2077, math.nan, "[?]"),
        ("macro F1", 0.2077, 1, "[0.21–1]"),
        ("RMSE", 99.4, 1234.5, "[99–1,234]"),
        ("RMSE", 20, 100.0, "[20–100]"),
        ("RMSE", math.nan, 100.0, "[?]"),
        ("RMSE", 0, 5.55, "[0–5.5]"),
        ("minus RMSE", -121.6, -8.25, "[−122 to −8.2]"),
    ],
)
def test_an_interval_is_as_exact_as_it_is_narrow(name: str, low: float, high: float, shown: str) -> None:
    assert measure_of(name).show_interval(low, high) == shown


def test_every_task_has_a_score_of_which_more_is_better_and_a_criterion() -> None:
    for task in TASKS.values():
        assert not measure_of(task.score).less_is_better  # scores are compared and adapted to
        assert task.figure in MEASURES
        assert registry.get(task.criterion).needs.test_set
    assert [measure_of(name).direction for name in ("RMSE", "c_index")] == ["lower is better", "higher is better"]
    assert measure_of("server-macro-f1") is MEASURES["macro_f1"]
    assert (measure_of("mape").show(0.125), measure_of("C-index").show(0.71234)) == ("12.50%", "0.7123")
    assert [measure_of("mape").show(value) for value in (None, math.nan, 0.0)] == ["-", "-", "0.00%"]
    assert measure_of("EQ, 3 rounds, macro F1") is measure_of("EQ, server-macro-f1") is MEASURES["macro_f1"]
    assert measure_of("server-RMSE").name == "server-RMSE"
    assert measure_of("EQ, ndcg@10").name == "EQ, ndcg@10"
    other = measure_of("ndcg@10")
    assert (other.bounded, other.interval(0.4, 100)) == (False, None)


def test_mean_and_interval_of_three_seeds():
    found = estimate([1.0, 2.0, 3.0])
    # s = 1, half = t/√3; with two degrees of freedom t has a closed form, p√2/√(1 − p²) = 4.302653 at p = .95.
    assert found.mean == found["mean"] == 2.0
    assert found.half == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3), rel=1e-12)
    assert (found.low, found.high) == pytest.approx((2.0 - found.half, 2.0 + found.half))
    assert found.values == (1.0, 2.0, 3.0)
    assert estimate([1.0, 2.0, 6.0]).half == pytest.approx(found.half * math.sqrt(7))  # s² = (4 + 1 + 9) / 2
    for few in ([], [0.25]):
        alone = estimate(few)
        assert alone.values == tuple(few)
        assert all(math.isnan(end) for end in (alone.low, alone.high))
        assert alone.mean == 0.25 if few else math.isnan(alone.mean)


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
    assert wilson(1.0, 1) == pytest.approx((1 / 4.8415, 1.0), abs=5e-5)


def test_an_estimate_is_written_with_half_its_interval() -> None:
    found = estimate([0.91, 0.93])  # t(1) = 12.706, s/√2 = .01
    assert show_estimate(found, 1, 100.0) == "92.0 ± 12.7"
    assert show_estimate(found, 1, 100.0, unit=" %", between="±") == "92.0 %±12.7"
    assert show_estimate(estimate([-0.02]), 1, 100.0, signed=True) == "−2.0"
    assert show_estimate(estimate([0.02]), 1, 100.0, signed=True) == "+2.0"
    assert [show_estimate(estimate([value])) for value in (-0.0001, 0.5)] == ["0.0", "0.5"]
    assert [show_estimate(estimate([value]), 0, signed=True) for value in (-0.1, 0.0, -3.0)] == ["0", "+0", "−3"]
    assert show_estimate(estimate([-0.2]), unit=" %") == "−0.2 %"
    assert [show_estimate(value) for value in (None, estimate([]))] == ["–", "–"]
