"""Budgets against the figures of other tools, and properties that every accountant has."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from tests.conftest import CommandLine
from tests.warm import command_environment

from steelyard.errors import UserError
from steelyard.privacy.accounting import Release, _by_taking_part, noise_for, spent, together
from steelyard.privacy.mechanisms import gaussian_epsilon, gaussian_noise
from steelyard.privacy.planning import plan

DELTA = 1e-5


@pytest.mark.parametrize(
    ("noise", "rate", "rounds", "rdp", "pld"),
    [(1.1, 0.01, 1000, 1.7118, 1.5154), (1.0, 0.1, 100, 7.9039, 7.0466), (4.0, 1.0, 20, 5.3777, 4.9833)],
)
def test_known_budgets(noise: float, rate: float, rounds: int, rdp: float, pld: float) -> None:
    releases = {Release(noise, "poisson", rate): rounds}
    assert spent(releases, DELTA, "rdp") == pytest.approx(rdp, abs=5e-5)
    assert spent(releases, DELTA, "pld") == pytest.approx(pld, abs=5e-5)
    coarse = spent(releases, DELTA, "pld", coarse=True)
    assert pld - 1e-4 <= coarse <= pld * 1.002


def test_plain_releases_add_up_exactly() -> None:
    # 20 with noise 4 are one with 4/√20; so are 5 with noise 2, since 5/4 = 20/16.
    assert together({Release(4.0): 20}) == pytest.approx(4 / 20**0.5)
    assert spent({Release(2.0): 5}, DELTA) == pytest.approx(spent({Release(4.0): 20}, DELTA))
    assert spent({Release(4.0): 10, Release(2.0): 2}, DELTA) < spent({Release(4.0): 20}, DELTA)
    assert spent({}, DELTA) == 0.0
    assert spent({Release(4.0): 0}, DELTA) == 0.0


@pytest.mark.parametrize(("accountant", "known"), [("pld", 7.0466), ("rdp", 7.9039)])
def test_sampled_releases_of_two_kinds_add_up(accountant: Any, known: float) -> None:
    """60 and 40 of nearly the same kind are 100 of it; of quite different kinds each costs something."""
    parts = {Release(1.0, "poisson", 0.1): 60, Release(1.0, "poisson", 0.1 + 1e-12): 40}
    assert spent(parts, DELTA, accountant, coarse=True) == pytest.approx(known, abs=0.02)
    other = {Release(1.0, "poisson", 0.1): 100, Release(3.0, "fixed", 0.2): 10}
    assert spent(other, DELTA, accountant, coarse=True) > known + 0.1


def test_but_for_half_of_delta_nobody_is_in_more_cohorts_than_are_counted() -> None:
    counted = ((Release(2.0), 3), (Release(5.0, "poisson", 0.1), 40), (Release(3.0, "fixed", 0.02), 10))

    def most(count: int, rate: float) -> int:
        """The least k that is passed with probability δ/2 by three at most: each has a third."""
        chances = [math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(count + 1)]
        return next(k for k in range(count + 1) if sum(chances[k + 1 :]) <= 1e-4 / 2 / 3)

    squares = 3 / 2.0**2 + most(40, 0.1) / 5.0**2 + most(10, 0.02) / 1.5**2
    expected = gaussian_epsilon(1e-4 / 2, 1 / math.sqrt(squares))
    assert _by_taking_part(counted, 1e-4) == pytest.approx(expected, rel=1e-12)
    assert _by_taking_part(((Release(0.1, "poisson", 1e-9), 10),), 1e-4) == 0.0


@given(noise=st.floats(0.5, 20), rounds=st.integers(1, 200))
@settings(max_examples=30, deadline=None)
def test_more_rounds_cost_more_and_more_noise_costs_less(noise: float, rounds: int) -> None:
    cost = spent({Release(noise): rounds}, DELTA)
    assert spent({Release(noise): rounds + 1}, DELTA) > cost
    assert spent({Release(noise * 1.01): rounds}, DELTA) < cost


def test_sampling_makes_rounds_cheaper() -> None:
    all_in = spent({Release(2.0): 10}, DELTA, "rdp")
    poisson = spent({Release(2.0, "poisson", 0.1): 10}, DELTA, "rdp")
    fixed = spent({Release(2.0, "fixed", 0.1): 10}, DELTA, "rdp")
    # Exchanging a client for another moves a sum twice as far as taking it away.
    assert poisson < fixed < spent({Release(1.0): 10}, DELTA, "rdp")
    assert poisson < all_in


def test_the_noise_counts_by_how_far_the_two_worlds_are_apart() -> None:
    """With or without a client: its own part. One in the place of another: twice that, so half the noise."""
    assert Release(2.0, "poisson", 0.1).distance_noise == Release(2.0).distance_noise == 2.0
    assert Release(2.0, "fixed", 0.1).distance_noise == 1.0
    # All clients in every cohort: nothing but the distance is left.
    assert spent({Release(2.0, "fixed", 1.0): 3}, DELTA) == pytest.approx(spent({Release(1.0): 3}, DELTA))
    assert spent({Release(2.0, "fixed", 1.0): 3}, DELTA, "rdp") == pytest.approx(spent({Release(1.0): 3}, DELTA, "rdp"))
    # By Rényi divergences alone: 8.7368 with half the noise, where the whole would give 3.0176.
    assert spent({Release(1.0, "fixed", 0.2): 1}, DELTA, "rdp") == pytest.approx(8.7368, abs=5e-4)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize(("noise", "rate", "rounds"), [(0.05, 1e-12, 10), (1.0, 1e-6, 10**7), (20.0, 0.1, 10**7)])
def test_accountants_do_not_contradict_each_other(sampling: str, noise: float, rate: float, rounds: int) -> None:
    """Also where Rényi divergences alone would say 100 and more of what is never drawn, and where rounds are many."""
    pld, rdp = (spent({Release(noise, sampling, rate): rounds}, DELTA, name) for name in ("pld", "rdp"))  # type: ignore[arg-type]
    assert pld <= rdp + 1e-3
    assert rdp <= 6 * pld + 2.0


def test_the_noise_for_a_budget_keeps_to_it_and_no_less_noise_does() -> None:
    found = noise_for(4.9833, DELTA, [(Release(1.0), 20)])
    assert found == pytest.approx(4.0, rel=2e-5)  # exactly so that 4.9833 was rounded
    assert spent({Release(found): 20}, DELTA) <= 4.9833
    assert spent({Release(found * 0.999): 20}, DELTA) > 4.9833
    sampled = noise_for(7.0466, DELTA, [(Release(1.0, "poisson", 0.1), 100)])
    assert sampled == pytest.approx(1.0, rel=1e-3)
    assert spent({Release(sampled, "poisson", 0.1): 100}, DELTA) <= 7.0466


@pytest.mark.parametrize("epsilon", [0.2, 3.0, 40.0])
@pytest.mark.parametrize("release", [Release(1.0, mechanism="laplace"), Release(1.0)])
def test_little_less_noise_than_was_found_passes_the_budget(release: Release, epsilon: float) -> None:
    found = noise_for(epsilon, DELTA, [(release, 3)], "rdp")
    assert spent({replace(release, noise=found): 3}, DELTA, "rdp", coarse=True) <= epsilon
    assert spent({replace(release, noise=found / 1.0002): 3}, DELTA, "rdp", coarse=True) > epsilon


def test_plan_finds_the_noise_on_the_command_line(steelyard: CommandLine) -> None:
    options = ("--epsilon", "5", "--delta", "1e-5", "--rounds", "20", "--sampling", "1", "--format", "json")
    done = steelyard("privacy", "plan", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["noise_multiplier"] == pytest.approx(gaussian_noise(5.0, 1e-5) * math.sqrt(20), rel=1e-6)
    assert found["epsilon"] <= 5.0
    assert found["accountant"] == "pld"
    text = steelyard("privacy", "plan", "--noise", "4", "--rounds", "20").stdout
    assert "epsilon 4.9833" in text
    assert "5.3777 by rdp" in text


def test_a_large_delta_is_planned_where_it_is_meant_so(steelyard: CommandLine) -> None:
    done = steelyard(
        "privacy", "plan", "--noise", "0.01", "--rounds", "10", "--sampling", "1e-12", "--accept-large-delta"
    )
    assert done.returncode == 0, done.stderr
    assert "epsilon 0.0000 by pld (0.0000 by rdp)" in done.stdout


def test_plan_names_each_accountant_once(steelyard: CommandLine) -> None:
    text = steelyard("privacy", "plan", "--noise", "4", "--rounds", "20", "--accountant", "rdp").stdout
    assert "20 rounds with all clients, delta 1e-05\n  epsilon 5.3777 by rdp\n" in text
    assert text.count("rdp") == 1
    assert max(map(len, text.splitlines())) <= 60


@pytest.mark.parametrize(("noise", "rate", "rounds"), [(0.001, 0.1, 100), (0.05, 0.1, 100)])
def test_very_little_noise_costs_much_and_is_still_counted(noise: float, rate: float, rounds: int) -> None:
    """No more than the same releases without sampling, no less than one of them with probability of `rate`."""
    found = spent({Release(noise, "poisson", rate): rounds}, DELTA)
    assert found <= spent({Release(noise): rounds}, DELTA) * (1 + 1e-9)
    # With probability q the one release is in the open: ε at δ is at least that of the plain one at δ/q, less ln(1/q).
    assert found >= gaussian_epsilon(DELTA / rate, noise) + math.log(rate)


def test_many_rounds_of_few_clients_are_not_taken_for_many_of_all() -> None:
    """By rdp 0.23; without sampling it would be 2,000 and more."""
    assert 0.1 < spent({Release(5.0, "poisson", 0.001): 100_000}, DELTA, coarse=True) < 1


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--rounds", "5"), "--epsilon, --noise: got both or none of the two"),
        (("--rounds", "5", "--epsilon", "-1"), "--epsilon: got -1"),
        (("--rounds", "5", "--epsilon", "1", "--delta", "2"), "--delta: got 2"),
        (("--rounds", "5", "--epsilon", "1", "--sampling", "0"), "--sampling: got 0"),
        (("--rounds", "5", "--noise", "0"), "--noise: got 0"),
        (
            ("--rounds", "100000", "--epsilon", "1e-7"),
            "--epsilon: 1e-07 at delta 1e-05 needs more noise",
        ),
        (("--rounds", "5", "--noise", "1", "--delta", "1e-30"), "--delta: got 1e-30; allowed: numbers from 1e-12"),
        (("--rounds", "5", "--noise", "1", "--sampling", "1e-12"), "--delta: got 1e-05 with 1e+12 clients, where"),
        (("--rounds", "5", "--noise", "1", "--clients", "100000"), "allowed: below 1e-05, or --accept-large-delta"),
        (
            ("--rounds", "5", "--noise", "1", "--clients", "50", "--sampling", "0.01"),
            "--sampling: got 0.01 of 50 clients, which is less than one client a round; allowed: at least 0.02",
        ),
    ],
)
def test_plan_refuses_in_one_line(options: tuple[str, ...], line: str) -> None:
    from typer.testing import CliRunner

    from steelyard.cli.main import app

    done = CliRunner().invoke(app, ["privacy", "plan", *options])
    assert isinstance(done.exception, UserError)
    assert line in str(done.exception)


def test_without_dp_accounting_one_line_says_what_to_install() -> None:
    # None in sys.modules is how Python is told that a module cannot be imported.
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'dp_accounting' else find(name, *a)\n"
        "sys.argv = ['steelyard', 'privacy', 'plan', '--epsilon', '1', '--rounds', '3']\n"
        "from steelyard.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=command_environment(),
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert "pip install 'steelyard[privacy]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_says_what_its_noise_costs_by_both_accountants() -> None:
    found = plan(epsilon=None, noise=2.0, delta=1e-6, rounds=30, sampling=0.2, sampled="fixed", accountant="rdp")
    release = Release(2.0, "fixed", 0.2)
    assert found.epsilon == found.epsilon_rdp == spent({release: 30}, 1e-6, "rdp")
    assert found.epsilon_after_first == spent({release: 1}, 1e-6, "rdp")
    assert (found.noise_multiplier, found.budget, found.delta, found.rounds) == (2.0, None, 1e-6, 30)
    assert (found.sampling, found.sampled, found.accountant) == (0.2, "fixed", "rdp")
    whole = plan(epsilon=None, noise=2.0, delta=1e-6, rounds=30, sampling=1.0)
    assert whole.epsilon == spent({Release(2.0): 30}, 1e-6)
    # All clients in a cohort of a fixed size: another may still come in one's place.
    replaced = plan(epsilon=None, noise=2.0, delta=1e-6, rounds=30, sampling=1.0, sampled="fixed")
    assert replaced.epsilon == spent({Release(1.0): 30}, 1e-6)
    drawn = plan(epsilon=None, noise=2.0, delta=1e-6, rounds=30, sampling=0.2)
    assert drawn.epsilon == spent({Release(2.0, "poisson", 0.2): 30}, 1e-6)
    budget = plan(epsilon=2.0, delta=1e-6, rounds=30, sampling=1.0)
    assert budget.epsilon <= 2.0 == budget.budget
    assert plan(epsilon=None, noise=budget.noise_multiplier / 1.001, delta=1e-6, rounds=30, sampling=1.0).epsilon > 2.0


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"epsilon": 1.0, "noise": 1.0}, "--epsilon, --noise: got both or none of the two; allowed: one of them"),
        ({"epsilon": 2e6}, "--epsilon: got 2e+06; allowed: numbers above 0, up to 1e6"),
        ({"epsilon": 0.0}, "--epsilon: got 0; allowed: numbers above 0, up to 1e6"),
        ({"noise": 1e-4}, "--noise: got 0.0001; allowed: numbers from 0.001 to 1e6"),
        ({"noise": 2e6}, "--noise: got 2e+06; allowed: numbers from 0.001 to 1e6"),
        ({"noise": 1.0, "delta": 1.0}, "--delta: got 1; allowed: numbers from 1e-12 to below 1"),
        ({"noise": 1.0, "sampling": 1.5}, "--sampling: got 1.5; allowed: numbers above 0, up to 1"),
        (
            {"noise": 1.0, "clients": 1000, "delta": 1e-3},
            "--delta: got 0.001 with 1000 clients, where publishing all data of one client drawn at random would still "
            "satisfy the guarantee; allowed: below 0.001, or --accept-large-delta",
        ),
    ],
)
def test_what_cannot_be_planned(given: dict[str, Any], line: str) -> None:
    fields = {"epsilon": None, "delta": 1e-6, "rounds": 5, "sampling": 1.0, **given}
    with pytest.raises(UserError) as found:
        plan(**fields)
    assert str(found.value) == line


def test_what_is_at_the_edge_can_be_planned() -> None:
    for edge in (
        {"noise": 1e-3},
        {"noise": 1e6},
        {"epsilon": 1e6},
        {"noise": 1.0, "delta": 1e-12},
        {"noise": 1.0, "sampling": 0.5, "clients": 2, "delta": 0.4},
        {"noise": 1.0, "clients": 1000, "delta": 1e-3, "accept_large_delta": True},
    ):
        fields: dict[str, Any] = {"epsilon": None, "delta": 1e-6, "rounds": 2, "sampling": 1.0, **edge}
        assert plan(**fields).epsilon >= 0


def test_a_budget_of_nothing_needs_a_number_above_0() -> None:
    for epsilon in (0.0, -1.0):
        with pytest.raises(UserError) as found:
            noise_for(epsilon, DELTA, [(Release(1.0), 1)])
        assert str(found.value) == f"epsilon: got {epsilon:g}; allowed: numbers above 0"


def test_noise_beside_what_else_is_released_keeps_to_the_budget_exactly() -> None:
    beside = {Release(12.0): 5}
    found = noise_for(2.0, DELTA, [(Release(9.0), 4)], beside=beside)
    assert spent({Release(found): 4, **beside}, DELTA) <= 2.0
    assert spent({Release(found / (1 + 1e-8)): 4, **beside}, DELTA) > 2.0
    # Little noise is enough for a large budget: the search goes below 1.
    small = noise_for(500.0, DELTA, [(Release(1.0), 1)])
    assert small < 0.1
    assert spent({Release(small): 1}, DELTA) == pytest.approx(500.0, rel=1e-6)


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
    mixed = spent({Release(2.0, mechanism="laplace"): 4, Release(5.0): 3}, DELTA)
    assert spent({Release(5.0): 3}, DELTA) < mixed < spent({Release(5.0): 3}, DELTA / 2) + 4 * 0.5
    assert mixed < spent({Release(2.0, mechanism="laplace"): 4, Release(5.0): 3}, DELTA, "rdp")
