"""What right guesses about canaries refute: never more than is true, and much where they are all right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from steelyard.privacy.canaries import _counts, chance, lower_bound


def test_the_same_distribution_bounds_nothing() -> None:
    generator = np.random.default_rng(0)
    found = [lower_bound(generator.random(1000) < 0.5, generator.normal(size=1000), 1e-5) for _ in range(20)]
    assert sum(bound > 0 for bound in found) <= 3  # each may be wrong once in twenty times
    assert max(found) < 0.5


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomised_response_is_bounded_from_below_and_never_by_more_than_is_true(epsilon: float) -> None:
    """Each canary's bit is told truly with e^ε/(1 + e^ε): nothing that keeps ε tells more of it."""
    generator, found = np.random.default_rng(1), list[float]()
    for _ in range(20):
        inside = generator.random(4000) < 0.5
        told = np.where(generator.random(4000) < 1 / (1 + math.exp(-epsilon)), inside, ~inside)
        found.append(lower_bound(inside, told + 0.1 * generator.random(4000), 0.0))
    assert sum(bound > epsilon for bound in found) <= 3
    assert np.median(found) > 0.7 * epsilon


def test_guesses_that_are_all_right_are_bounded_by_their_number() -> None:
    inside = np.arange(200) % 2 == 0
    # All 200 guessed: with a hundredth of error for each of the five choices, e^ε/(1 + e^ε) is at least 0.01^(1/200).
    coin = 0.01 ** (1 / 200)
    assert lower_bound(inside, inside * 1.0, 0.0) == pytest.approx(math.log(coin / (1 - coin)), abs=1e-3)


@given(guesses=st.integers(1, 60), epsilon=st.floats(0, 5), right=st.integers(0, 60), delta=st.floats(0, 1e-3))
@settings(max_examples=60, deadline=None)
def test_a_delta_makes_right_guesses_likelier(guesses: int, epsilon: float, right: int, delta: float) -> None:
    right = min(right, guesses)
    coin = 1 / (1 + math.exp(-epsilon))
    slow = max(
        (binom.sf(right - i - 1, guesses, coin) - binom.sf(right - 1, guesses, coin)) / i for i in range(1, guesses + 1)
    )
    expected = min(1.0, binom.sf(right - 1, guesses, coin) + 2 * guesses * delta * slow)
    assert chance(guesses, guesses, right, epsilon, delta) == pytest.approx(expected, abs=1e-9)


def test_some_tries_say_in_of_more_canaries_than_they_say_out() -> None:
    assert _counts(40, (0.25, 0.0)) == (10, 0)
    assert _counts(41, (0.1, 0.5)) == (4, 20)
