"""Cohorts of a fixed size, held to numbers that are computed another way: by integration, by playing, by Gauss' own."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.losses import fixed_delta, fixed_losses, poisson_losses, repeated
from steelyard.privacy.mechanisms import gaussian_epsilon

DELTA = 1e-5


def hockey_stick(noise: float, rate: float, others: float, mine: float, instead: float, epsilon: float) -> float:
    """Integrate max(0, p − e^ε p') over one noisy sum with one client's part, and with another's in its place.

    All other clients send `others`; the shared part of the sum is taken away, so that a cohort without the client is
    at 0, and one with it at its part less that of the one it displaces.
    """

    x = np.linspace(-12 * noise - 2, 12 * noise + 2, 200_001)
    with_it, in_place = (
        (1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, part - others, noise) for part in (mine, instead)
    )
    return float(np.trapezoid(np.maximum(0.0, with_it - math.exp(epsilon) * in_place), x))


@pytest.mark.parametrize(("noise", "rate", "epsilon"), [(1.0, 0.1, 6.5755398), (2.0, 0.5, 3.5), (1.5, 0.02, 1.0)])
def test_one_round_is_what_integration_finds_and_no_less_is_true(noise: float, rate: float, epsilon: float) -> None:
    """Others push one way, the client pushes the other: two whole federations that are as far apart as is accounted."""
    found = float(fixed_delta(np.array([epsilon]), noise / 2, rate)[0])
    assert found == pytest.approx(hockey_stick(noise, rate, -1.0, 1.0, -1.0, epsilon), rel=1e-6)
    if epsilon > 6:
        assert found == pytest.approx(DELTA, rel=1e-4)
        assert spent({Release(noise, "fixed", rate): 1}, DELTA) == pytest.approx(epsilon, abs=1e-4)


@given(
    noise=st.floats(0.6, 3.0),
    rate=st.floats(0.01, 1.0),
    parts=st.tuples(*[st.floats(-1.0, 1.0)] * 3),
    epsilon=st.floats(0.0, 4.0),
)
@settings(max_examples=25, deadline=None)
def test_no_federation_is_further_apart_than_is_accounted(
    noise: float, rate: float, parts: tuple[float, float, float], epsilon: float
) -> None:
    assert hockey_stick(noise, rate, *parts, epsilon) <= fixed_delta(np.array([epsilon]), noise / 2, rate)[0] + 1e-9


def test_below_zero_the_curve_is_that_of_the_other_direction() -> None:
    # δ(−ε) = 1 − e^−ε + e^−ε δ(ε): the same pair of distributions, the other way round.
    for epsilon in (0.01, 0.5, 3.0):
        below, above = fixed_delta(np.array([-epsilon, epsilon]), 0.7, 0.2)
        assert below == pytest.approx(1 - math.exp(-epsilon) + math.exp(-epsilon) * above)


@pytest.mark.parametrize(("noise", "rate", "rounds", "epsilon"), [(2.0, 0.1, 10, 1.0), (3.0, 0.3, 20, 2.5)])
def test_several_rounds_are_what_playing_finds(noise: float, rate: float, rounds: int, epsilon: float) -> None:
    """Losses of single rounds drawn one by one, from the densities and not from the curve, and added up."""
    generator, plays, half = np.random.default_rng(1), 400_000, noise / 2
    # In units of the distance: at 0 without the client, at 1 with it; beyond 1/2 the loss is above 0. Losses above 0
    # come as likely as with the client, those below 0 are the mirror image of those without it, the rest are 0.
    above = (1 - rate) * norm.sf(0.5, 0, half) + rate * norm.sf(0.5, 1, half)
    below = norm.sf(0.5, 0, half)
    total = np.zeros(plays)
    for _ in range(rounds):
        without = generator.normal(0, half, plays)
        with_it = without + (generator.random(plays) < rate)
        up, down = (np.log1p(rate * np.expm1((2 * x[x > 0.5] - 1) / (2 * half**2))) for x in (with_it, without))
        kind = generator.random(plays)
        rises, falls = kind < above, (kind >= above) & (kind < above + below)
        total[rises] += generator.choice(up, int(rises.sum()))
        total[falls] -= generator.choice(down, int(falls.sum()))
    played = np.maximum(0.0, -np.expm1(epsilon - total))
    error = played.std() / math.sqrt(plays)
    counted = repeated(fixed_losses(half, rate, 1e-3), rounds).get_delta_for_epsilon(epsilon)
    assert played.mean() > 20 * error
    assert counted == pytest.approx(played.mean(), abs=5 * error)


def test_fixed_cohorts_cost_more_than_poisson_ones_with_half_the_noise() -> None:
    """As in Lebeda et al.: taking the worse of the two one-sided sums would promise too much."""
    fixed = spent({Release(2.0, "fixed", 0.1): 100}, DELTA)
    one_sided = spent({Release(1.0, "poisson", 0.1): 100}, DELTA)
    assert fixed > one_sided * 1.01
    assert fixed < spent({Release(2.0, "fixed", 0.1): 100}, DELTA, "rdp")


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
@pytest.mark.parametrize("rounds", [1, 1500])
def test_without_sampling_both_are_the_gaussian_mechanism(rounds: int, delta: float) -> None:
    noise = 2.0 * math.sqrt(rounds)
    exact = gaussian_epsilon(delta, 2.0)
    for made in (fixed_losses, poisson_losses):
        found = repeated(made(noise, 1.0, 1e-4), rounds).get_epsilon_for_delta(delta)
        assert exact - 1e-9 <= found <= exact + 1e-3
    assert spent({Release(2 * noise, "fixed", 1.0): rounds}, delta) == pytest.approx(exact)
