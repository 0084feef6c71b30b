"""Mechanisms against printed figures, their own probabilities, and the attack on trailing bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit import assert_refused, named
from tests.privacy.seeded_source import SeededSource

from steelyard.privacy import noise as mechanisms
from steelyard.privacy.accounting import gaussian_delta, gaussian_epsilon, gaussian_noise
from steelyard.privacy.noise import chosen, each_with, laplacians, lattice_step, normals, uniforms


@pytest.mark.parametrize(
    ("epsilon", "noise"), [(0.1, 30.749566), (0.5, 7.031827), (1.0, 3.730632), (4.0, 1.081162), (10.0, 0.499889)]
)
def test_the_analytic_gaussian_has_balle_and_wangs_figures(epsilon: float, noise: float) -> None:
    assert gaussian_noise(epsilon, 1e-5) == pytest.approx(noise, abs=5e-7)


@given(epsilon=st.floats(0.01, 50), delta=st.floats(1e-12, 0.2))
@settings(max_examples=60, deadline=None)
def test_noise_and_epsilon_are_inverse_and_never_promise_too_much(epsilon: float, delta: float) -> None:
    noise = gaussian_noise(epsilon, delta)
    assert gaussian_delta(epsilon, noise) <= delta
    assert gaussian_delta(epsilon, noise * 0.999) > delta
    assert gaussian_epsilon(delta, noise) == pytest.approx(epsilon, rel=1e-6)


def test_normals_and_laplacians_have_their_moments() -> None:
    drawn = normals(SeededSource(1), 200_001)
    assert len(drawn) == 200_001
    assert abs(drawn.mean()) < 0.01
    assert drawn.std() == pytest.approx(1.0, abs=0.01)
    assert np.mean(np.abs(drawn) > 1.959964) == pytest.approx(0.05, abs=0.002)
    assert laplacians(SeededSource(2), 200_000).var() == pytest.approx(2.0, abs=0.05)


def test_small_uniforms_have_all_their_bits() -> None:
    class Small:
        """A source whose words are almost 0: the case that leaves holes in the tails of other generators."""

        asked = 0

        def words(self, count: int) -> np.ndarray:
            self.asked += 1
            return np.arange(count, dtype=np.uint64) << np.uint64(0 if self.asked == 1 else 62)

    found = uniforms(Small(), 4)
    assert found[0] == 0.5 * 2.0**-128  # word 0, then another word 0 for the bits below
    # What lies below the first word is the second word: 0, 1/4, 1/2, 3/4.
    assert (found * 2.0**64).tolist() == [0.5 * 2.0**-64, 1.25, 2.5, 3.75]


def test_laplace_keeps_its_promise_on_two_neighbours() -> None:
    # Of values 0 and 1 with Δ = 1 and ε = 1, no event is more than e times as likely under one as under the other.
    source = SeededSource(4)
    zeros, ones = (mechanisms.laplace(np.full(20_000, value), 1.0, 1.0, source) for value in (0.0, 1.0))
    for threshold in (-1.0, 0.0, 0.5, 1.0, 2.0):
        assert np.mean(ones > threshold) <= math.e * np.mean(zeros > threshold) + 0.02
        assert np.mean(zeros < threshold) <= math.e * np.mean(ones < threshold) + 0.02
    assert zeros.std() == pytest.approx(math.sqrt(2), abs=0.05)
    normal = mechanisms.gaussian(np.zeros(20_000), 2.0, 1.0, 1e-5, source)
    assert normal.std() == pytest.approx(2 * gaussian_noise(1.0, 1e-5), rel=0.02)


def test_cohorts_are_drawn_with_their_probability() -> None:
    names = [f"c{number:03d}" for number in range(200)]
    source = SeededSource(7)
    assert len(chosen(source, names, 20)) == 20
    assert chosen(source, names, 20) != chosen(source, names, 20)
    assert np.mean([len(each_with(source, names, 0.1)) for _ in range(500)]) == pytest.approx(20.0, abs=1.0)
    for word, rate, drawn in ((2**63, 0.5, []), (2**62, 0.5, ["a", "b"]), (2**64 - 1, 1.0, ["a", "b"])):
        assert each_with(Words(word), list("ab"), rate) == drawn
    assert each_with(Words(0), [], 0.5) == []


class Words:
    """A source that gives the same word again and again."""

    def __init__(self, word: int) -> None:
        self.word = word

    def words(self, count: int) -> np.ndarray:
        return np.full(count, self.word, dtype=np.uint64)


def test_uniforms_are_never_0_and_never_1() -> None:
    assert uniforms(Words(2**64 - 1), 2).tolist() == [1.0 - 2.0**-53] * 2
    assert uniforms(Words(0), 1)[0] == 2.0**-64 * 2.0**-65
    # The first word that is large enough has its bits already.
    assert uniforms(Words(2**40), 1)[0] == (2.0**40 + 0.5) * 2.0**-64


@pytest.mark.parametrize(
    ("call", "words"),
    named(
        [
            (
                "epsilon 0",
                lambda: mechanisms.laplace(np.zeros(2), 1.0, 0.0, SeededSource(1)),
                ("epsilon", 0, "above 0"),
            ),
            (
                "nothing moves",
                lambda: mechanisms.exponential(np.zeros(2), 0.0, 1.0, SeededSource(1)),
                ("sensitivity", 0),
            ),
            ("none", lambda: mechanisms.exponential(np.zeros(0), 1.0, 1.0, SeededSource(1)), ("utilities", "empty")),
            (
                "NaN",
                lambda: mechanisms.exponential(np.array([np.nan]), 1.0, 1.0, SeededSource(1)),
                ("utilities", "finite"),
            ),
            ("no end", lambda: gaussian_noise(math.inf, 1e-5), ("epsilon", "inf")),
            ("delta 1", lambda: gaussian_noise(1.0, 1.0), ("delta", 1, "numbers between 0 and 1")),
            *(
                (f"level {level}", lambda level=level: told([level], 3, 1.0, 1), ("values", "0 to 2"))
                for level in (3, -1)
            ),
        ]
    ),
)
def test_what_no_mechanism_can_do_is_one_line(call: Callable[[], object], words: tuple[object, ...]) -> None:
    assert_refused(call, *words)


def test_a_single_number_lies_on_a_lattice_as_fine_as_its_noise_asks_for() -> None:
    """Mironov's attack reads the value off the grid that a sum lies on: here the grid is the same for all values."""
    assert (lattice_step(1.0), lattice_step(3.9)) == (2.0**-16, 2.0**-15)
    # Noise of scale 1: steps of 2^-16. Four numbers share the sensitivity: each moves by a quarter, and the lattice is
    # four times as fine. Gaussian noise is 3.73 times the sensitivity of 8, which is 29.8: steps of 2^-12, and of
    # 2^-13 for each of four.
    for draw, count, step in (
        (lambda values, source: mechanisms.laplace(values, 1.0, 1.0, source), 1, 2.0**-16),
        (lambda values, source: mechanisms.laplace(values, 1.0, 1.0, source), 4, 2.0**-18),
        (lambda values, source: mechanisms.gaussian(values, 8.0, 1.0, 1e-5, source), 1, 2.0**-12),
        (lambda values, source: mechanisms.gaussian(values, 8.0, 1.0, 1e-5, source), 4, 2.0**-13),
    ):
        steps = np.concatenate([draw(np.full(count, 1 / 3), SeededSource(n)) for n in range(100)]) / step
        assert np.array_equal(steps, np.rint(steps))
        assert not np.array_equal(steps / 2, np.rint(steps / 2))


def test_the_exponential_mechanism_takes_the_first_whose_share_is_passed() -> None:
    # Utilities 0 and 2 ln 3 with ε = Δ = 1 have the shares ¼ and ¾.
    utilities = np.array([0.0, 2 * math.log(3)])
    for word, taken in ((2**62 - 2**20, 0), (2**62 + 2**20, 1), (2**64 - 1, 1), (2**40, 0)):
        assert mechanisms.exponential(utilities, 1.0, 1.0, Words(word)) == taken
        assert mechanisms.exponential(3 * utilities, 3.0, 1.0, Words(word)) == taken
        assert mechanisms.exponential(utilities / 2, 1.0, 2.0, Words(word)) == taken
    assert mechanisms.exponential(np.zeros(2), 1.0, 1.0, Words(2**64 - 1)) == 1
    assert mechanisms.exponential(np.array([0.0, 1e9]), 1.0, 1.0, Words(2**20)) == 1


def test_the_gaussian_mechanism_at_its_edges() -> None:
    # δ at ε = 0 is Φ(1/2z) − Φ(−1/2z): 0.3829 for z = 1.
    assert gaussian_delta(0.0, 1.0) == pytest.approx(0.38292492254802624, rel=1e-12)
    assert gaussian_delta(5000.0, 0.001) == pytest.approx(1.0)
    assert gaussian_epsilon(gaussian_delta(0.0, 1.0), 1.0) == 0.0
    assert gaussian_epsilon(0.38, 1.0) > 0
    # The least noise, to a few last bits: any less passes the budget.
    least = gaussian_noise(1.0, 1e-5)
    assert gaussian_delta(1.0, least) <= 1e-5 < gaussian_delta(1.0, least * (1 - 1e-12))


def told(values: Any, levels: int, epsilon: float, seed: int) -> np.ndarray:
    return mechanisms.randomised_response(np.array(values), levels, epsilon, SeededSource(seed))
