"""What samples lose under [privacy.records]: held to dp-accounting, to Opacus' published figures, and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.special import gammaln, logsumexp

from steelyard.learning.records import RecordNoise
from steelyard.learning.settings import TrainingSettings, batches
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.planning import plan
from steelyard.privacy.settings import OWNERS_DELTA, PrivacySettings


def made(privacy: dict[str, Any], most: float | None = None, rules: int = 1) -> RecordNoise:
    settings = PrivacySettings.model_validate({"records": {"clip": 1.0}, **privacy})
    training = TrainingSettings(batch_size=16, epochs=2)
    return RecordNoise(settings, training, rounds=10, most=most, rules=rules, criteria=1)


@pytest.mark.parametrize(
    ("samples", "training", "rate", "steps"),
    [
        (100, {"batch_size": 16}, 0.16, 7),
        (100, {"batch_size": 16, "epochs": 3}, 0.16, 21),
        (100, {"batch_size": 16, "updates": 5}, 0.16, 5),
        (9, {"batch_size": 16, "epochs": 3}, 1.0, 3),
        (100, {"batch_size": "full", "epochs": 2}, 1.0, 2),
    ],
)
def test_batches_follow_from_samples_and_training(
    samples: int, training: dict[str, Any], rate: float, steps: int
) -> None:
    assert batches(samples, TrainingSettings(**training)) == (rate, steps)


@pytest.mark.parametrize(("noise", "epochs", "published"), [(1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)])
def test_epsilon_is_below_the_figures_that_opacus_publishes(noise: float, epochs: int, published: float) -> None:
    """Its MNIST example, batches of 256 of 60,000 and δ = 1e-5: Rényi divergences, made ε in the older, looser way."""
    rate, steps, delta = 256 / 60_000, 234 * epochs, 1e-5
    divergences = {}
    for order in range(2, 64):
        k = np.arange(order + 1)
        ways = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms = ways + (order - k) * math.log1p(-rate) + k * math.log(rate) + (k * k - k) / (2 * noise**2)
        divergences[order] = steps * float(logsumexp(terms)) / (order - 1)
    formula = min(value - math.log(delta) / (order - 1) for order, value in divergences.items())
    assert formula == pytest.approx(published, abs=0.02)
    accountant = RdpAccountant()
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)
    tight = spent({Release(noise, "poisson", rate): steps}, delta)
    # Losses themselves are below every bound by their moments, and within a seventh of the best of these.
    assert 0.85 * accountant.get_epsilon(delta) < tight < accountant.get_epsilon(delta) < published


def test_figures_of_opacus_where_it_is_installed() -> None:
    accountants = pytest.importorskip("opacus.accountants")
    for noise, rate, steps in ((1.3, 0.004, 3750), (1.0, 0.2, 50), (4.0, 1.0, 20)):
        theirs = {}
        for kind in (accountants.RDPAccountant(), accountants.PRVAccountant()):
            kind.history = [(noise, rate, steps)]
            theirs[type(kind).__name__] = kind.get_epsilon(1e-5)
        ours = spent({Release(noise, "poisson", rate): steps}, 1e-5)
        assert ours < theirs["RDPAccountant"]
        assert ours == pytest.approx(theirs["PRVAccountant"], abs=0.02)  # which allows itself 0.01


def test_each_client_takes_the_noise_that_its_own_samples_need() -> None:
    found = made({"budget": {"epsilon": 3.0, "delta": 1e-3}})
    noises = {}
    for samples in (40, 200, 2000):
        release, steps = found.release(samples)
        assert (release.sampling, release.rate) == ("poisson", 16 / samples)
        assert steps == 2 * math.ceil(samples / 16)
        cost = spent({release: steps * 10}, 1e-3)
        assert 2.99 < cost <= 3.0
        noises[samples] = release.noise
    assert noises[40] > noises[200] > noises[2000]


def test_noise_that_is_given_is_that_of_every_client_and_an_owner_may_ask_for_more() -> None:
    given = {"records": {"clip": 1.0, "noise": 0.5}}
    assert made(given).noise(100) == 0.5
    more = made(given, most=2.0, rules=3)
    release, steps = more.release(100)
    assert release.noise > 0.5
    assert 1.99 < spent({release: steps * 10 * 3}, OWNERS_DELTA) <= 2.0
    assert made(given, most=1000.0).noise(100) == 0.5


def test_criteria_that_are_charged_leave_less_for_the_steps() -> None:
    charged = {"criteria": "charged", "criteria_noise": 20.0, "budget": {"epsilon": 3.0, "delta": 1e-3}}
    release, steps = made(charged).release(100)
    assert release.noise > made({"budget": {"epsilon": 3.0, "delta": 1e-3}}).noise(100)
    assert 2.99 < spent({release: steps * 10, Release(20.0): 10}, 1e-3) <= 3.0


def test_the_plan_of_a_site_is_the_noise_that_its_run_takes() -> None:
    noise = made({"budget": {"epsilon": 3.0, "delta": 1e-3}})
    rate, steps = batches(200, TrainingSettings(batch_size=16, epochs=2))
    found = plan(epsilon=3.0, delta=1e-3, rounds=10, sampling=rate, steps=steps, clients=200, unit="sample")
    assert found.noise_multiplier == noise.noise(200)
    assert 2.99 < found.epsilon <= 3.0
    assert found.epsilon_after_first == pytest.approx(
        spent({Release(found.noise_multiplier, "poisson", rate): steps}, 1e-3)
    )


def test_a_plan_of_samples_says_what_is_wrong(refused: Callable[..., str]) -> None:
    asked = ("privacy", "plan", "--rounds", "30", "--noise", "1", "--records", "100")
    assert "--records: got it with --clients, --sampling or --sampled" in refused(*asked, "--sampling", "0.5")
    assert "with 100 samples" in refused(*asked, "--delta", "0.01")
