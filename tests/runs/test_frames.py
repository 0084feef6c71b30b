"""Who listens to whom as rows: by hand, for two rounds of unequal cohorts."""

from __future__ import annotations

import numpy as np

from steelyard.runs.frames import listening_frame

COLUMNS = ["rule", "seed", "round", "client", "hears", "weight"]


def test_a_matrix_is_a_row_for_each_pair_of_its_clients() -> None:
    parts = [
        ("fedala", 3, 1, ["a", "b"], np.array([[0.75, 0.25], [0.5, 0.5]])),
        ("fedfomo", 4, 2, ["c"], np.array([[1.0]])),
    ]
    frame = listening_frame(parts)
    assert list(frame.columns) == COLUMNS
    assert list(frame.index) == [0, 1, 2, 3, 4]
    assert frame.to_numpy().tolist() == [
        ["fedala", 3, 1, "a", "a", 0.75],
        ["fedala", 3, 1, "a", "b", 0.25],
        ["fedala", 3, 1, "b", "a", 0.5],
        ["fedala", 3, 1, "b", "b", 0.5],
        ["fedfomo", 4, 2, "c", "c", 1.0],
    ]


def test_without_a_matrix_the_columns_are_the_same() -> None:
    frame = listening_frame([])
    assert (list(frame.columns), len(frame)) == (COLUMNS, 0)
