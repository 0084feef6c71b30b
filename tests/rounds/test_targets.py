"""When a target counts as reached, against a count with exact fractions."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steelyard.rounds.settings import devices_needed, reached

HUNDREDTHS = st.integers(1, 100)


@pytest.mark.parametrize(
    ("share", "devices", "expected"),
    # 0.07 · 100 and 0.55 · 100 are a little more than whole in binary.
    [(0.3, 10, 3), (0.31, 10, 4), (0.07, 100, 7), (0.55, 100, 55), (0.1, 3, 1), (1.0, 7, 7), (0.5, 1, 1), (0.5, 0, 0)],
)
def test_devices_needed_by_hand(share: float, devices: int, expected: int) -> None:
    assert devices_needed(share, devices) == expected


def test_the_slack_is_needed() -> None:
    """Without it some shares that people write would ask for a device too many."""
    wrong = [
        (hundredths, devices)
        for hundredths in range(1, 101)
        for devices in range(1, 101)
        if ceil(hundredths / 100 * devices) != ceil(Fraction(hundredths, 100) * devices)
    ]
    assert (7, 100) in wrong
    assert all(devices_needed(h / 100, n) == ceil(Fraction(h, 100) * n) for h, n in wrong)


@given(HUNDREDTHS, st.integers(1, 100_000))
def test_shares_mean_the_decimals_that_were_written(hundredths: int, devices: int) -> None:
    assert devices_needed(hundredths / 100, devices) == ceil(Fraction(hundredths, 100) * devices)


SCORES = st.tuples(st.integers(0, 4), st.integers(0, 12)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
)


@given(SCORES, st.sampled_from([0.25, 0.5, 0.6, 1.0]), HUNDREDTHS)
def test_reached_against_a_count_by_hand(scores: np.ndarray, target: float, hundredths: int) -> None:
    found = reached(scores, target, hundredths / 100)
    assert found.dtype == np.bool_
    assert found.shape == scores.shape[:1]
    for row, yes in zip(scores.tolist(), found.tolist(), strict=True):
        enough = sum(score >= target for score in row) >= Fraction(hundredths, 100) * len(row)
        assert yes == (bool(row) and enough)


def test_one_round_alone_and_a_target_that_is_met_exactly() -> None:
    assert bool(reached(np.array([0.9, 0.9, 0.1]), 0.9, 0.5))
    assert not bool(reached(np.array([0.9, 0.8, 0.1]), 0.9, 0.5))
    assert not bool(reached(np.zeros(0), 0.0, 0.5))
    assert bool(reached(np.zeros(1), 0.0, 0.5))


def test_above_asks_for_more_than_the_target() -> None:
    scores = np.array([[0.5, 0.6], [0.6, 0.7]])
    assert reached(scores, 0.5, 1.0).tolist() == [True, True]
    assert reached(scores, 0.5, 1.0, above=True).tolist() == [False, True]
