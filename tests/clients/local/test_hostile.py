"""What hostile clients send, by hand and by definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steelyard.clients.local.hostile import attack
from steelyard.data.dataset import Behaviour
from steelyard.learning.parameters import Layout
from steelyard.messages import Task

NAMES = ("a", "b", "c", "d", "e")


def sent(how: Behaviour, hostile: tuple[str, ...] = ("a",), seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The updates before and after an attack, as [clients, parameters]."""
    chance = torch.Generator().manual_seed(seed)
    origin = torch.randn(400, generator=chance)
    models = origin + torch.randn(5, 400, generator=chance)
    before = (models - origin).double().numpy()
    attack(Task("f", 7, 3, NAMES, origin), NAMES, models, dict.fromkeys(hostile, how))
    return before, (models - origin).double().numpy()


def test_reversed_updates() -> None:
    before, after = sent(Behaviour(attack="reversed", strength=10.0))
    np.testing.assert_allclose(after[0], -10 * before[0], atol=1e-4)
    np.testing.assert_allclose(after[1:], before[1:])


def test_boosted_updates() -> None:
    before, after = sent(Behaviour(attack="boosted", strength=5.0))
    np.testing.assert_allclose(after[0], 5 * before[0], atol=1e-4)


@pytest.mark.parametrize(("outputs", "target", "place", "sign"), [(3, 1, 13, 1), (1, 0, 4, -1), (1, 1, 4, 1)])
def test_a_push_on_one_bias(outputs: int, target: int, place: int, sign: int) -> None:
    layout = Layout.of(torch.nn.Linear(4, outputs))  # weights first, then the biases
    origin = torch.zeros(layout.size)
    models = torch.full((2, layout.size), 0.5)
    how = Behaviour(attack="bias", strength=2.0, target=target)
    attack(Task("f", 7, 3, ("a", "b"), origin), ("a", "b"), models, {"a": how}, layout)
    expected = np.full(layout.size, 0.5)
    expected[place] += sign * 2 * 0.5 * np.sqrt(layout.size)
    np.testing.assert_allclose(models[0], expected, rtol=1e-6)
    np.testing.assert_allclose(models[1], 0.5)


def test_noise_is_as_large_as_said_and_the_same_each_time() -> None:
    before, after = sent(Behaviour(attack="gaussian", strength=10.0), ("a", "b"))
    for row in (0, 1):
        size = np.sqrt(np.square(before[row]).mean())
        assert np.sqrt(np.square(after[row]).mean()) == pytest.approx(10 * size, rel=0.15)
    assert abs(np.corrcoef(after[0], after[1])[0, 1]) < 0.2
    assert (sent(Behaviour(attack="gaussian", strength=10.0), ("a", "b"))[1] == after).all()


def test_alie_and_ipm_see_the_honest_updates() -> None:
    before, after = sent(Behaviour(attack="alie", strength=1.5), ("a", "c"))
    honest = before[[1, 3, 4]]
    expected = honest.mean(axis=0) - 1.5 * honest.std(axis=0)
    np.testing.assert_allclose(after[[0, 2]], [expected, expected], atol=1e-5)
    before, after = sent(Behaviour(attack="ipm", strength=2.0), ("a", "c"))
    np.testing.assert_allclose(after[0], -2 * before[[1, 3, 4]].mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_min_max_goes_exactly_as_far_as_honest_updates_lie_apart(seed: int) -> None:
    before, after = sent(Behaviour(attack="min-max"), ("a",), seed)
    honest = before[1:]
    widest = max(float(np.linalg.norm(x - y)) for x in honest for y in honest)
    furthest = max(float(np.linalg.norm(after[0] - x)) for x in honest)
    assert furthest == pytest.approx(widest, rel=1e-4)
    assert np.linalg.norm(after[0] - honest.mean(axis=0)) > 0
    direction = (after[0] - honest.mean(axis=0)) / honest.std(axis=0)
    assert direction.max() < 0
    np.testing.assert_allclose(direction, direction[0], rtol=1e-2)


def test_a_cohort_of_hostile_clients_alone() -> None:
    before, after = sent(Behaviour(attack="ipm", strength=2.0), NAMES)
    np.testing.assert_allclose(after, np.tile(-2 * before.mean(axis=0), (5, 1)), atol=1e-5)


def test_blocks_give_the_same_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {kind: sent(Behaviour(attack=kind, strength=1.0))[1] for kind in ("alie", "ipm", "min-max")}
    monkeypatch.setattr("steelyard.update_payloads.AT_ONCE", {"cpu": 37, "cuda": 37})
    for kind, found in whole.items():
        np.testing.assert_allclose(sent(Behaviour(attack=kind, strength=1.0))[1], found, atol=1e-5)
