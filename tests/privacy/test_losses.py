"""Cohorts of a fixed size, held to numbers that are computed another way: by integration, by playing, by Gauss' own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.losses import farthest, fixed_delta, fixed_losses, poisson_delta, poisson_losses, repeated
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


@pytest.mark.parametrize(
    ("noise", "rate", "rounds"), [(1.0, 0.1, 100), (1.0, 0.5, 10), (4.0, 0.9, 1000), (0.3, 0.01, 5), (2.0, 1.0, 3)]
)
def test_poisson_cohorts_have_the_losses_of_the_library(noise: float, rate: float, rounds: int) -> None:
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    ours = repeated(poisson_losses(noise, rate, 1e-3), rounds)
    theirs = from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=1e-3).self_compose(rounds)
    for delta in (1e-3, 1e-5, 1e-8):
        expected = theirs.get_epsilon_for_delta(delta)
        assert ours.get_epsilon_for_delta(delta) == pytest.approx(expected, rel=1e-6)


@given(st.floats(0.3, 5.0), st.floats(0.01, 0.99), st.floats(-3.0, 3.0))
def test_one_poisson_round_is_what_integration_finds(noise: float, rate: float, epsilon: float) -> None:
    line = np.linspace(-12 * noise, 1 + 12 * noise, 20_001)
    without = norm.pdf(line, 0, noise)
    having = (1 - rate) * without + rate * norm.pdf(line, 1, noise)
    for added, (one, other) in ((False, (having, without)), (True, (without, having))):
        integral = np.maximum(one - math.exp(epsilon) * other, 0.0).sum() * (line[1] - line[0])
        assert poisson_delta(np.array([epsilon]), noise, rate, added=added)[0] == pytest.approx(integral, abs=1e-5)


def test_poisson_losses_beyond_where_e_to_epsilon_is_a_number() -> None:
    # A half of the clients: half of the δ of all of them, at ε + ln 2; z = 1/100.
    (half,) = poisson_delta(np.array([4900.0 - math.log(2)]), 0.01, 0.5)
    assert half == pytest.approx(norm.cdf(50 - 49) / 2, abs=0.01)
    assert poisson_delta(np.array([-800.0, 1e6]), 1.0, 0.5).tolist() == [1.0, 0.0]
    assert poisson_delta(np.array([-800.0, 1e6]), 1.0, 0.5, added=True).tolist() == [1.0, 0.0]


def test_the_farthest_loss_that_is_counted_by_hand() -> None:
    # Noise 2: 1/8 + 8.5/2 = 4.375 without sampling; with a tenth of the clients ln(0.9 + 0.1 e^4.375).
    assert farthest(2.0, 1.0) == 4.375
    assert farthest(2.0, 0.1) == pytest.approx(math.log(0.9 + 0.1 * math.exp(4.375)))
    # Where e^ε would overflow: 0.5/0.01² + 8.5/0.01 = 5850.
    assert farthest(0.01, 0.5) == pytest.approx(5850 - math.log(2))


def test_the_curve_at_its_edges() -> None:
    assert fixed_delta(np.array([0.0]), 0.5, 1.0)[0] == pytest.approx(2 * norm.cdf(1.0) - 1)
    assert fixed_delta(np.array([0.0]), 0.5, 0.25)[0] == pytest.approx((2 * norm.cdf(1.0) - 1) / 4)
    # δ(ε) = Φ(1/2z − εz) − e^ε Φ(−1/2z − εz), here with z = 1/100: far beyond where e^ε is a number.
    one, other = fixed_delta(np.array([4900.0, 699.0]), 0.01, 1.0)
    assert one == pytest.approx(norm.cdf(50 - 49), abs=0.01)
    assert other == pytest.approx(1.0)
    # A half of the clients: ln(1 + 2(e^ε − 1)) is ε + ln 2 there.
    (half,) = fixed_delta(np.array([4900.0 - math.log(2)]), 0.01, 0.5)
    assert half == pytest.approx(one / 2, rel=1e-9)
    near = fixed_delta(np.array([699.999999, 700.0, 700.000001]), 0.0265, 0.5)
    assert near == pytest.approx([near[1]] * 3, rel=1e-4)
    assert 0 < near[1] < 0.5
    assert fixed_delta(np.array([-800.0, 1e6]), 1.0, 0.5).tolist() == [1.0, 0.0]


def test_many_releases_are_put_together_in_two_steps() -> None:
    class Counted:
        """Stands for losses: how many releases they are of, and how they came together."""

        def __init__(self, count: int, how: str = "x") -> None:
            self.count, self.how = count, how

        def self_compose(self, times: int) -> Counted:
            return Counted(self.count * times, f"{self.how}*{times}")

        def compose(self, other: Counted) -> Counted:
            return Counted(self.count + other.count, f"{self.how}+{other.how}")

    def found(count: int) -> tuple[int, str]:
        made: Any = repeated(Counted(1), count)  # type: ignore[arg-type]
        return made.count, made.how

    assert found(1000) == (1000, "x*1000")
    assert found(1001) == (1001, "x*1000*1+x*1")
    assert found(2500) == (2500, "x*1000*2+x*500")
    assert found(3000) == (3000, "x*1000*3")
