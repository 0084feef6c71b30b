"""The fitted rule against a slow version, by hand and by its properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.weighing.fitted import FitSettings, fit_weights, one_step


def test_one_step_by_hand() -> None:
    """Two clients, slopes 0 and ln 2 / rate: the second one's weight is halved before the division."""
    settings = FitSettings(rate=2.0)
    found = one_step(np.array([0.5, 0.5]), np.array([0.5, 0.5]), np.array([0.0, np.log(2) / 2]), settings)
    np.testing.assert_allclose(found, [2 / 3, 1 / 3], rtol=1e-15)


def test_shrinking_goes_back_to_the_start() -> None:
    start = np.array([0.9, 0.1])
    whole = one_step(np.array([0.2, 0.8]), start, np.array([5.0, 1.0]), FitSettings(shrink=1.0))
    np.testing.assert_array_equal(whole, start)
    plain = one_step(np.array([0.2, 0.8]), start, np.array([0.0, 0.0]), FitSettings(shrink=0.25))
    np.testing.assert_allclose(plain, 0.75 * np.array([0.2, 0.8]) + 0.25 * start, rtol=1e-15)


def quadratic(models: np.ndarray, wanted: np.ndarray):
    """L(Θ) = ½‖Θ − Θ*‖²: its slope in the weights is ⟨Θ(w) − Θ*, Θ_i⟩."""
    return lambda weights: [models @ (mine @ models - wanted) for mine in weights]


def test_it_finds_the_weights_that_made_the_model() -> None:
    chance = np.random.default_rng(0)
    models, hidden = chance.normal(size=(4, 30)), np.array([0.7, 0.3, 0.0, 0.0])
    start = np.full(4, 0.25)
    (found,) = fit_weights([start], quadratic(models, hidden @ models), [FitSettings(steps=400, rate=0.02)])
    assert np.abs(found - hidden).max() < 0.02  # exponentiated gradient only nears the border of the simplex


def test_cohorts_side_by_side_are_as_alone() -> None:
    """Each cohort has its own number of steps; the others must not move it."""
    chance = np.random.default_rng(1)
    models, wanted = chance.normal(size=(3, 8)), chance.normal(size=8)
    starts = [np.array([0.2, 0.3, 0.5]), np.array([0.6, 0.2, 0.2])]
    settings = [FitSettings(steps=2, rate=0.1), FitSettings(steps=5, rate=0.3, shrink=0.1)]
    together = fit_weights(starts, quadratic(models, wanted), settings)
    for start, each, found in zip(starts, settings, together, strict=True):
        (alone,) = fit_weights([start], quadratic(models, wanted), [each])
        np.testing.assert_array_equal(found, alone)
    assert not np.allclose(together[0], starts[0])


@given(
    st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6),
    st.lists(st.floats(-1e3, 1e3), min_size=6, max_size=6),
    st.floats(0.01, 100.0),
    st.floats(0.0, 1.0),
)
def test_weights_stay_on_the_simplex(raw: list[float], slopes: list[float], rate: float, shrink: float) -> None:
    start = np.array(raw) / sum(raw)
    found = one_step(start, start, np.array(slopes[: len(raw)]), FitSettings(rate=rate, shrink=shrink))
    assert found.sum() == pytest.approx(1.0, abs=1e-12)
    assert (found >= 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_slope_without_sense_moves_nothing(bad: float) -> None:
    start = np.array([0.4, 0.6])
    np.testing.assert_array_equal(one_step(start, start, np.array([0.0, bad]), FitSettings()), start)
