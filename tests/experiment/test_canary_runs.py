"""Canaries through whole runs: an honest product keeps its promise, and each fault on the way is found out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steelyard.experiment.canary_runs import audit_runs
from steelyard.privacy import central
from steelyard.privacy.accounting import Release, spent
from steelyard.rounds import private
from steelyard.rounds.private import PrivateRounds
from steelyard.weighing import own


@pytest.mark.parametrize("sampled", ["poisson", "fixed"])
def test_an_honest_run_is_not_refuted_and_the_round_that_was_run_twice_is_counted(sampled: Any) -> None:
    found = audit_runs(0.5, 0.5, 2, sampled=sampled, seed=1)
    assert found.accounted == pytest.approx(spent({Release(0.5, sampled, 0.5): 3}, 1e-5), abs=1e-6)
    assert 0.5 < found.lower < found.accounted
    assert found.canaries == 300


def smaller_largest_weight(patch: pytest.MonkeyPatch) -> None:
    honest = PrivateRounds.largest_weight
    patch.setattr(PrivateRounds, "largest_weight", lambda self, of, answered: honest(self, of, answered) / 10)


def weights_beyond_the_cap(patch: pytest.MonkeyPatch) -> None:
    honest = own.own_cap
    patch.setattr(own, "own_cap", lambda rule, expected: 10 * honest(rule, expected))


def no_clipping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(central, "clip_factors", lambda lengths, clip: np.ones_like(lengths))


def cohorts_of_everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(private, "each_with", lambda source, names, rate: list(names))


def charges_for_another_rate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrivateRounds, "_release", lambda self, of, noise: Release(noise, "poisson", 0.001))


@pytest.mark.parametrize(
    ("fault", "noise", "rate"),
    [
        (smaller_largest_weight, 3.0, 0.5),
        (weights_beyond_the_cap, 3.0, 0.5),
        (no_clipping, 3.0, 0.5),
        (cohorts_of_everybody, 1.0, 0.02),
        (charges_for_another_rate, 1.0, 0.5),
    ],
)
def test_a_fault_anywhere_on_the_way_is_found_out(
    fault: Any, noise: float, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    found = audit_runs(noise, rate, 2, seed=2)
    assert found.lower > found.accounted
