"""Data handed over from Python may depend on the seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import steelyard
from steelyard.data import Dataset
from steelyard.errors import UserError

DESCRIPTION = {
    "data": {"source": "memory"},
    "partition": {"scheme": "iid", "clients": 2},
    "model": {"name": "logistic"},
    "training": {"learning_rate": 0.1, "batch_size": 5},
    "rounds": {"count": 2, "fraction": 1.0},
    "compute": {"engine": "loop"},
    "weighing": {"criteria": ["DS"]},
    "seed": 4,
}


def draw(seed: int, columns: int = 3) -> Dataset:
    """Rows of their own for each seed: 20 for seed 4, 21 for seed 5, ..."""
    chance = np.random.default_rng(seed)
    features = chance.normal(size=(16 + seed, columns))
    return steelyard.in_memory(features, (features[:, 0] > 0).astype(np.int64), classes=2)


def test_each_seed_has_its_own_data(tmp_path: Path) -> None:
    asked: list[int] = []

    def data(seed: int) -> Dataset:
        asked.append(seed)
        return draw(seed)

    result = steelyard.Experiment(**DESCRIPTION).compare(["DS", "EQ"], 3, tmp_path / "run", dataset=data)
    assert sorted(set(asked)) == [4, 5, 6]
    found = [
        frame.query("round == 1 and rule == 'DS'").groupby("seed")["samples"].sum()
        for frame in (result.history.clients, result.history.evaluations)
    ]
    assert (found[0] + found[1]).to_dict() == {4: 20, 5: 21, 6: 22}


def test_a_function_that_ignores_the_seed_gives_what_the_data_give(tmp_path: Path) -> None:
    experiment, fixed = steelyard.Experiment(**DESCRIPTION), draw(0)
    given = experiment.run(tmp_path / "a", dataset=fixed).history.evaluations
    called = experiment.run(tmp_path / "b", dataset=lambda seed: fixed).history.evaluations
    assert len(given) == 6
    assert called.equals(given)


def test_what_the_function_returns_is_checked(tmp_path: Path) -> None:
    experiment = steelyard.Experiment(**DESCRIPTION)
    with pytest.raises(UserError, match="the function returned int for seed 4; allowed: a data set"):
        experiment.run(tmp_path / "a", dataset=lambda seed: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(UserError, match=r"shape \(4,\) in 2 classes for seed 5; allowed: shape \(3,\)"):
        experiment.compare(["DS"], 2, tmp_path / "b", dataset=lambda seed: draw(seed, seed - 1))
