"""Robust rules against slow references of our own, against byzfl, and in what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.defence.byzfl_rules import aggregators

from steelyard.defence.robust import RobustRule
from steelyard.defence.rules import radius_of
from steelyard.defence.settings import DEFENCES, DefenceSettings
from steelyard.update_payloads import DenseModels

SIZE = 13


def cohort(clients: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    chance = np.random.default_rng(seed)
    origin = torch.from_numpy(chance.normal(size=SIZE).astype(np.float32))
    return origin, origin + torch.from_numpy(chance.normal(size=(clients, SIZE)).astype(np.float32))


def combined(origin: torch.Tensor, models: torch.Tensor, weights: np.ndarray, **given: object) -> np.ndarray:
    """The update that a rule makes of a cohort."""
    payload = DenseModels(models)
    rule = RobustRule(DefenceSettings.model_validate(given), payload, origin, lambda: payload.gram(origin))
    return (rule.combine(weights) - origin).double().numpy()


def equal(count: int) -> np.ndarray:
    return np.full(count, 1 / count)


# ---------------------------------------------------------------- held to byzfl, with equal weights


@pytest.mark.parametrize("clients", [7, 10, 11])
@pytest.mark.parametrize("seed", range(3))
def test_equal_weights_give_byzfl(clients: int, seed: int) -> None:
    byzfl = aggregators()
    origin, models = cohort(clients, seed)
    updates = (models - origin).double().numpy()
    hostile = 3
    share = hostile / clients
    found = {
        "median": combined(origin, models, equal(clients), rule="median"),
        "trimmed": combined(origin, models, equal(clients), rule="trimmed-mean", hostile=share),
        "krum": combined(origin, models, equal(clients), rule="multi-krum", hostile=share),
        "centred": combined(origin, models, equal(clients), rule="centred-clip", radius=2.0, steps=3),
        "geometric": combined(origin, models, equal(clients), rule="geometric-median", steps=200),
    }
    held_to = {
        "median": byzfl.Median()(updates),
        "trimmed": byzfl.TrMean(f=hostile)(updates),
        "krum": byzfl.MultiKrum(f=hostile)(updates),
        "centred": byzfl.CenteredClipping(L=3, tau=2.0)(updates),
        # byzfl starts elsewhere and smooths more: both reach the same point after many steps.
        "geometric": byzfl.GeometricMedian(nu=1e-6, T=200)(updates),
    }
    for name, ours in found.items():
        np.testing.assert_allclose(ours, held_to[name], atol=2e-5, err_msg=name)


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


@pytest.mark.parametrize("seed", range(4))
def test_coordinate_rules_with_weights(seed: int) -> None:
    origin, models = cohort(9, seed)
    weights = np.random.default_rng(seed).dirichlet(np.ones(9))
    updates = (models - origin).double().numpy()
    medians = [slow_median(updates[:, c], weights) for c in range(SIZE)]
    trimmed = [slow_trimmed(updates[:, c], weights, 0.25) for c in range(SIZE)]
    np.testing.assert_allclose(combined(origin, models, weights, rule="median"), medians, atol=1e-6)
    np.testing.assert_allclose(combined(origin, models, weights, rule="trimmed-mean", hostile=0.25), trimmed, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_rules_of_lengths_with_weights(seed: int) -> None:
    origin, models = cohort(8, seed)
    weights = np.random.default_rng(seed).dirichlet(np.ones(8))
    updates = (models - origin).double().numpy()
    sizes = np.linalg.norm(updates, axis=1)
    radius = np.median(sizes)
    clip = sum(w * min(1, radius / s) * u for w, s, u in zip(weights, sizes, updates, strict=True))
    np.testing.assert_allclose(combined(origin, models, weights, rule="clip"), clip, atol=1e-6)
    centre = np.zeros(SIZE)
    for _ in range(3):
        away = np.linalg.norm(updates - centre, axis=1)
        reach = np.median(away)
        steps = [w * min(1, reach / a) * (u - centre) for w, a, u in zip(weights, away, updates, strict=True)]
        centre = centre + np.sum(steps, axis=0)
    np.testing.assert_allclose(combined(origin, models, weights, rule="centred-clip"), centre, atol=1e-6)
    point = clip
    for _ in range(8):
        pull = weights / np.maximum(np.linalg.norm(updates - point, axis=1), 1e-6)
        point = pull @ updates / pull.sum()
    np.testing.assert_allclose(combined(origin, models, weights, rule="geometric-median"), point, atol=1e-6)


def test_multi_krum_keeps_the_weights_of_those_it_chooses() -> None:
    origin = torch.zeros(2)
    models = torch.tensor([[1.0, 0.0], [1.0, 0.2], [1.0, -0.2], [1.2, 0.0], [-9.0, 9.0]])
    weights = np.array([0.1, 0.1, 0.1, 0.1, 0.6])
    found = combined(origin, models, weights, rule="multi-krum", hostile=0.2)
    np.testing.assert_allclose(found, [1.05, 0.0], atol=1e-6)


def test_mixing_averages_the_nearest() -> None:
    origin = torch.zeros(1)
    models = torch.tensor([[0.0], [1.0], [2.0], [100.0]])
    # One may be hostile: three nearest each. 0, 1 and 2 become 1; 100 becomes (100 + 2 + 1) / 3.
    found = combined(origin, models, np.array([0.25, 0.25, 0.25, 0.25]), rule="none", mix=True, hostile=0.25)
    np.testing.assert_allclose(found, [(1 + 1 + 1 + 103 / 3) / 4], rtol=1e-6)
    middle = combined(origin, models, np.array([0.25, 0.25, 0.25, 0.25]), rule="median", mix=True, hostile=0.25)
    np.testing.assert_allclose(middle, [1.0], rtol=1e-6)


def test_fltrust_by_hand() -> None:
    origin = torch.zeros(2)
    payload = DenseModels(torch.tensor([[3.0, 0.0], [0.0, 5.0], [-1.0, 0.0], [4.0, 4.0]]))
    rule = RobustRule(
        *(DefenceSettings(rule="fltrust"), payload, origin, lambda: payload.gram(origin)),
        root_of=lambda: payload.along_root(origin, torch.tensor([2.0, 0.0])),
    )
    # Cosines 1, 0, −1 and √½; the first and the last count, both at length 2.
    trust = np.array([1.0, 0.0, 0.0, math.sqrt(0.5)])
    sent = np.array([[2.0, 0], [0, 0], [0, 0], [math.sqrt(2), math.sqrt(2)]])
    np.testing.assert_allclose(rule.combine(equal(4)).numpy(), trust @ sent / trust.sum(), rtol=1e-6)


def test_fltrust_keeps_the_old_model_when_nobody_agrees() -> None:
    origin = torch.tensor([1.0, 1.0])
    payload = DenseModels(torch.tensor([[0.0, 1.0], [0.0, 0.5]]))
    rule = RobustRule(
        *(DefenceSettings(rule="fltrust"), payload, origin, lambda: payload.gram(origin)),
        root_of=lambda: payload.along_root(origin, torch.tensor([2.0, 1.0])),
    )
    assert rule.combine(equal(2)).tolist() == [1.0, 1.0]


# ---------------------------------------------------------------- what they promise

ALONE = [name for name in DEFENCES if name not in ("fltrust", "none", "clip")]


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("mix", [False, True])
@settings(max_examples=25, deadline=None)
@given(scale=st.floats(1.0, 1e6), seed=st.integers(0, 1000))
def test_a_hostile_minority_moves_the_result_little(name: str, mix: bool, scale: float, seed: int) -> None:
    origin, models = cohort(10, seed)
    models[:2] = origin - scale * 10
    found = combined(origin, models, equal(10), rule=name, mix=mix)
    honest = (models[2:] - origin).double().numpy()
    assert np.linalg.norm(found) <= 3 * np.linalg.norm(honest, axis=1).max()


@pytest.mark.parametrize("name", [name for name in DEFENCES if name != "fltrust"])
def test_several_weightings_at_once_equal_one_by_one(name: str) -> None:
    origin, models = cohort(7)
    weights = np.random.default_rng(1).dirichlet(np.ones(7), size=3)
    together = combined(origin, models, weights, rule=name)
    for row, each in zip(together, weights, strict=True):
        np.testing.assert_allclose(row, combined(origin, models, each, rule=name), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in DEFENCES if name not in ("fltrust", "flame")])
def test_one_client_alone(name: str) -> None:
    origin, models = cohort(1)
    np.testing.assert_allclose(combined(origin, models, np.ones(1), rule=name), (models - origin)[0], atol=1e-6)


def test_a_free_rider_does_not_catch_the_geometric_median() -> None:
    origin, models = cohort(6)
    models[0] = origin
    assert np.linalg.norm(combined(origin, models, equal(6), rule="geometric-median")) > 0.1


def test_blocks_of_parameters_give_the_same_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    origin, models = cohort(5)
    whole = {name: combined(origin, models, equal(5), rule=name) for name in ("median", "trimmed-mean")}
    monkeypatch.setattr("steelyard.update_payloads.AT_ONCE", {"cpu": 11, "cuda": 11})
    for name, found in whole.items():
        assert combined(origin, models, equal(5), rule=name).tolist() == found.tolist()


def test_the_radius_leans_on_the_round_before() -> None:
    lengths = np.array([1.0, 4.0, 9.0])
    assert radius_of(lengths) == 4.0
    assert radius_of(lengths, 1.0) == 9.0
    assert radius_of(lengths, 0.5, 0.5, 1.0) == 2.0
    assert radius_of(lengths, 0.5, 0.5, None) == 4.0


def made(origin: torch.Tensor, models: torch.Tensor, before: float | None = None, **given: object) -> RobustRule:
    payload = DenseModels(models)
    return RobustRule(
        *(DefenceSettings.model_validate(given), payload, origin, lambda: payload.gram(origin)), radius_before=before
    )


def test_the_radius_of_a_round_is_there_for_the_next() -> None:
    origin, models = torch.zeros(1), torch.tensor([[1.0], [4.0], [-9.0]])
    assert made(origin, models).radius == pytest.approx(4.0)
    assert made(origin, models, quantile=1.0).radius == pytest.approx(9.0)
    assert made(origin, models, radius=0.5).radius == 0.5
    assert made(origin, models, 16.0, smooth=0.5).radius == pytest.approx(8.0)
    assert made(origin, models, 16.0).radius == pytest.approx(4.0)
    leaning = made(origin, models, 16.0, smooth=0.5).combine(equal(3))
    assert leaning.tolist() == pytest.approx([(1 + 4 - 8) / 3])
    # Mixed first, two of three each: −9 and 1 become −4, 1 and 4 become 2.5; the median length is 2.5.
    assert made(origin, models, mix=True).radius == pytest.approx(2.5)


def test_centred_clipping_takes_its_radius_and_steps_from_the_settings() -> None:
    origin, models = torch.zeros(1), torch.tensor([[1.0], [9.0]])
    # As in test_rules: 1.5, 2.25, 2.625 after one, two, three steps of radius 2.
    for steps, value in ((1, 1.5), (2, 2.25), (None, 2.625)):
        found = made(origin, models, rule="centred-clip", radius=2.0, steps=steps).combine(equal(2))
        assert found.tolist() == pytest.approx([value])
    # A quantile of 1 reaches the furthest: the plain mean in one step.
    whole = made(origin, models, rule="centred-clip", quantile=1.0, steps=1).combine(equal(2))
    assert whole.tolist() == pytest.approx([5.0])


def test_the_geometric_median_takes_its_steps_and_least_distance_from_the_settings() -> None:
    origin, models = torch.zeros(1), torch.tensor([[0.0], [1.0], [8.0]])
    far = made(origin, models, rule="geometric-median", least_distance=100.0).combine(equal(3))
    assert far.tolist() == pytest.approx([3.0])
    # From the start, lengths 0, 1, 8 cut to 1: 2/3. One step: pulls 3/2, 3, 3/22.
    once = made(origin, models, rule="geometric-median", steps=1).combine(equal(3))
    assert once.tolist() == pytest.approx([(3 + 8 * 3 / 22) / (1.5 + 3 + 3 / 22)])


def test_fltrust_after_mixing_and_from_a_model_that_is_not_0(monkeypatch: pytest.MonkeyPatch) -> None:
    origin = torch.tensor([10.0, -20.0, 5.0])
    updates = torch.tensor([[3.0, 0.0, 0.0], [1.0, 0.0, 2.0], [-40.0, 0.0, 0.0]])
    payload = DenseModels(origin + updates)
    root = torch.tensor([2.0, 0.0, 1.0])

    def trusted(mixed: np.ndarray) -> np.ndarray:
        """FLTrust by its equation."""
        length = float(root.norm())
        sizes = np.linalg.norm(mixed, axis=1)
        trust = np.maximum(mixed @ root.numpy() / (sizes * length), 0)
        return trust @ (mixed * (length / sizes)[:, None]) / trust.sum()

    monkeypatch.setattr("steelyard.update_payloads.AT_ONCE", {"cpu": 6, "cuda": 6})  # two parameters at a time
    averaged = np.array([[2.0, 0.0, 1.0], [2.0, 0.0, 1.0], [-19.5, 0.0, 1.0]])
    for mix, sent in ((False, updates.numpy()), (True, averaged)):
        rule = RobustRule(
            *(DefenceSettings(rule="fltrust", mix=mix), payload, origin, lambda: payload.gram(origin)),
            root_of=lambda: payload.along_root(origin, origin + root),
        )
        np.testing.assert_allclose((rule.combine(equal(3)) - origin).numpy(), trusted(sent), atol=1e-5)


def test_the_inner_products_are_computed_once_and_only_where_a_rule_needs_them() -> None:
    origin, models = cohort(5)
    payload = DenseModels(models)
    asked: list[int] = []

    def gram() -> np.ndarray:
        asked.append(1)
        return payload.gram(origin)

    for name, count in (("clip", 1), ("multi-krum", 1), ("median", 0)):
        asked.clear()
        rule = RobustRule(DefenceSettings.model_validate({"rule": name}), payload, origin, gram)
        rule.combine(equal(5))
        rule.combine(np.stack([equal(5), equal(5)]))
        assert len(asked) == count, name


def test_weights_of_coordinate_rules_need_not_sum_to_one() -> None:
    origin, models = cohort(5)
    weights = np.array([[1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 2.0, 0.0, 2.0, 2.0]])
    for name in ("median", "trimmed-mean"):
        found = combined(origin, models, weights, rule=name)
        np.testing.assert_allclose(
            found, combined(origin, models, weights / weights.sum(axis=1, keepdims=True), rule=name), atol=1e-6
        )


def test_what_a_section_stands_for() -> None:
    assert DefenceSettings().robust
    assert not DefenceSettings(rule="none").robust
    assert DefenceSettings(rule="none", mix=True).robust
    assert [name for name in DEFENCES if DefenceSettings.model_validate({"rule": name}).needs_root] == ["fltrust"]
    assert DefenceSettings().share == 0.3
    assert DefenceSettings(rule="trimmed-mean", hostile=0.0).share == 0.0
    assert DefenceSettings(rule="trimmed-mean", hostile=0.3).label("DS") == "trimmed-mean(DS;hostile=0.3)"
    assert DefenceSettings(rule="median", mix=True, hostile=0.25).label("LD>DS") == "median(LD>DS;mix;hostile=0.25)"
    assert DefenceSettings(rule="geometric-median", least_distance=1e-9).label("DS") == (
        "geometric-median(DS;least_distance=1e-09)"
    )
    assert DefenceSettings().label("DS") == "clip(DS)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"rule": "median", "hostile": 0.2},
            r"hostile: given with rule = 'median'; allowed only with trimmed-mean, multi-krum, spectral or mix = true",
        ),
        ({"rule": "clip", "steps": 2}, r"steps: given with .*allowed only with centred-clip, geometric-median \[type"),
        ({"rule": "clip", "mix": True, "steps": 2}, "steps: given with rule = 'clip'"),
        (
            {"rule": "clip", "radius": 1.0, "smooth": 0.5},
            "radius: given together with quantile or smooth; allowed: a f",
        ),
        ({"rule": "median", "hostile": 0.2}, "hostile: given with rule = 'median'"),
        ({"rule": "clip", "radius": 1.0, "quantile": 0.5}, "radius: given together with quantile"),
        ({"rule": "multi-krum", "steps": 3}, "steps: given with rule = 'multi-krum'"),
    ],
)
def test_parameters_of_another_rule_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DefenceSettings.model_validate(given)


@pytest.mark.parametrize("name", ["clip", "median", "trimmed-mean", "multi-krum", "geometric-median"])
def test_what_is_not_trained_stays_bit_for_bit(name: str) -> None:
    origin, models = cohort(9, 4)
    models[:, 3:7] = origin[3:7]
    payload = DenseModels(models, ((3, 7),))
    rule = RobustRule(DefenceSettings.model_validate({"rule": name}), payload, origin, lambda: payload.gram(origin))
    weights = np.random.default_rng(1).dirichlet(np.ones(9), size=4)
    found = rule.combine(weights)
    assert torch.equal(found[:, 3:7], origin[3:7].expand(4, 4))
    assert not bool((found[:, :3] == origin[:3]).any())
