"""Budgets against the figures of other tools, integration and play, and what canaries refute of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm
from tests.conftest import CommandLine

from steelyard.privacy.accounting import (
    Release,
    chance,
    farthest,
    fixed_delta,
    gaussian_epsilon,
    lower_bound,
    poisson_delta,
    poisson_losses,
    repeated,
    spent,
    together,
)
from steelyard.privacy.planning import BudgetPlan, noise_for, plan

DELTA = 1e-5


@pytest.mark.parametrize(
    ("noise", "rate", "rounds", "known"),
    [(1.1, 0.01, 1000, 1.5154), (1.0, 0.1, 100, 7.0466), (4.0, 1.0, 20, 4.9833)],
)
def test_known_budgets(noise: float, rate: float, rounds: int, known: float) -> None:
    releases = {Release(noise, "poisson", rate): rounds}
    assert spent(releases, DELTA) == pytest.approx(known, abs=5e-5)
    coarse = spent(releases, DELTA, coarse=True)
    assert known - 1e-4 <= coarse <= known * 1.002


def test_plain_releases_add_up_exactly() -> None:
    # 20 with noise 4 are one with 4/√20; so are 5 with noise 2, since 5/4 = 20/16.
    assert together({Release(4.0): 20}) == pytest.approx(4 / 20**0.5)
    assert spent({Release(2.0): 5}, DELTA) == pytest.approx(spent({Release(4.0): 20}, DELTA))
    assert spent({Release(4.0): 10, Release(2.0): 2}, DELTA) < spent({Release(4.0): 20}, DELTA)
    # Nearly everybody and very much noise: ε is far below the usual steps.
    assert spent({Release(1e3, "poisson", 1 - 1e-6): 1}, 1e-6) == pytest.approx(gaussian_epsilon(1e-6, 1e3), rel=1e-4)
    assert spent({}, DELTA) == 0.0
    assert spent({Release(4.0): 0}, DELTA) == 0.0


def test_sampled_releases_of_two_kinds_add_up() -> None:
    """60 and 40 of nearly the same kind are 100 of it; of quite different kinds each costs something."""
    parts = {Release(1.0, "poisson", 0.1): 60, Release(1.0, "poisson", 0.1 + 1e-12): 40}
    assert spent(parts, DELTA, coarse=True) == pytest.approx(7.0466, abs=0.02)
    other = {Release(1.0, "poisson", 0.1): 100, Release(3.0, "fixed", 0.2): 10}
    assert spent(other, DELTA, coarse=True) > 7.0466 + 0.1


def test_but_for_half_of_delta_nobody_is_in_more_cohorts_than_are_counted() -> None:
    """The only bound where losses reach too far to be counted: hardly any noise, and few who are drawn."""

    def most(count: int, rate: float) -> int:
        """The least k that is passed with probability δ/2 by three at most: each has a third."""
        chances = [math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(count + 1)]
        return next(k for k in range(count + 1) if sum(chances[k + 1 :]) <= 1e-4 / 2 / 3)

    counted = {Release(2e-3): 1, Release(1e-3, "poisson", 0.01): 20, Release(2e-3, "fixed", 0.001): 10}
    squares = 1 / 2e-3**2 + most(20, 0.01) / 1e-3**2 + most(10, 0.001) / 1e-3**2
    expected = gaussian_epsilon(1e-4 / 2, 1 / math.sqrt(squares))
    assert spent(counted, 1e-4) == pytest.approx(expected, rel=1e-12)
    assert spent({Release(0.1, "poisson", 1e-9): 10}, 1e-4) == 0.0


def test_the_noise_counts_by_how_far_the_two_worlds_are_apart() -> None:
    """With or without a client: its own part. One in the place of another: twice that, so half the noise."""
    assert Release(2.0, "poisson", 0.1).distance_noise == Release(2.0).distance_noise == 2.0
    assert Release(2.0, "fixed", 0.1).distance_noise == 1.0
    # All clients in every cohort: nothing but the distance is left.
    replaced, plain = (spent({each: 3}, DELTA) for each in (Release(2.0, "fixed"), Release(1.0)))
    assert replaced == pytest.approx(plain)


def test_many_rounds_cost_no_less_than_their_limit_and_not_much_more() -> None:
    """The limit of many rounds with much noise is one Gaussian release with mean q·√(T(e^(1/z²) − 1))."""
    limit = gaussian_epsilon(DELTA, 1 / (0.1 * math.sqrt(10**7 * math.expm1(1 / 20**2))))
    assert 0.99 * limit < spent({Release(20.0, "poisson", 0.1): 10**7}, DELTA) < 1.1 * limit


def test_the_noise_for_a_budget_keeps_to_it_and_no_less_noise_does() -> None:
    found = noise_for(4.9833, DELTA, [(Release(1.0), 20)])
    assert found == pytest.approx(4.0, rel=2e-5)  # exactly so that 4.9833 was rounded
    sampled = noise_for(7.0466, DELTA, [(Release(1.0, "poisson", 0.1), 100)])
    assert sampled == pytest.approx(1.0, rel=1e-3)
    assert spent({Release(sampled, "poisson", 0.1): 100}, DELTA) <= 7.0466
    # Little noise is enough for a large budget: the search goes below 1.
    small = noise_for(500.0, DELTA, [(Release(1.0), 1)])
    assert spent({Release(small): 1}, DELTA) == pytest.approx(500.0, rel=1e-6)
    beside = {Release(12.0): 5}
    found = noise_for(2.0, DELTA, [(Release(9.0), 4)], beside=beside)
    assert spent({Release(found): 4, **beside}, DELTA) <= 2.0
    assert spent({Release(found / (1 + 1e-8)): 4, **beside}, DELTA) > 2.0


def test_a_plan_says_what_its_noise_costs(command: CommandLine) -> None:
    found = planned(noise=2.0, sampling=0.2, sampled="fixed")
    release = Release(2.0, "fixed", 0.2)
    assert found.epsilon == spent({release: 30}, 1e-6)
    assert found.epsilon_after_first == spent({release: 1}, 1e-6)
    assert (found.noise_multiplier, found.budget, found.sampled) == (2.0, None, "fixed")
    for options, release in (
        ({}, Release(2.0)),
        # All clients in a cohort of a fixed size: another may still come in one's place.
        ({"sampled": "fixed"}, Release(1.0)),
        ({"sampling": 0.2}, Release(2.0, "poisson", 0.2)),
    ):
        assert planned(noise=2.0, **options).epsilon == spent({release: 30}, 1e-6)
    budget = planned(epsilon=2.0)
    assert budget.epsilon <= 2.0 == budget.budget
    assert planned(noise=budget.noise_multiplier / 1.001).epsilon > 2.0
    text = command("privacy", "plan", "--noise", "4", "--rounds", "20").stdout
    assert "epsilon 4.983\n" in text


@pytest.mark.parametrize(
    "edge",
    [
        {"noise": 1e-3},
        {"epsilon": 1e6},
        {"noise": 1.0, "delta": 1e-12},
        {"noise": 1.0, "sampling": 0.5, "clients": 2, "delta": 0.4},
        {"noise": 1.0, "clients": 1000, "delta": 1e-3, "accept_large_delta": True},
    ],
)
def test_what_is_at_the_edge_can_be_planned(edge: dict[str, Any]) -> None:
    assert planned(**edge).epsilon >= 0


def test_answers_by_chance_add_up_as_their_binomial_says() -> None:
    # Ten answers, each true with probability e^ε/(1 + e^ε): δ(E) is Σ of what one world has beyond e^E times the other.
    epsilon, count = 0.5, 10
    truth = 1 / (1 + math.exp(-epsilon))
    total = spent({Release(1 / epsilon, mechanism="pure"): count}, 1e-3)
    right = binom.pmf(np.arange(count + 1), count, truth)
    delta = np.maximum(right - math.exp(total) * right[::-1], 0).sum()
    assert delta == pytest.approx(1e-3, rel=2e-3)


def test_laplace_noise_costs_at_most_its_epsilon_and_less_with_delta() -> None:
    one = spent({Release(2.0, mechanism="laplace"): 1}, 1e-3)
    # δ(ε) of one Laplace release is 1 − exp((ε − 1/b)/2).
    assert one == pytest.approx(0.5 + 2 * math.log1p(-1e-3), abs=2e-3)
    plain, counts = {Release(5.0): 3}, {Release(2.0, mechanism="laplace"): 4, Release(5.0): 3}
    mixed = spent(counts, DELTA)
    assert spent(plain, DELTA) < mixed < spent(plain, DELTA / 2) + 4 * 0.5


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


def test_the_farthest_loss_that_is_counted_by_hand() -> None:
    # Noise 2: 1/8 + 8.5/2 = 4.375 without sampling; with a tenth of the clients ln(0.9 + 0.1 e^4.375).
    assert farthest(2.0, 1.0) == 4.375
    assert farthest(2.0, 0.1) == pytest.approx(math.log(0.9 + 0.1 * math.exp(4.375)))
    # Where e^ε would overflow: 0.5/0.01² + 8.5/0.01 = 5850.
    assert farthest(0.01, 0.5) == pytest.approx(5850 - math.log(2))


def test_the_curve_at_its_edges() -> None:
    assert fixed_delta(np.array([0.0]), 0.5, 0.25)[0] == pytest.approx((2 * norm.cdf(1.0) - 1) / 4)
    # δ(ε) = Φ(1/2z − εz) − e^ε Φ(−1/2z − εz), here with z = 1/100: far beyond where e^ε is a number.
    one, other = fixed_delta(np.array([4900.0, 699.0]), 0.01, 1.0)
    assert one == pytest.approx(norm.cdf(50 - 49), abs=0.01)
    assert other == pytest.approx(1.0)
    # A half of the clients: ln(1 + 2(e^ε − 1)) is ε + ln 2 there.
    far = np.array([4900.0 - math.log(2)])
    assert fixed_delta(far, 0.01, 0.5)[0] == pytest.approx(one / 2, rel=1e-9)
    assert poisson_delta(far, 0.01, 0.5)[0] == pytest.approx(one / 2, rel=0.01)
    near = fixed_delta(np.array([699.999999, 700.0, 700.000001]), 0.0265, 0.5)
    assert near == pytest.approx([near[1]] * 3, rel=1e-4)
    assert 0 < near[1] < 0.5
    ends = np.array([-800.0, 1e6])
    curves = [fixed_delta(ends, 1.0, 0.5), *(poisson_delta(ends, 1.0, 0.5, added=added) for added in (False, True))]
    assert [each.tolist() for each in curves] == [[1.0, 0.0]] * 3


@pytest.mark.slow
def test_randomised_response_is_bounded_from_below_and_never_by_more_than_is_true() -> None:
    """Each canary's bit is told truly with e^ε/(1 + e^ε): nothing that keeps ε tells more of it."""
    epsilon, generator, found = 2.0, np.random.default_rng(1), list[float]()
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


def planned(**fields: Any) -> BudgetPlan:
    return plan(**{"epsilon": None, "delta": 1e-6, "rounds": 30, "sampling": 1.0, **fields})
