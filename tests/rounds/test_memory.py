"""What criteria remember goes from round to round, through checkpoints too."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard import Experiment
from steelyard.experiment.running import resume, run
from steelyard.files import DATABASE
from steelyard.runs.checkpoint import last_checkpoint
from steelyard.runs.reader import History
from steelyard.runs.tensor_files import read_tensors

# Remembers how often each client was in a cohort, and an average of its losses; weighs by both.
PLUGIN = """
import numpy as np
from steelyard import server_criterion

@server_criterion("SEEN", needs_models=False, needs_first_losses=True, needs_label_counts=True)
def seen(view):
    times = dict(view.memory.get("SEEN", {}))
    for client, loss in zip(view.clients, view.first_losses, strict=True):
        times[client] = 0.5 * times.get(client, 0.0) + loss
    view.remember("SEEN", times)
    return np.array([times[client] for client in view.clients]) + view.label_counts.max(axis=1) / 1e3 + view.steps / 1e6
"""


def described(folder: Path) -> Experiment:
    plugin = folder / "seen.py"
    if not plugin.exists():
        plugin.write_text(PLUGIN)
    document: dict[str, Any] = {
        "name": "small",
        "seed": 5,
        "partition": {"scheme": "dirichlet", "clients": 8, "alpha": 0.5, "minimum": 8},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"learning_rate": 0.2, "epochs": 1, "batch_size": 16},
        "rounds": {"count": 5, "fraction": 0.5},
        "weighing": {"criteria": ["SEEN", "DS"], "plugins": [str(plugin)]},
        "compute": {"engine": "loop", "device": "cpu"},
    }
    return Experiment.model_validate(document)


def model(folder: Path) -> torch.Tensor:
    (file,) = (folder / "checkpoints").glob("*.safetensors")
    return read_tensors(file)["models/SEEN>DS"]


def test_memory_reaches_the_next_rounds_and_survives_a_stop(tmp_path: Path) -> None:
    whole = run(described(tmp_path), out=tmp_path / "whole")

    def stop(round: int, _: object) -> None:
        if round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(described(tmp_path), out=tmp_path / "part", progress=stop)
    part = resume(tmp_path / "part")
    assert torch.equal(model(whole), model(part))
    one, two = History(whole).clients, History(part).clients
    assert one["raw_SEEN"].tolist() == two["raw_SEEN"].tolist()
    assert one["weight"].tolist() == two["weight"].tolist()
    for folder in (whole, part):
        with closing(sqlite3.connect(folder / DATABASE)) as connection:
            states = last_checkpoint(connection, folder).states
        remembered = states["SEEN>DS"].memory["SEEN"]
        # Everyone who was ever asked is still there, also those of the first round who were not asked again.
        assert set(remembered) == set(one["client"])
        for _, row in one[one["round"] == 5].iterrows():
            # Label counts and steps add less than .1 to what is remembered.
            assert remembered[row["client"]] == pytest.approx(row["raw_SEEN"], abs=0.1)
