"""The one place that knows what scores are: direction, range, intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from steelyard.intervals import wilson
from steelyard.learning import evaluation
from steelyard.measures import MEASURES, TASKS, measure_of
from steelyard.weighing import criteria as registry


def test_every_task_has_a_score_a_figure_and_a_criterion_that_exist() -> None:
    for task in TASKS.values():
        assert not measure_of(task.score).less_is_better  # scores are compared and adapted to: more is better
        assert task.score in {measure.name for measure in MEASURES.values()}
        assert task.figure in MEASURES
        assert registry.get(task.criterion).needs.test_set


def test_what_a_measure_says_of_itself() -> None:
    assert [measure_of(name).direction for name in ("RMSE", "c_index")] == ["less is better", "more is better"]
    assert (measure_of("mape").heading, measure_of("mape").show(0.125)) == ("MAPE (%)", "12.50%")
    assert (measure_of("C-index").show(0.71234), measure_of("accuracy").show(None)) == ("0.7123", "-")
    assert measure_of("accuracy").show_interval(0.2077, 0.9385) == "[21–94]"
    assert measure_of("macro F1").show_interval(0.2077, math.nan) == "[?]"
    assert measure_of("macro F1").show_interval(0.2077, 1) == "[0.21–1]"
    assert measure_of("RMSE").show_interval(99.4, 1234.5) == "[99–1,234]"
    assert measure_of("minus RMSE").show_interval(-121.6, -8.25) == "[−122 to −8.2]"
    other = measure_of("ndcg@10")
    assert (other.name, other.bounded, other.interval(0.4, 100)) == ("ndcg@10", False, None)


def test_a_score_with_a_standard_error_has_students_interval_within_its_range() -> None:
    index = MEASURES["c_index"]
    # t for 9 degrees of freedom is 2.262.
    assert index.interval(0.7, 10, 0.05) == pytest.approx((0.5869, 0.8131), abs=5e-5)
    assert index.interval(0.9, 10, 0.1) == pytest.approx((0.6738, 1.0), abs=5e-5)
    # Two perfect rows show nothing of a third; one row shows nothing at all.
    assert index.interval(1.0, 2, 0.0) == wilson(1.0, 2)
    assert index.interval(1.0, 1, math.nan) == (0.0, 1.0)
    assert all(math.isnan(end) for end in MEASURES["rmse"].interval(2.0, 1, math.nan) or ())


def test_few_rows_and_wide_intervals_rank_nobody() -> None:
    accuracy, error = MEASURES["accuracy"], MEASURES["minus_rmse"]
    assert accuracy.too_few(9, *wilson(1.0, 9))
    assert accuracy.too_few(10, *wilson(0.5, 10))  # 24 to 76 %
    assert not accuracy.too_few(30, *wilson(0.5, 30))
    assert MEASURES["macro_f1"].too_few(500, 0.2, 0.8)
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
    expected = brute(lambda rows: guess[rows].mean(), 12)
    assert evaluation.ERRORS["segmentation"](guess, wanted) == pytest.approx(expected)
    assert math.isnan(evaluation.rmse_error(guess[:1], truth[:1]))
    assert math.isnan(evaluation.concordance_error(guess, -times.abs()))
    # Without its only event nothing is left to compare.
    assert math.isnan(evaluation.concordance_error(guess[:3], torch.tensor([1.0, -2.0, -3.0])))
