"""Canaries: a bound that holds, that finds a fault where there is one, and that is honest about few plays."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard.privacy import canaries
from steelyard.privacy.canaries import audit_canary, lower_bound
from steelyard.privacy.source import SeededSource


def test_the_bound_is_below_what_is_accounted_and_well_above_nothing() -> None:
    found = audit_canary(0.5, trials=600, source=SeededSource(1))
    assert 1.5 < found.lower < found.accounted


def test_the_same_distribution_bounds_nothing() -> None:
    drawn = np.random.default_rng(0).normal(size=(2, 4000))
    assert lower_bound(drawn[0], drawn[1], 1e-5) < 0.2


def test_scores_that_never_overlap_are_bounded_by_the_number_of_plays() -> None:
    # 500 of 1,000 plays judge; with no error among 500, Clopper and Pearson allow 1 − 0.025^(1/500) = 0.00735.
    found = lower_bound(np.zeros(1000), np.ones(1000), 1e-5)
    assert found == pytest.approx(np.log((1 - 1e-5 - 0.0073504) / 0.0073504), rel=1e-4)


def test_noise_that_is_too_small_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # A mechanism that adds a fifth of the noise that it accounts for: the bound passes what is accounted.
    honest = canaries.noisy_sum

    def faulty(models: object, parameters: object, weights: object, clip: float, deviation: float, *rest: object):
        return honest(models, parameters, weights, clip, deviation / 5, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(canaries, "noisy_sum", faulty)
    found = audit_canary(3.0, trials=1500, source=SeededSource(2))
    assert found.lower > found.accounted
