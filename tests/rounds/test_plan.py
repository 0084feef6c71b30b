"""[rounds]: defaults, limits, and when a target counts as reached, against a count with exact fractions."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steelyard.rounds.plan import RoundSettings, devices_needed, reached


@example(50)
@given(st.integers(1, 50))
def test_all_of_up_to_fifty_clients_take_part_unless_a_share_is_given(clients: int) -> None:
    assert (RoundSettings().share_of(clients), RoundSettings().cohort(clients)) == (1.0, clients)
    assert RoundSettings(fraction=0.1, min_clients=0).cohort(clients) == max(1, (clients + 5) // 10)


@given(st.integers(51, 100_000))
def test_of_more_a_tenth_takes_part_but_at_least_ten(clients: int) -> None:
    assert RoundSettings().cohort(clients) == max(10, (clients + 5) // 10)
    # Poisson sampling draws each client with the share itself: it is at least a tenth, and ten clients in the mean.
    assert RoundSettings().share_of(clients) == max(0.1, 10 / clients)
    assert RoundSettings(min_clients=30).cohort(clients) == max(30, (clients + 5) // 10)


HUNDREDTHS = st.integers(1, 100)


@given(HUNDREDTHS, st.integers(0, 100_000))
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


def test_above_asks_for_more_than_the_target() -> None:
    scores = np.array([[0.5, 0.6], [0.6, 0.7]])
    assert reached(scores, 0.5, 1.0).tolist() == [True, True]
    assert reached(scores, 0.5, 1.0, above=True).tolist() == [False, True]
