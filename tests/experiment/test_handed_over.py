"""Data handed over from Python: scaled as data from files are, and of each seed where they are a function."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.kit import SMALL, small

from steelyard import Experiment, in_memory
from steelyard.base.errors import UserError
from steelyard.data.dataset import Dataset

FEATURES = np.array([[0.0, 10.0], [2.0, 10.0], [4.0, 10.0], [100.0, 40.0]])


def scaled(normalise: str, **more: object) -> Experiment:
    alone = {"partition": {"scheme": "iid", "clients": 1, "test": "none"}}
    return Experiment(**{**SMALL, **alone, "data": {"source": "memory", "normalise": normalise}, **more})


@pytest.mark.parametrize("by_seed", [False, True])
def test_standard_scales_by_the_training_part(by_seed: bool) -> None:
    """Mean 2 and deviation sqrt(8/3) of the first column's training rows; the second column is constant there."""
    data = in_memory(FEATURES, [0, 1, 0, 1], held_out=[0, 0, 0, 1])
    described = scaled("standard")

    def seeded(seed: int) -> Dataset:
        return data

    clients, _ = described.assemble(seeded if by_seed else data)
    found = clients.context.population(0).source.dataset.features  # type: ignore[attr-defined]
    deviation = np.sqrt(8 / 3)
    expected = [[-2 / deviation, 0], [0, 0], [2 / deviation, 0], [98 / deviation, 30]]
    assert found.numpy() == pytest.approx(np.array(expected), abs=1e-5)


FROM_PYTHON = small(data={"source": "memory"}, partition={"scheme": "iid", "clients": 2, "test": "local"}, seed=4)


def draw(seed: int, columns: int = 3) -> Dataset:
    """Rows of their own for each seed: 20 for seed 4, 21 for seed 5, ..."""
    chance = np.random.default_rng(seed)
    features = chance.normal(size=(16 + seed, columns))
    return in_memory(features, (features[:, 0] > 0).astype(np.int64), classes=2)


def test_each_seed_has_its_own_data(tmp_path: Path) -> None:
    asked: list[int] = []

    def data(seed: int) -> Dataset:
        asked.append(seed)
        return draw(seed)

    result = FROM_PYTHON.compare(["DS", "EQ"], 3, tmp_path / "run", dataset=data)
    assert sorted(set(asked)) == [4, 5, 6]
    found = [
        frame.query("round == 1 and rule == 'DS'").groupby("seed")["samples"].sum()
        for frame in (result.history.clients, result.history.evaluations)
    ]
    assert (found[0] + found[1]).to_dict() == {4: 20, 5: 21, 6: 22}
    assert [rule.rule for rule in result.comparison.rules if rule.right_wrong] == [
        "EQ"
    ]  # as `steelyard compare` records it


def test_what_the_function_returns_is_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the function returned int for seed 4; allowed: a data set"):
        FROM_PYTHON.run(tmp_path / "a", dataset=lambda seed: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(UserError, match=r"shape \(4,\) in 2 classes for seed 5; allowed: shape \(3,\)"):
        FROM_PYTHON.compare(["DS"], 2, tmp_path / "b", dataset=lambda seed: draw(seed, seed - 1))
