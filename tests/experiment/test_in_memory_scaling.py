"""`data.normalise` holds for data handed over from Python as it does for data read from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer

from steelyard import Experiment, in_memory
from steelyard.data.dataset import Dataset

FEATURES = np.array([[0.0, 10.0], [2.0, 10.0], [4.0, 10.0], [100.0, 40.0]])


def experiment(normalise: str, **more: object) -> Experiment:
    return Experiment.model_validate(
        {
            "data": {"source": "memory", "normalise": normalise},
            "partition": {"scheme": "iid", "clients": 1, "test": "none"},
            "model": {"name": "logistic"},
            "compute": {"engine": "loop", "device": "cpu"},
            **more,
        }
    )


@pytest.mark.parametrize("by_seed", [False, True])
def test_standard_scales_by_the_training_part(by_seed: bool) -> None:
    """Mean 2 and deviation sqrt(8/3) of the first column's training rows; the second column is constant there."""
    data = in_memory(FEATURES, [0, 1, 0, 1], held_out=[0, 0, 0, 1])
    described = experiment("standard")

    def seeded(seed: int) -> Dataset:
        return data

    clients, _ = described.assemble(seeded if by_seed else data)
    found = clients.context.population(0).source.dataset.features  # type: ignore[attr-defined]
    deviation = np.sqrt(8 / 3)
    expected = [[-2 / deviation, 0], [0, 0], [2 / deviation, 0], [98 / deviation, 30]]
    assert found.numpy() == pytest.approx(np.array(expected), abs=1e-5)


def test_unit_leaves_numbers_as_they_are() -> None:
    clients, _ = experiment("unit").assemble(in_memory(FEATURES, [0, 1, 0, 1]))
    found = clients.context.population(0).source.dataset.features  # type: ignore[attr-defined]
    assert torch.equal(found, torch.from_numpy(FEATURES).float())


def test_breast_cancer_is_learnt_once_it_is_scaled(tmp_path: Path) -> None:
    cancer = load_breast_cancer()
    described = experiment(
        "standard",
        seed=1,
        partition={"scheme": "iid", "clients": 4, "test": "local"},
        rounds={"count": 10},
        training={"learning_rate": 0.1, "batch_size": 16},
    )
    result = described.run(tmp_path / "run", dataset=in_memory(cancer.data, cancer.target))
    assert result.summary["rules"][0]["accuracy"] > 0.93
