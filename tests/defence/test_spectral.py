"""The spectral check by hand."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard.defence.spectral import scores, spectral


def test_the_score_is_the_squared_distance_along_the_first_principal_direction() -> None:
    # Five clients: four at (±1, 0) and (0, ±0.1) around the mean, one far along the first axis.
    updates = np.array([[1.0, 0.1], [-1.0, 0.1], [0.0, -0.1], [0.0, 0.0], [10.0, 0.0]])
    centred = updates - updates.mean(axis=0)
    _, _, rows = np.linalg.svd(centred, full_matrices=False)
    assert scores(updates @ updates.T) == pytest.approx(np.square(centred @ rows[0]))
    # Along x the mean is 2: squares 1, 9, 4, 4, 64, up to the small turn of the direction.
    assert scores(updates @ updates.T) == pytest.approx([1.0, 9.0, 4.0, 4.0, 64.0], rel=0.05)


def test_those_who_stand_out_are_left_out_and_the_weights_of_the_others_sum_to_1() -> None:
    updates = np.array([[1.0, 0.0], [0.9, 0.1], [1.1, 0.1], [-8.0, 0.0]])
    weights = np.array([0.2, 0.2, 0.1, 0.5])
    assert spectral(weights, updates @ updates.T, 0.25) == pytest.approx([0.4, 0.4, 0.2, 0.0])


def test_equal_updates_keep_the_first_and_one_alone_stays() -> None:
    alike = np.ones((3, 2))
    assert spectral(np.full(3, 1 / 3), alike @ alike.T, 0.0) == pytest.approx([1 / 3] * 3)
    assert spectral(np.ones(1), np.array([[4.0]]), 0.3).tolist() == [1.0]
