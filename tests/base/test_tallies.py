"""Measures of sums: by hand, against scikit-learn on random rows, and the same however rows are shared among sites."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from steelyard.base.measures import MEASURES
from steelyard.base.tallies import BINS, REACH, Tally, auc_bound, errors_of, figures_of, tallied


def at_one_site(outputs: np.ndarray, labels: np.ndarray, threshold: float = 0.5) -> Tally:
    return Tally(tallied(outputs, labels, np.zeros(len(labels), np.intp), 1, threshold)[0])


def figures(outputs: np.ndarray, labels: np.ndarray, threshold: float = 0.5) -> dict[str, float]:
    return {name: float(value) for name, value in figures_of(at_one_site(outputs, labels, threshold)).items()}


def log_odds(chances: list[float]) -> np.ndarray:
    return np.log(np.array(chances) / (1 - np.array(chances)))[:, None]


def test_six_rows_by_hand() -> None:
    outputs, labels = log_odds([0.05, 0.35, 0.85, 0.95, 0.6, 0.15]), np.array([0, 0, 0, 1, 1, 1])
    found = figures(outputs, labels)
    # Above one half are 0.85, 0.95 and 0.6: two rows of class 1 of three, one row of class 0 of three.
    assert found["accuracy"] == pytest.approx(4 / 6)
    assert found["sensitivity"] == found["specificity"] == found["balanced_accuracy"] == pytest.approx(2 / 3)
    assert found["f1_score"] == pytest.approx(4 / 6)
    # 0.95 is above three rows of class 0, 0.6 above two, 0.15 above one: six pairs of nine.
    assert found["roc_auc"] == pytest.approx(6 / 9)
    # From the top: class 1, 0, 1, 0, 1, 0.
    assert found["average_precision"] == pytest.approx((1 + 2 / 3 + 3 / 5) / 3)
    squares = [0.05**2, 0.35**2, 0.85**2, 0.05**2, 0.4**2, 0.85**2]
    assert found["brier"] == pytest.approx(sum(squares) / 6)
    assert found["calibration_error"] == pytest.approx((0.05 + 0.35 + 0.85 + 0.05 + 0.4 + 0.85) / 6)
    # At a threshold of 0.7 the row of 0.6 is one of class 0.
    moved = figures(outputs, labels, 0.7)
    assert (moved["sensitivity"], moved["specificity"]) == pytest.approx((1 / 3, 2 / 3))
    assert moved["roc_auc"] == found["roc_auc"]
    # Errors of 1, 0 and −2 on targets of 1, 2 and 6, whose mean is 3.
    numbers = figures(np.array([2.0, 2.0, 4.0]), np.array([1.0, 2.0, 6.0]))
    assert numbers == pytest.approx({"mae": 1.0, "rmse": math.sqrt(5 / 3), "r2": 1 - 5 / 14})


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 60), st.sampled_from([1, 2, 3, 5]), st.floats(0.1, 12.0))
def test_measures_are_those_of_scikit_learn(seed: int, rows: int, width: int, scale: float) -> None:
    chance = np.random.default_rng(seed)
    classes = max(2, width)
    outputs = chance.normal(size=(rows, width)) * scale
    # Every class is there, as scikit-learn asks.
    labels = np.concatenate([np.arange(classes), chance.integers(0, classes, rows)])
    outputs = np.concatenate([chance.normal(size=(classes, width)) * scale, outputs])
    tally = at_one_site(outputs, labels)
    found = {name: float(value) for name, value in figures_of(tally).items()}
    whole = np.concatenate([np.zeros_like(outputs), outputs], axis=1) if width == 1 else outputs
    chances = np.exp(whole - whole.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    predicted, mine = chances.argmax(axis=1), np.eye(classes)[labels]
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(labels, predicted))
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(labels, predicted))
    assert found["brier"] == pytest.approx(np.square(chances - mine).sum() / len(labels) / 2)
    if classes == 2:
        assert found["f1_score"] == pytest.approx(metrics.f1_score(labels, predicted))
        assert found["sensitivity"] == pytest.approx(metrics.recall_score(labels, predicted))
        assert found["specificity"] == pytest.approx(metrics.recall_score(labels, predicted, pos_label=0))
        columns = [1]
    else:
        assert found["f1_score"] == pytest.approx(metrics.f1_score(labels, predicted, average="macro"))
        assert found["sensitivity"] == pytest.approx(metrics.recall_score(labels, predicted, average="macro"))
        columns = list(range(classes))
    exact = np.mean([metrics.roc_auc_score(mine[:, k], chances[:, k]) for k in columns])
    assert abs(found["roc_auc"] - exact) <= float(auc_bound(tally)) + 1e-9
    # With their bins as scores, rows have just the area and the precision that scikit-learn finds.
    with np.errstate(divide="ignore"):
        odds = np.log(chances) - np.log(chances @ (1 - np.eye(classes)))
    bins = np.floor((odds.clip(-REACH, REACH - 1e-9) + REACH) * BINS / (2 * REACH))
    near = np.abs(bins - (odds + REACH) * BINS / (2 * REACH)).min() < 1e-6  # rounding may decide
    if not near:
        binned = np.mean([metrics.roc_auc_score(mine[:, k], bins[:, k]) for k in columns])
        precision = np.mean([metrics.average_precision_score(mine[:, k], bins[:, k]) for k in columns])
        assert (found["roc_auc"], found["average_precision"]) == pytest.approx((binned, precision))
    assert all(MEASURES[name].low <= value <= MEASURES[name].high for name, value in found.items())


@given(st.integers(0, 10**6), st.integers(3, 40))
def test_errors_of_a_regression_are_those_of_scikit_learn(seed: int, rows: int) -> None:
    chance = np.random.default_rng(seed)
    truth, guess = chance.normal(50, 9, rows), chance.normal(50, 9, rows)
    found = figures(guess, truth)
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(truth, guess))
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(truth, guess))
    assert found["r2"] == pytest.approx(metrics.r2_score(truth, guess))


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([0, 1, 3]))
def test_sums_of_sites_are_those_of_all_rows(seed: int, width: int) -> None:
    chance = np.random.default_rng(seed)
    sites, labels = chance.integers(0, 4, 30), chance.integers(0, max(2, width), 30)
    outputs = chance.normal(size=(30, width)) if width else chance.normal(size=30)
    apart = tallied(outputs, labels, sites, 4)
    assert apart.sum(axis=0) == pytest.approx(at_one_site(outputs, labels).cells)
    lone = at_one_site(outputs[sites == 2], labels[sites == 2])
    assert apart[2] == pytest.approx(lone.cells)


def test_what_rows_cannot_say_is_unknown() -> None:
    outputs = np.array([[1.0], [-1.0]])
    negatives = figures(outputs, np.array([0, 0]))
    unknown = {name for name, value in negatives.items() if math.isnan(value)}
    assert unknown == {"roc_auc", "average_precision", "sensitivity"}
    assert negatives["balanced_accuracy"] == negatives["specificity"] == 0.5  # of the class that is there
    assert math.isnan(figures(np.array([1.0, 2.0]), np.array([3.0, 3.0]))["r2"])
    assert math.isnan(errors_of(at_one_site(outputs, np.array([0, 1])).cells)["roc_auc"])
    nothing = figures(np.zeros((0, 2)), np.zeros(0, np.int64))
    assert all(map(math.isnan, nothing.values()))


def test_standard_errors_are_those_of_measures_without_each_row() -> None:
    chance = np.random.default_rng(5)
    outputs, labels = chance.normal(size=(20, 1)), chance.integers(0, 2, 20)
    found = errors_of(at_one_site(outputs, labels).cells)
    for name in ("roc_auc", "average_precision", "balanced_accuracy", "f1_score", "sensitivity", "accuracy"):
        without = [figures(np.delete(outputs, row, axis=0), np.delete(labels, row))[name] for row in range(20)]
        assert found[name] == pytest.approx(math.sqrt(19 / 20 * sum((one - np.mean(without)) ** 2 for one in without)))
    chances = 1 / (1 + np.exp(-outputs[:, 0]))
    squares = np.square(chances - labels)
    assert found["brier"] == pytest.approx(squares.std(ddof=1) / math.sqrt(20))
    assert 0 < found["calibration_error"] < 0.2
    guess, truth = chance.normal(size=20), chance.normal(size=20)
    gaps = np.abs(guess - truth)
    numbers = errors_of(at_one_site(guess, truth).cells)
    assert numbers["mae"] == pytest.approx(gaps.std(ddof=1) / math.sqrt(20))
    assert numbers["rmse"] == pytest.approx(
        np.square(gaps).std(ddof=1) / math.sqrt(20) / 2 / math.sqrt(np.mean(gaps**2))
    )


def test_order_in_a_bin_is_what_binning_loses() -> None:
    width = 2 * REACH / BINS
    outputs = np.array([[0.1 * width], [0.9 * width], [1.5 * width], [2.5 * width]])
    tally = at_one_site(outputs, np.array([0, 1, 0, 1]))
    # One pair of four shares a bin: it counts one half, whichever row is above.
    assert float(figures_of(tally)["roc_auc"]) == pytest.approx((0.5 + 0 + 1 + 1) / 4)
    assert float(auc_bound(tally)) == pytest.approx(0.5 / 4)
    assert all(one < other for one, other in pairwise(np.flatnonzero(tally.scores.sum(axis=(0, 1)))))
