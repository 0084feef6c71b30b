"""Noise on sums and on devices: what one client can move, what the noise covers, and what leaves a device beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.kit import assert_refused
from tests.privacy.seeded_source import SeededSource

from steelyard.messages.payloads import DenseModels, Payload
from steelyard.messages.updates import Task, Updates
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.clipping import (
    DeviceNoise,
    bounded_sum,
    clip_factors,
    lengths_of,
    noised,
    noisy_models,
    noisy_sum,
    without_losses,
)
from steelyard.privacy.noise import SystemSource, normals
from steelyard.privacy.planning import criteria_release, device_epsilon, device_noise, plain_noise
from steelyard.privacy.settings import OWNERS_DELTA, PrivacySettings
from steelyard.recommend.sparse import TableChange

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


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_an_update_that_is_no_number_somewhere_is_noise_and_nothing_else(broken: float) -> None:
    """Its length is unknown, so nothing clips the rest of it; and where it is broken would show through any noise."""
    models = torch.full((2, 500), 1e6)
    models[0, 3] = broken
    noisy = noisy_models(DenseModels(models, ((9, 12),)), torch.zeros(500), 1.0, 0.5, SystemSource())
    sent = noisy.models
    assert noisy.frozen == ((9, 12),)
    assert float(sent[0].abs().max()) < 5
    assert float(sent[1].norm()) == pytest.approx((1 + 500 * 0.25) ** 0.5, rel=0.2)
    # A server may break the model that it sends, where that disturbs no training.
    start = torch.zeros(500)
    start[3] = broken
    models[:, 3] = broken
    told = noisy_models(DenseModels(models), start, 1.0, 0.5, SystemSource()).models
    assert float(told[:, 4:].abs().max()) < 5


def test_lengths_and_sums_do_not_depend_on_how_many_parameters_are_looked_at_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = torch.tensor([[3.0, 1.0, 4.0, 1.0, 5.0], [2.0, 7.0, 1.0, 8.0, 2.0]])
    start = torch.ones(5)
    for at_once in (1, 4, 6, 1000):  # one, two, three and all parameters of the two models; whole numbers, so exact
        monkeypatch.setattr("steelyard.messages.payloads.AT_ONCE", {"cpu": at_once, "cuda": 1})
        assert lengths_of(models, start) == pytest.approx([np.sqrt(4 + 9 + 16), np.sqrt(1 + 36 + 49 + 1)])
        found = bounded_sum(models, start, np.array([0.5, 0.25]), 0.125)
        assert found.tolist() == [10.0, 12.0, 12.0, 14.0, 18.0]
        assert found.dtype == torch.float64
    # 0.7 and −0.7 of a step are nothing, each by itself; together with others they would have moved the sum.
    models = torch.tensor([[0.7, -0.7], [0.7, -0.7], [1.9, -1.9]])
    assert bounded_sum(models, torch.zeros(2), np.ones(3), 1.0).tolist() == [1.0, -1.0]


def test_the_noisy_sum_is_its_formula_step_by_step() -> None:
    models = torch.tensor([[3.0, 5.0, 1.0], [1.25, 1.0, 1.0], [float("inf"), 1.0, 1.0], [7.0, 7.0, 7.0]])
    start = torch.ones(3)
    # Noise of deviation 3 lies on steps of 2^-15. The first update, (2, 4, 0), is √20 long and clipped to 2; the third
    # is broken, and the fourth has no weight.
    step, keep = 2.0**-15, 1.0 - 1e-9
    factor = 0.5 * 2 / np.sqrt(20) * keep
    parts = np.trunc(np.array([2.0, 4.0, 0.0]) * factor / step) + np.trunc(np.array([0.25, 0, 0]) * 0.25 * keep / step)
    noise = np.rint(normals(SeededSource(9), 3) * (3.0 / step))
    found = noisy_sum(models, start, np.array([0.5, 0.25, 0.25, 0.0]), 2.0, 3.0, SeededSource(9))
    # A number between two steps may fall to either side on another processor, and float32 rounds numbers below 16.
    assert found.tolist() == pytest.approx((1.0 + (parts + noise) * step).tolist(), rel=0, abs=1.01 * step)
    assert found.dtype == torch.float32


DELTA = 1e-6


def section(*, noise: float | None = None, clip: float = 1.0, **more: Any) -> PrivacySettings:
    return PrivacySettings.model_validate(
        {"local": {"clip": clip, "noise": noise}, "budget": {"epsilon": 4.0, "delta": DELTA}} | more
    )


def test_the_noise_of_a_budget_covers_an_update_and_charged_criteria_in_every_round() -> None:
    bounds = {"criteria_bounds": {"DS": 10.0}}
    charged = section(criteria="charged", **bounds)
    for criteria in (0, 2):
        found = device_noise(charged, 10, criteria)
        # As many equal releases as updates and criteria together: within the budget, and with a little less not.
        count = 10 * (1 + criteria)
        assert spent({Release(found): count}, DELTA) <= 4.0 < spent({Release(found / 1.001): count}, DELTA)
    assert device_noise(section(noise=2.5), 100, 3) == 2.5
    assert device_noise(section(criteria="public"), 10, 5) == device_noise(charged, 10, 0)
    found = plain_noise(section(criteria="charged", criteria_noise=20.0, **bounds), 10, 2)
    beside = {Release(20.0): 20}
    assert spent({Release(found): 10, **beside}, DELTA) <= 4.0 < spent({Release(found / 1.001): 10, **beside}, DELTA)


def test_what_a_device_loses_by_its_owners_count() -> None:
    charged = {"noise": 5.0, "criteria": "charged", "criteria_bounds": {"DS": 10.0}}
    for fields, rules, releases in (
        ({"noise": 5.0}, 2, {Release(5.0): 20}),
        (charged, 2, {Release(5.0): 80}),
        ({**charged, "criteria_noise": 9.0}, 1, {Release(5.0): 10, Release(9.0): 30}),
    ):
        found = device_epsilon(section(**fields), 10, 3, rules=rules)
        assert found == pytest.approx(spent(releases, OWNERS_DELTA))


def test_criteria_are_cut_to_their_bounds_before_and_after_the_noise() -> None:
    raw = np.tile([[-5.0, 50.0, np.nan, 1.0]], (4000, 1))
    found = noised(raw, np.array([10.0, 10.0, 10.0, np.inf]), 0.1, SeededSource(1))
    # A criterion without a bound cannot be released.
    assert np.isnan(found[:, 3]).all()
    found = found[:, :3]
    assert (found.min(), found.max()) == (0.0, 10.0)
    # Noise of 0.1 times the bound, and half of it is cut away: the mean is off by 1/√(2π). NaN counts as 0, or it
    # would show through the noise.
    off = 1 / np.sqrt(2 * np.pi)
    assert found.mean(axis=0) == pytest.approx([off, 10 - off, off], abs=0.05)


def test_each_criterion_has_noise_of_its_own_scale() -> None:
    raw = np.tile([[500.0, 0.5]], (4000, 1))
    found = noised(raw, np.array([1000.0, 1.0]), 0.05, SeededSource(2))
    assert np.corrcoef(found.T)[0, 1] == pytest.approx(0.0, abs=0.06)
    for column, scale, bound in ((0, 50.0, 1000.0), (1, 0.05, 1.0)):
        assert found[:, column].std() == pytest.approx(scale, rel=0.05)
        # Values lie on a lattice that is fine against the noise: whole multiples of a power of two.
        step = 2.0 ** (np.floor(np.log2(scale)) - 16)
        inside = found[(found[:, column] > 0) & (found[:, column] < bound), column]
        assert np.array_equal(inside / step, np.rint(inside / step))
    found = noised(np.full((8000, 1), 50.0), np.array([100.0]), 0.05, SeededSource(2), by("laplace"))
    # Scale 0.05·100, and a Laplace number of scale s is off by s on average.
    assert np.abs(found - 50.0).mean() == pytest.approx(5.0, rel=0.05)


def by(mechanism: str, levels: int | None = None) -> PrivacySettings:
    return section(noise=5.0, criteria="charged", criteria_mechanism=mechanism, criteria_levels=levels)


@pytest.mark.parametrize("mechanism", ["exponential", "randomised-response"])
def test_levels_are_told_as_their_mechanism_says(mechanism: str) -> None:
    raw, levels, epsilon = np.full((8000, 1), 7.4), 6, 2.0
    found = noised(raw, np.array([10.0]), 1 / epsilon, SeededSource(3), by(mechanism, levels))
    shares = np.bincount(np.rint(found[:, 0] / 2).astype(int), minlength=levels) / len(found)
    assert np.array_equal(np.unique(found), np.arange(0.0, 11.0, 2.0))
    # 7.4 of 10 is nearest to 8, the fifth of six levels.
    away = np.abs(np.arange(levels) - 4)
    powers = np.exp(-epsilon * away / (2 * 5)) if mechanism == "exponential" else np.exp(epsilon * (away == 0))
    assert shares == pytest.approx(powers / powers.sum(), abs=0.02)


def test_other_mechanisms_are_charged_as_what_they_are() -> None:
    told = [criteria_release(by(*each), 4.0) for each in (("gaussian",), ("laplace",), ("exponential", 3))]
    assert [each.mechanism for each in told] == ["gaussian", "laplace", "pure"]
    update = device_epsilon(by("gaussian"), 1, 0)
    assert update < device_epsilon(by("randomised-response", 2), 1, 1) < update + 1 / 5.0


# ---------------------------------------------------------------- what leaves a device


class Rows(Payload):
    """A payload of another form that can carry noise."""

    def __init__(self, said: tuple[float, float] | None = None) -> None:
        self.said = said

    def noised(self, clip: float, deviation: float, source: object) -> Rows:
        assert isinstance(source, SeededSource)
        return Rows((clip, deviation))


def answers(**more: Any) -> Updates:
    fields: dict[str, Any] = {
        "criteria": {"DS": np.array([10.0, 20.0]), "LD": np.array([1.0, 2.0])},
        "payload": DenseModels(torch.tensor([[3.0, 4.0, 9.0], [0.0, 0.0, 9.0]]), ((2, 3),)),
        "bytes_sent": np.array([5, 5]),
        "steps": np.array([3, 3]),
        "first_losses": np.array([2.0, 2.0]),
        "label_counts": np.array([[1, 1], [2, 2]]),
        **more,
    }
    return Updates("f", 2, ("a", "b"), np.array([10, 20]), losses=np.array([0.5, 0.7]), **fields)


TASK = Task("f", 0, 2, ("a", "b"), torch.tensor([0.0, 0.0, 9.0]))


def device(settings: PrivacySettings, noise: float = 1e-3) -> DeviceNoise:
    return DeviceNoise(settings, noise, {"DS": 100.0, "LD": 10.0}, SeededSource(4))


def test_an_update_is_clipped_and_noise_of_twice_the_clip_is_on_what_is_trained() -> None:
    found = device(section(clip=1.0, criteria="public")).applied(TASK, answers())
    payload = found.payload
    assert isinstance(payload, DenseModels)
    # (3, 4) is cut to (0.6, 0.8); noise of 0.002 is far below, and what is not trained has none.
    assert payload.models[0, :2].tolist() == pytest.approx([0.6, 0.8], abs=0.02)
    assert payload.models[:, 2].tolist() == [9.0, 9.0]
    wide = replace(TASK, parameters=torch.zeros(20_000))
    models = answers(payload=DenseModels(torch.zeros(2, 20_000)))
    sent = device(section(clip=3.0, criteria="public"), 0.5).applied(wide, models).payload
    assert isinstance(sent, DenseModels)
    # z · 2C = 0.5 · 2 · 3, each device its own.
    assert sent.models.std(dim=1).tolist() == pytest.approx([3.0, 3.0], rel=0.03)
    assert abs(float(torch.corrcoef(sent.models)[0, 1])) < 0.05


def test_another_payload_is_asked_to_add_the_noise_itself() -> None:
    sent = device(section(clip=3.0, criteria="public"), 0.5).applied(TASK, answers(payload=Rows())).payload
    assert isinstance(sent, Rows)
    assert sent.said == (3.0, 3.0)
    bare = answers(payload=TableChange(2, torch.zeros(3)))
    assert_refused(lambda: device(section()).applied(TASK, bare), "privacy.local", "cannot be added")


def test_losses_steps_and_sizes_of_messages_do_not_leave_a_device() -> None:
    hidden, public = (device(section(criteria=kind)).applied(TASK, answers()) for kind in (None, "public"))
    for found in (hidden, public):
        assert found.losses.tolist() == [0.0, 0.0]
        assert (found.first_losses, found.steps, found.bytes_sent) == (None, None, None)
        assert found.clients == ("a", "b")
    assert (hidden.samples.tolist(), hidden.criteria, hidden.label_counts) == ([1, 1], {}, None)
    assert hidden.samples.dtype == np.int64
    # What is public leaves as it is.
    assert (public.samples.tolist(), public.criteria["LD"].tolist()) == ([10, 20], [1.0, 2.0])
    assert public.label_counts is not None
    assert device(section(criteria="public")).criteria_count == 0
    assert np.isnan(without_losses(answers()).losses).tolist() == [True, True]


def test_charged_criteria_leave_with_noise_and_a_size_is_a_whole_number() -> None:
    settings = section(criteria="charged", criteria_noise=0.01, criteria_bounds={"DS": 100.0})
    made = device(settings, noise=7.0)
    assert (made.criteria_count, made.criteria_noise) == (2, 0.01)
    found = made.applied(TASK, answers())
    assert list(found.criteria) == ["DS", "LD"]
    assert found.criteria["DS"].tolist() == found.samples.tolist()
    assert found.samples.dtype == np.int64
    # Noise of 1 on DS and of 0.1 on LD.
    assert found.samples.tolist() == pytest.approx([10, 20], abs=5)
    assert found.criteria["LD"] == pytest.approx([1.0, 2.0], abs=0.5)
    assert found.criteria["LD"][0] not in (1.0, 2.0)
    assert (found.losses.tolist(), found.label_counts) == ([0.0, 0.0], None)
    # A size is at least 1, whatever the noise makes of it.
    tiny = made.applied(TASK, answers(criteria={"DS": np.zeros(2)})).samples
    assert tiny.min() == 1
    without = made.applied(TASK, answers(criteria={"LD": np.array([1.0, 2.0])}))
    assert (list(without.criteria), without.samples.tolist()) == (["LD"], [1, 1])
    # The update's noise is what a criterion gets where none is given.
    assert device(section(criteria="charged", criteria_bounds={"DS": 1.0}), 7.0).criteria_noise == 7.0


def test_noise_has_the_deviation_asked_for_is_never_the_same_and_spares_what_is_frozen() -> None:
    start = torch.full((40_000,), 5.0)
    found = noisy_sum(torch.zeros((0, 40_000)), start, np.zeros(0), 1.0, 0.3, SeededSource(1))  # nobody came
    assert (float(found.mean()), float(found.std())) == pytest.approx((5.0, 0.3), rel=0.02)
    found, again = (
        noisy_sum(torch.ones((2, 6)), torch.zeros(6), np.full(2, 0.5), 1.0, 1.0, SystemSource(), ((1, 3),))
        for _ in range(2)
    )
    assert found[1:3].tolist() == [0.0, 0.0]
    assert (found != again).tolist() == [True, False, False, True, True, True]
