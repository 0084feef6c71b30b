"""The noisy sum: what one client can move, whatever it sends, and what the noise covers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.privacy.seeded_source import SeededSource

from steelyard.privacy.central import bounded_sum, clip_factors, lengths_of, noisy_sum
from steelyard.privacy.local import noised, noisy_models
from steelyard.privacy.source import SystemSource, normals
from steelyard.update_payloads import DenseModels

NUMBERS = st.floats(-1e6, 1e6, width=32)


@given(
    models=arrays(np.float32, (5, 7), elements=NUMBERS),
    start=arrays(np.float32, 7, elements=st.floats(-10, 10, width=32)),
    weights=arrays(np.float64, 5, elements=st.floats(0, 0.3)),
    clip=st.floats(0.01, 10),
    deviation=st.floats(1e-3, 10),
    who=st.integers(0, 4),
)
@settings(max_examples=100, deadline=None)
def test_no_client_moves_the_sum_by_more_than_clip_times_its_weight(
    models: np.ndarray, start: np.ndarray, weights: np.ndarray, clip: float, deviation: float, who: int
) -> None:
    stacked, parameters, fine = torch.from_numpy(models), torch.from_numpy(start), 2.0**-16 * deviation
    coefficients = weights * clip_factors(lengths_of(stacked, parameters), clip)
    whole = bounded_sum(stacked, parameters, coefficients, fine) * fine
    rest = [row for row in range(5) if row != who]
    without = bounded_sum(stacked[rest], parameters, coefficients[rest], fine) * fine
    assert float((whole - without).norm()) <= clip * weights[who]


@given(length=st.floats(1e-30, 1e30), clip=st.floats(1e-6, 1e6))
@settings(max_examples=200, deadline=None)
def test_what_is_clipped_is_a_little_shorter_than_allowed_and_never_longer(length: float, clip: float) -> None:
    """The slack is for norms that round: it must shorten, also an update that is exactly as long as allowed."""
    factors = clip_factors(np.array([length, clip]), clip)
    assert factors[0] * length < clip
    assert factors[1] < 1.0 - 1e-10
    assert factors[1] > 1.0 - 1e-8


def test_the_sum_is_the_weighted_sum_of_clipped_updates() -> None:
    models = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    # Clipped to 1: (0.6, 0.8) and (0.3, 0.4); weighted 0.5 and 0.25: (0.375, 0.5). Noise is far below.
    found = noisy_sum(models, torch.zeros(2), np.array([0.5, 0.25]), 1.0, 1e-6, SeededSource(0))
    assert found.tolist() == pytest.approx([0.375, 0.5], abs=1e-5)


def test_two_sound_updates_beside_a_broken_one_are_summed() -> None:
    models = torch.tensor([[0.3, 0.4], [float("nan"), 0.0], [0.0, 0.5], [7.0, 7.0]])
    found = noisy_sum(models, torch.zeros(2), np.array([0.5, 0.25, 0.5, 0.0]), 1.0, 1e-6, SeededSource(0))
    assert found.tolist() == pytest.approx([0.15, 0.45], abs=1e-5)


def test_noise_has_the_deviation_asked_for_also_where_nobody_came() -> None:
    start = torch.full((40_000,), 5.0)
    found = noisy_sum(torch.zeros((0, 40_000)), start, np.zeros(0), 1.0, 0.3, SeededSource(1))
    assert float(found.mean()) == pytest.approx(5.0, abs=0.01)
    assert float(found.std()) == pytest.approx(0.3, rel=0.02)


def test_what_is_frozen_gets_no_noise() -> None:
    found = noisy_sum(torch.ones((2, 6)), torch.zeros(6), np.full(2, 0.5), 1.0, 1.0, SeededSource(2), ((1, 3),))
    assert found[1:3].tolist() == [0.0, 0.0]
    assert (found[[0, 3, 4, 5]] != 0).all()


def test_two_calls_never_draw_the_same_noise() -> None:
    arguments = (torch.zeros((1, 50)), torch.zeros(50), np.ones(1), 1.0, 1.0)
    from steelyard.privacy.source import SystemSource

    assert not torch.equal(noisy_sum(*arguments, SystemSource()), noisy_sum(*arguments, SystemSource()))


def test_simulated_devices_draw_noise_of_their_own_each() -> None:
    """Forty devices in threads: noise of the deviation asked for, never the same, and each around its own update."""
    models = torch.zeros(40, 500)
    models[7] += 0.01
    sent = noisy_models(DenseModels(models), torch.zeros(500), 1.0, 0.5, SystemSource()).models
    assert float(sent.std()) == pytest.approx(0.5, rel=0.05)
    assert torch.unique(sent[:, 0]).numel() == 40
    quiet = noisy_models(DenseModels(models), torch.zeros(500), 1.0, 1e-6, SystemSource()).models
    torch.testing.assert_close(quiet, models, rtol=0, atol=1e-5)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_an_update_that_is_no_number_somewhere_is_noise_and_nothing_else(broken: float) -> None:
    """Its length is unknown, so nothing clips the rest of it; and where it is broken would show through any noise."""
    models = torch.full((2, 500), 1e6)
    models[0, 3] = broken
    sent = noisy_models(DenseModels(models), torch.zeros(500), 1.0, 0.5, SystemSource()).models
    assert float(sent[0].abs().max()) < 5
    assert float(sent[1].norm()) == pytest.approx((1 + 500 * 0.25) ** 0.5, rel=0.2)
    # A server may break the model that it sends, where that disturbs no training.
    start = torch.zeros(500)
    start[3] = broken
    models[:, 3] = broken
    told = noisy_models(DenseModels(models), start, 1.0, 0.5, SystemSource()).models
    assert float(told[:, 4:].abs().max()) < 5


def test_criteria_are_told_within_their_range_with_noise_of_its_size() -> None:
    raw = np.tile([[0.5, 300.0]], (20_000, 1))
    told = noised(raw, np.array([1.0, 600.0]), 0.1, SeededSource(3))
    assert told.min() >= 0
    assert told[:, 0].max() <= 1.0
    assert told.mean(axis=0) == pytest.approx([0.5, 300.0], rel=0.02)
    assert told.std(axis=0) == pytest.approx([0.1, 60.0], rel=0.03)
    beyond = noised(np.full((1000, 1), 1e9), np.array([1.0]), 0.1, SeededSource(4))
    assert beyond.max() <= 1.0
    unbounded = noised(raw[:5], np.array([np.inf, 600.0]), 0.1, SeededSource(4))
    assert np.isnan(unbounded[:, 0]).all()
    assert np.isfinite(unbounded[:, 1]).all()
    unknown = noised(np.full((1000, 1), np.nan), np.array([1.0]), 0.1, SeededSource(5))
    assert np.isfinite(unknown).all()


def test_lengths_and_sums_do_not_depend_on_how_many_parameters_are_looked_at_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = torch.tensor([[3.0, 1.0, 4.0, 1.0, 5.0], [2.0, 7.0, 1.0, 8.0, 2.0]])
    start = torch.ones(5)
    whole = lengths_of(models, start), bounded_sum(models, start, np.array([0.5, 0.25]), 0.125)
    assert whole[0] == pytest.approx([np.sqrt(4 + 9 + 16), np.sqrt(1 + 36 + 49 + 1)])
    assert whole[1].tolist() == [10.0, 12.0, 12.0, 14.0, 18.0]
    assert whole[1].dtype == torch.float64
    assert noisy_sum(models, start, np.array([0.5, 0.25]), 1.0, 0.1, SeededSource(1)).dtype == torch.float32
    for at_once in (1, 4, 6):  # one, two and three parameters of the two models
        monkeypatch.setattr("steelyard.update_payloads.AT_ONCE", {"cpu": at_once, "cuda": 1})
        assert np.array_equal(lengths_of(models, start), whole[0])
        assert torch.equal(bounded_sum(models, start, np.array([0.5, 0.25]), 0.125), whole[1])


def test_each_part_is_cut_to_the_lattice_towards_0() -> None:
    # 0.7 and −0.7 of a step are nothing, each by itself; together with others they would have moved the sum.
    models = torch.tensor([[0.7, -0.7], [0.7, -0.7], [1.9, -1.9]])
    assert bounded_sum(models, torch.zeros(2), np.ones(3), 1.0).tolist() == [1.0, -1.0]


def test_the_noisy_sum_is_its_formula_step_by_step() -> None:
    models = torch.tensor([[3.0, 5.0, 1.0], [1.25, 1.0, 1.0], [float("inf"), 1.0, 1.0]])
    start = torch.ones(3)
    # Noise of deviation 3 lies on steps of 2^-15. The first update, (2, 4, 0), is √20 long and clipped to 2.
    step, keep = 2.0**-15, 1.0 - 1e-9
    factor = 0.5 * 2 / np.sqrt(20) * keep
    parts = np.trunc(np.array([2.0, 4.0, 0.0]) * factor / step) + np.trunc(np.array([0.25, 0, 0]) * 0.25 * keep / step)
    noise = np.rint(normals(SeededSource(9), 3) * (3.0 / step))
    found = noisy_sum(models, start, np.array([0.5, 0.25, 0.25]), 2.0, 3.0, SeededSource(9))
    assert found.tolist() == torch.tensor(1.0 + (parts + noise) * step, dtype=torch.float32).tolist()
