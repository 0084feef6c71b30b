"""Robust rules on models: against slow references of our own, against byzfl, and in what they promise."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit import assert_refused

from steelyard.base.settings import validated
from steelyard.defence.robust import DefenceSettings, RobustRule, mixing
from steelyard.messages.payloads import DenseModels
from steelyard.weighing.rule import WeighingSettings
from steelyard.weighing.words import label

SIZE = 13
DEFENCES = DefenceSettings.kinds
BY_COORDINATE = {name for name, kind in DEFENCES.items() if issubclass(kind, DefenceSettings) and kind.by_coordinate}
WITHOUT_ROOT = [name for name in DEFENCES if name != "fltrust"]


def cohort(clients: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    chance = np.random.default_rng(seed)
    origin = torch.from_numpy(chance.normal(size=SIZE).astype(np.float32))
    return origin, origin + torch.from_numpy(chance.normal(size=(clients, SIZE)).astype(np.float32))


def made(origin: torch.Tensor, models: torch.Tensor, before: float | None = None, **given: object) -> RobustRule:
    payload, described = DenseModels(models), DefenceSettings.model_validate(given)
    return RobustRule(described, payload, origin, lambda: payload.gram(origin), radius_before=before)


def combined(origin: torch.Tensor, models: torch.Tensor, weights: np.ndarray, **given: object) -> np.ndarray:
    """The update that a rule makes of a cohort."""
    return (made(origin, models, **given).combine(weights) - origin).double().numpy()


def equal(count: int) -> np.ndarray:
    return np.full(count, 1 / count)


# ---------------------------------------------------------------- held to byzfl, with equal weights


def byzfl(module: str = "aggregators") -> Any:
    """Import a file of `byzfl.aggregators` alone: a bare parent package stands in for one whose import loads it all."""
    if "byzfl" not in sys.modules:
        found = importlib.util.find_spec("byzfl")
        if found is None or found.submodule_search_locations is None:
            pytest.skip("byzfl is not installed")
        parent = types.ModuleType("byzfl")
        parent.__path__ = list(found.submodule_search_locations)
        sys.modules["byzfl"] = parent
    return importlib.import_module(f"byzfl.aggregators.{module}")


@pytest.mark.parametrize("clients", [7, 10, 11])
def test_equal_weights_give_byzfl(clients: int) -> None:
    theirs, first = byzfl(), byzfl("preaggregators")
    origin, models = cohort(clients, clients)
    updates = (models - origin).double().numpy()
    share = 3 / clients
    for aggregate, ours in (
        (theirs.Median(), {"rule": "median"}),
        (theirs.TrMean(f=3), {"rule": "trimmed-mean", "hostile": share}),
        (theirs.MultiKrum(f=3), {"rule": "multi-krum", "hostile": share}),
        # byzfl starts elsewhere and smooths more: both reach the same point after many steps.
        (theirs.GeometricMedian(nu=1e-6, T=200), {"rule": "geometric-median", "steps": 200}),
    ):
        found = combined(origin, models, equal(clients), **ours)
        np.testing.assert_allclose(found, aggregate(updates), atol=2e-5, err_msg=ours["rule"])
    np.testing.assert_allclose(mixing(updates @ updates.T, share) @ updates, first.NNM(f=3)(updates))


# ---------------------------------------------------------------- references with weights


def slow_median(values: np.ndarray, weights: np.ndarray) -> float:
    """Half of the weight on either side; a tie is the mean of the two middles."""
    pairs = [(float(v), float(w)) for v, w in sorted(zip(values, weights, strict=True)) if w > 0]
    reached = 0.0
    for index, (value, weight) in enumerate(pairs):
        reached += weight
        if math.isclose(reached, 0.5, abs_tol=1e-9):
            return (value + pairs[index + 1][0]) / 2
        if reached > 0.5:
            return value
    raise AssertionError


def slow_trimmed(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    """Take the weight from both ends, a little at a time."""
    pairs = [[float(v), float(w)] for v, w in sorted(zip(values, weights, strict=True))]
    for ordered in (pairs, pairs[::-1]):
        left = share
        for pair in ordered:
            taken = min(pair[1], left)
            pair[1] -= taken
            left -= taken
    return sum(v * w for v, w in pairs) / sum(w for _, w in pairs)


@pytest.mark.parametrize("seed", range(3))
def test_rules_with_weights_are_the_slow_ones(seed: int) -> None:
    origin, models = cohort(9, seed)
    weights = np.random.default_rng(seed).dirichlet(np.ones(9))
    updates = (models - origin).double().numpy()
    sizes = np.linalg.norm(updates, axis=1)
    radius = np.median(sizes)
    clip = sum(w * min(1, radius / s) * u for w, s, u in zip(weights, sizes, updates, strict=True))
    point = clip
    for _ in range(8):
        pull = weights / np.maximum(np.linalg.norm(updates - point, axis=1), 1e-6)
        point = pull @ updates / pull.sum()
    for rule, expected in {
        "median": [slow_median(updates[:, c], weights) for c in range(SIZE)],
        "trimmed-mean": [slow_trimmed(updates[:, c], weights, 0.3) for c in range(SIZE)],
        "clip": clip,
        "geometric-median": point,
    }.items():
        # Numbers up to 5 in float32, which holds 6e-7 of them, added and taken from the origin again.
        np.testing.assert_allclose(combined(origin, models, weights, rule=rule), expected, atol=2e-6, err_msg=rule)


def test_mixing_averages_the_nearest() -> None:
    origin, models = torch.zeros(1), torch.tensor([[0.0], [0.1], [0.2], [0.3], [10.0]])
    # Two may be hostile: three nearest each. 0 and 0.1 become 0.1, 0.2 and 0.3 become 0.2, 10 becomes 10.5 / 3.
    for rule, value in (("none", (0.6 + 3.5) / 5), ("median", 0.2)):
        found = combined(origin, models, equal(5), rule=rule, mix=True, hostile=0.4)
        np.testing.assert_allclose(found, [value], rtol=1e-6)


def test_the_radius_of_a_round_is_there_for_the_next() -> None:
    origin, models = torch.zeros(1), torch.tensor([[1.0], [4.0], [-9.0]])
    for before, fields, radius in (
        (None, {}, 4.0),
        (None, {"radius": 0.5}, 0.5),
        (16.0, {"smooth": 0.5}, 8.0),
        (16.0, {}, 4.0),
        # Mixed first, two of three each: −9 and 1 become −4, 1 and 4 become 2.5; the median length is 2.5.
        (None, {"mix": True}, 2.5),
    ):
        rule = made(origin, models, before, **fields)
        assert rule.settings.radius_in(rule) == pytest.approx(radius)  # type: ignore[attr-defined]
        assert rule.settings.remembered(rule) == (pytest.approx(radius) if "smooth" in fields else None)
    leaning = made(origin, models, 16.0, smooth=0.5).combine(equal(3))
    assert leaning.tolist() == pytest.approx([(1 + 4 - 8) / 3])


@pytest.mark.parametrize(
    ("updates", "fields", "value"),
    [
        # As in test_rules, after three steps of radius 2.
        # A quantile of 1 reaches the furthest: the plain mean in one step.
        ([0.0, 1.0, 8.0], {"rule": "geometric-median", "least_distance": 100.0}, 3.0),
        # From the start, lengths 0, 1, 8 cut to 1: 2/3. One step: pulls 3/2, 3, 3/22.
        ([0.0, 1.0, 8.0], {"rule": "geometric-median", "steps": 1}, (3 + 8 * 3 / 22) / (1.5 + 3 + 3 / 22)),
    ],
)
def test_rules_take_their_parameters_from_the_settings(
    updates: list[float], fields: dict[str, object], value: float
) -> None:
    found = combined(torch.zeros(1), torch.tensor(updates)[:, None], equal(len(updates)), **fields)
    assert found == pytest.approx([value])


def test_fltrust_by_its_equation_and_where_nobody_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    origin = torch.tensor([10.0, -20.0, 5.0])
    updates = torch.tensor([[3.0, 0.0, 0.0], [1.0, 0.0, 2.0], [-40.0, 0.0, 0.0]])
    payload = DenseModels(origin + updates)
    monkeypatch.setattr("steelyard.messages.payloads.AT_ONCE", {"cpu": 6, "cuda": 6})  # two parameters at a time

    def found(root: np.ndarray, *, mix: bool) -> np.ndarray:
        own = origin + torch.from_numpy(root)
        rule = RobustRule(
            *(DefenceSettings(rule="fltrust", mix=mix), payload, origin, lambda: payload.gram(origin)),
            root_of=lambda: payload.along_root(origin, own),
        )
        return (rule.combine(equal(3)) - origin).numpy()

    root = np.array([2.0, 0.0, 1.0], np.float32)
    for mix, sent in (
        (False, updates.numpy()),
        (True, np.array([[2.0, 0.0, 1.0], [2.0, 0.0, 1.0], [-19.5, 0.0, 1.0]])),
    ):
        length, sizes = np.linalg.norm(root), np.linalg.norm(sent, axis=1)
        trust = np.maximum(sent @ root / (sizes * length), 0)
        expected = trust @ (sent * (length / sizes)[:, None]) / trust.sum()
        np.testing.assert_allclose(found(root, mix=mix), expected, atol=1e-5)
    assert found(np.array([0.0, 3.0, 0.0], np.float32), mix=False).tolist() == [0.0, 0.0, 0.0]


# ---------------------------------------------------------------- what they promise


@pytest.mark.parametrize("name", [name for name in WITHOUT_ROOT if name not in ("none", "clip")])
@pytest.mark.parametrize("mix", [False, True])
@settings(max_examples=15)
@given(scale=st.floats(1.0, 1e6), seed=st.integers(0, 1000))
def test_a_hostile_minority_moves_the_result_little(name: str, mix: bool, scale: float, seed: int) -> None:
    origin, models = cohort(10, seed)
    models[:2] = origin - scale * 10
    found = combined(origin, models, equal(10), rule=name, mix=mix)
    honest = (models[2:] - origin).double().numpy()
    assert np.linalg.norm(found) <= 3 * np.linalg.norm(honest, axis=1).max()


@pytest.mark.parametrize("name", WITHOUT_ROOT)
def test_several_weightings_at_once_equal_one_by_one(name: str) -> None:
    origin, models = cohort(7)
    weights = np.random.default_rng(1).dirichlet(np.ones(7), size=3)
    # Weights of coordinate rules need not sum to one.
    together = combined(origin, models, weights * (3 if name in BY_COORDINATE else 1), rule=name)
    for row, each in zip(together, weights, strict=True):
        np.testing.assert_allclose(row, combined(origin, models, each, rule=name), atol=1e-6)


def test_blocks_of_parameters_give_the_same_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    origin, models = cohort(5)
    whole = [combined(origin, models, equal(5), rule=name) for name in sorted(BY_COORDINATE)]
    monkeypatch.setattr("steelyard.messages.payloads.AT_ONCE", {"cpu": 11, "cuda": 1})
    again = [combined(origin, models, equal(5), rule=name) for name in sorted(BY_COORDINATE)]
    np.testing.assert_allclose(again, whole, atol=1e-6)


@pytest.mark.parametrize("name", ["clip", "median"])
def test_what_is_not_trained_stays_bit_for_bit(name: str) -> None:
    origin, models = cohort(9, 4)
    models[:, 3:7] = origin[3:7]
    payload = DenseModels(models, ((3, 7),))
    rule = RobustRule(DefenceSettings.model_validate({"rule": name}), payload, origin, lambda: payload.gram(origin))
    found = rule.combine(np.random.default_rng(1).dirichlet(np.ones(9), size=4))
    assert torch.equal(found[:, 3:7], origin[3:7].expand(4, 4))
    assert not bool((found[:, :3] == origin[:3]).any())


# ---------------------------------------------------------------- the section


@pytest.mark.parametrize(
    ("fields", "robust", "share", "name"),
    [
        ({}, True, 0.3, "clip(DS)"),
        ({"rule": "none"}, False, 0.3, "none(DS)"),
        ({"rule": "none", "mix": True, "hostile": 0.0}, True, 0.0, "none(DS;mix;hostile=0)"),
    ],
)
def test_what_a_section_stands_for(fields: dict[str, object], robust: bool, share: float, name: str) -> None:
    found = DefenceSettings.model_validate(fields)
    assert (found.robust, found.share, label(WeighingSettings(defence=found))) == (robust, share, name)
    assert found.needs_root == (found.rule == "fltrust")


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"rule": "median", "hostile": 0.2}, ["hostile", "median", "trimmed-mean, multi-krum, spectral or mix = true"]),
        ({"rule": "clip", "mix": True, "steps": 2}, ["steps", "clip", "geometric-median"]),
        ({"rule": "clip", "radius": 1.0, "smooth": 0.5}, ["radius", "quantile or smooth"]),
        ({"rule": "clip", "radius": 1.0, "quantile": 0.5}, ["radius", "quantile or smooth"]),
    ],
)
def test_parameters_that_do_not_go_together_are_refused(fields: dict[str, object], parts: list[str]) -> None:
    assert_refused(lambda: validated(DefenceSettings, fields, ""), *parts)
