"""Figures of a run from hand-made scores, and against a search by hand."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steelyard.report.measures import jain, on_sample, rounds_to_shares, rounds_to_target, worst_tenth

SCORES = np.array([[0.1, 0.2, 0.3], [0.9, 0.2, 0.3], [0.9, 0.8, 0.95], [0.5, 0.5, 0.5]])
ROUNDS = np.array([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("target", "share", "expected"),
    [(0.9, 0.1, 2), (0.9, 1 / 3, 2), (0.9, 0.5, 3), (0.9, 1.0, None), (0.8, 1.0, 3), (0.3, 0.3, 1), (0.99, 0.1, None)],
)
def test_rounds_to_target_by_hand(target: float, share: float, expected: int | None) -> None:
    assert rounds_to_target(ROUNDS, SCORES, target, share) == expected


def test_above_asks_for_more_than_the_target() -> None:
    assert rounds_to_target(ROUNDS, SCORES, 0.9, 0.1, above=True) == 3
    assert rounds_to_target(ROUNDS, SCORES, 0.89, 0.1, above=True) == 2
    assert rounds_to_target(ROUNDS, SCORES, 0.95, 0.1, above=True) is None


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)])
def test_without_rounds_or_devices_nothing_is_reached(shape: tuple[int, int]) -> None:
    assert rounds_to_target(np.arange(shape[0]), np.ones(shape), 0.5, 0.5) is None


def test_the_share_is_not_rounded_up_by_binary_fractions() -> None:
    # 0.07 · 100 is 7.000000000000001 in binary and must ask for 7 devices, not 8.
    scores = np.array([[1.0] * 7 + [0.0] * 93])
    assert rounds_to_target(np.array([1]), scores, 0.5, 0.07) == 1
    assert rounds_to_target(np.array([1]), scores, 0.5, 0.0701) is None


SCORE_TABLES = st.tuples(st.integers(0, 6), st.integers(0, 7)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
)


@given(SCORE_TABLES, st.sampled_from([0.25, 0.5, 0.6, 1.0]), st.integers(1, 100), st.integers(1, 5))
def test_rounds_to_target_against_a_search_with_exact_fractions(scores, target, hundredths, step) -> None:
    rounds = np.arange(1, len(scores) + 1) * step
    expected = None
    for round, row in zip(rounds.tolist(), scores.tolist(), strict=True):
        enough = sum(score >= target for score in row) >= Fraction(hundredths, 100) * len(row)
        if row and enough:
            expected = round
            break
    assert rounds_to_target(rounds, scores, target, hundredths / 100) == expected
    assert rounds_to_shares(rounds, scores, target, [1.0, hundredths / 100])[1] == expected


def test_worst_tenth_is_the_mean_of_the_worst() -> None:
    assert worst_tenth(np.arange(20) / 20) == pytest.approx(0.025)


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (9, 1), (10, 1), (11, 2), (15, 2), (20, 2), (21, 3), (30, 3)])
def test_a_tenth_that_is_no_whole_number_of_devices_is_rounded_up(devices: int, count: int) -> None:
    # Of 15 devices the worst two: whoever is left behind is not rounded away.
    scores = np.random.default_rng(devices).permutation(np.arange(devices, dtype=np.float64))
    assert worst_tenth(scores) == pytest.approx((count - 1) / 2)
    assert worst_tenth(np.array([0.4, 0.6])) == 0.4
    assert np.isnan(worst_tenth(np.zeros(0)))


def test_jain() -> None:
    assert jain(np.array([0.5, 0.5, 0.5])) == pytest.approx(1)
    assert jain(np.array([1.0, 0, 0, 0])) == pytest.approx(0.25)
    assert jain(np.array([1.0, 2.0, 3.0])) == pytest.approx(36 / (3 * 14))
    assert np.isnan(jain(np.zeros(3)))


def test_the_interval_of_a_sample_holds_the_score_of_all_as_often_as_it_says() -> None:
    draw = np.random.default_rng(5)
    rows = draw.integers(1, 30, 4000)
    scores = draw.binomial(rows, draw.beta(4, 2, 4000)) / rows
    truth, held = float(scores @ rows / rows.sum()), 0
    for _ in range(400):
        some = draw.choice(4000, 300, replace=False)
        found = on_sample(scores[some], rows[some], 4000)
        held += found["low"] <= truth <= found["high"]
    assert 0.92 <= held / 400 <= 0.98
    whole = on_sample(scores, rows, 4000)
    assert whole["low"] == whole["high"] == pytest.approx(truth)
