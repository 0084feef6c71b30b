"""Masks and several labels, across machines: the bits of the simulation whose engine is the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from tests.federate.small_experiment import weights
from tests.federate.test_federate_apps import described, grid_of

from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.federate.server_app import federate
from steelyard.runs.reader import History


def masks(folder: Path) -> dict[str, Any]:
    """Strokes of digits, for a small network, with the loss whose mean is over images and not over pixels."""
    return {
        "data": {"source": "digit-masks"},
        "partition": {"scheme": "iid", "server": "fraction", "server_fraction": 0.9},
        "model": {"name": "unet", "arguments": {"wide": 4, "depth": 1}},
        "training": {"loss": "dice"},
        "weighing": {"criteria": ["DS", "VM"], "priority": "VM>DS"},
    }


def labels(folder: Path) -> dict[str, Any]:
    """A table with three columns of labels, one of them in words."""
    chance = np.random.default_rng(2)
    x, y = chance.normal(size=(2, 300))
    columns = {"fever": np.where(x > 0, "yes", "no"), "cough": (y > 0.5).astype(int), "rash": (x + y > 1).astype(int)}
    pandas.DataFrame({"x": x, "y": y, **columns}).to_csv(folder / "t.csv", index=False)
    data = {"source": "csv", "path": str(folder / "t.csv"), "task": "multi-label", "labels": "fever"}
    return {
        "data": {**data, "further_labels": ["cough", "rash"]},
        "partition": {"scheme": "iid", "server": "fraction", "server_fraction": 0.2},
        "model": {"name": "mlp", "hidden": [6]},
        "weighing": {"criteria": ["DS", "VL"], "priority": "VL>DS"},
    }


@pytest.mark.parametrize("task", [masks, labels])
def test_a_federation_gives_the_bits_of_the_loop(task: Any, tmp_path: Path) -> None:
    document = described(**task(tmp_path), rounds={"count": 1, "fraction": 0.5})
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 2, out=str(tmp_path / "federated"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    ours, theirs = weights(tmp_path / "simulated"), weights(tmp_path / "federated")
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    here, there = History(tmp_path / "simulated"), History(tmp_path / "federated")
    assert here.clients["client"].tolist() == there.clients["client"].tolist()
    assert here.clients["weight"].tolist() == there.clients["weight"].tolist()
    assert here.clients["weight"].nunique() > 2  # what the clients' tests say counts in the weights
    assert here.evaluations["score"].tolist() == there.evaluations["score"].tolist()
    assert len(set(here.evaluations["score"].tolist())) > 2
