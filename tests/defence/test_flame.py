"""FLAME by hand: who points alike, how far they are clipped, and its noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steelyard.defence.flame import flame, largest_group
from steelyard.defence.robust import RobustRule
from steelyard.defence.settings import DefenceSettings
from steelyard.update_payloads import DenseModels


def at(*degrees: float) -> np.ndarray:
    turned = np.deg2rad(np.array(degrees))
    return np.stack([np.cos(turned), np.sin(turned)], axis=1)


def test_the_group_grows_by_the_nearest_until_it_is_more_than_half() -> None:
    # 0, 10 and 25 degrees join one after another: three of five. 170 and 180 are nearer to each other, but two.
    updates = at(0, 10, 25, 170, 180)
    assert largest_group(updates @ updates.T).tolist() == [0, 1, 2]
    # Length does not matter.
    longer = updates * np.array([[1.0], [50.0], [1.0], [1.0], [9.0]])
    assert largest_group(longer @ longer.T).tolist() == [0, 1, 2]


def test_with_a_reach_those_stay_who_are_not_clearly_apart() -> None:
    updates = at(0, 10, 25, 45, 180)
    gram = updates @ updates.T
    # The third joins at 1 − cos 15° = 0.0341 and makes the majority; the fourth is 1.77 times as far, 1 − cos 20°.
    assert largest_group(gram).tolist() == [0, 1, 2]
    assert largest_group(gram, 1.7).tolist() == [0, 1, 2]
    assert largest_group(gram, 1.8).tolist() == [0, 1, 2, 3]
    assert largest_group(gram, 1e6).tolist() == [0, 1, 2, 3, 4]
    assert flame(np.full(5, 0.2), gram, 1.8)[0] == pytest.approx([0.25, 0.25, 0.25, 0.25, 0.0])


def test_updates_are_clipped_to_the_median_length_of_all() -> None:
    updates = at(0, 10, 25, 180) * np.array([[1.0], [2.0], [8.0], [4.0]])
    found, middle = flame(np.array([0.2, 0.2, 0.4, 0.2]), updates @ updates.T)
    # Lengths 1, 2, 8, 4: their median is 3. Weights of those kept: a quarter, a quarter, a half.
    assert middle == pytest.approx(3.0)
    assert found == pytest.approx([0.25, 0.25, 0.5 * 3 / 8, 0.0])


def test_an_update_of_length_0_points_nowhere_and_one_alone_is_a_group() -> None:
    updates = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 0.01]])
    assert largest_group(updates @ updates.T).tolist() == [1, 2]
    assert flame(np.ones(1), np.array([[9.0]]))[0].tolist() == [1.0]


def test_the_noise_is_a_share_of_the_median_length_and_the_same_for_every_weighting() -> None:
    origin = torch.zeros(20_000)
    models = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(1))
    payload = DenseModels(models)

    def combined(noise: float, purpose: int = 5) -> torch.Tensor:
        settings = DefenceSettings(rule="flame", noise=noise)
        chance = lambda **_: np.random.default_rng(purpose)  # noqa: E731
        rule = RobustRule(settings, payload, origin, lambda: payload.gram(origin), chance=chance)
        return rule.combine(np.full((2, 3), 1 / 3))

    plain, noisy = combined(0.0), combined(0.01)
    added = noisy - plain
    assert torch.equal(added[0], added[1])
    middle = float(models.norm(dim=1).median())
    assert float(added[0].std()) == pytest.approx(0.01 * middle, rel=0.03)
    assert torch.equal(noisy, combined(0.01))
    assert not torch.equal(noisy, combined(0.01, purpose=6))
