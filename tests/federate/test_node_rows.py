"""Nodes with files of their own, by default rules: a run goes on without the answers that would rest on few rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.clients.flower.flower_fakes import FakeGrid
from tests.federate.small_experiment import weights
from tests.federate.test_federate_apps import node

from steelyard.errors import UserError
from steelyard.experiment.loading import build
from steelyard.federate.run_config import experiment_text
from steelyard.federate.server_app import federate
from steelyard.runs.reader import History

ROWS = {"north": 60, "south": 40}
"""A fifth of them are for tests: 12 and 8."""


def described(**sections: Any) -> dict[str, Any]:
    return {
        "name": "two-hospitals",
        "seed": 3,
        "data": {"source": "npz", "path": "nowhere.npz", "classes": 2},
        "partition": {"scheme": "iid", "clients": 2},
        "model": {"name": "logistic"},
        "rounds": {"count": 2, "fraction": 1.0},
        "compute": {"engine": "loop", "device": "cpu"},
        "federate": {"nodes": 2, "start_timeout": 2.0},
        **sections,
    }


def federated(folder: Path, out: str, document: dict[str, Any], **own: Any) -> History:
    rng = np.random.default_rng(0)
    config = {"experiment": experiment_text(build(document)), "out": str(folder / out)}
    nodes: dict[int, Any] = {}
    for number, (name, rows) in enumerate(ROWS.items()):
        x = rng.normal(size=(rows, 5)).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
        nodes[number + 2] = node({"allow": "", "client": name, "data": str(folder / f"{name}.npz"), **own}, config)
    federate(FakeGrid(nodes), config, "1")  # type: ignore[arg-type]
    return History(folder / out)


def test_a_small_test_set_stays_untold_and_the_run_goes_on(tmp_path: Path):
    history = federated(tmp_path, "first", described())
    assert history.clients["samples"].tolist() == [48, 32, 48, 32]
    assert history.clients["failure"].isna().all()
    assert set(history.evaluations["client"]) == {"north"}
    assert set(history.untested["client"]) == {"south"}
    (reason,) = set(history.untested["failure"])
    assert reason == "tests: the test set has fewer, and this node answers with 10 rows or more"
    federated(tmp_path, "again", described())
    first, again = weights(tmp_path / "first"), weights(tmp_path / "again")
    assert all(torch.equal(first[name], again[name]) for name in first)  # What nodes draw repeats with the file.
    assert set(federated(tmp_path, "told", described(), **{"min-rows": 8}).evaluations["client"]) == set(ROWS)


def test_what_a_server_asks_of_the_split_changes_nothing(tmp_path: Path):
    federated(tmp_path, "first", described())
    other = {"scheme": "dirichlet", "clients": 7, "test_fraction": 0.9, "seed": 5, "minimum": 2}
    federated(tmp_path, "other", described(partition=other))
    first, other_weights = weights(tmp_path / "first"), weights(tmp_path / "other")
    assert all(torch.equal(first[name], other_weights[name]) for name in first)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"data": {"source": "npz", "path": "nowhere.npz", "classes": 2, "share": 1e-9}}, "data.share: got 1e-09"),
        ({"training": {"batch_size": 1, "learning_rate": 0.1, "weight_decay": 10.0}}, "training.batch_size: with this"),
        ({"algorithm": {"name": "fedprox", "mu": 10.0}, "training": {"batch_size": 1}}, "training.batch_size: with"),
        ({"algorithm": {"name": "scaffold"}, "training": {"batch_size": 5}}, "training.batch_size: with this"),
        ({"beside": {"f": {"algorithm": {"name": "feddyn"}}}, "training": {"batch_size": 5}}, "training.batch_size: w"),
        (
            {"rounds": {"count": 1, "fraction": 1.0, "samples": True}},
            "rounds.samples: asks for an answer about each",
        ),
    ],
)
def test_an_experiment_that_wants_few_rows_does_not_begin(tmp_path: Path, section: dict[str, Any], field: str):
    with pytest.raises(UserError, match=f"NotAllowed: {field}"):
        federated(tmp_path, "run", described(**section))
    assert not (tmp_path / "run").exists()


def test_algorithms_and_schedules_work_on_guarded_nodes_with_batches_of_enough_rows(tmp_path: Path):
    training = {"batch_size": 16, "schedule": {"kind": "step", "every": 1}}
    beside = {name: {"algorithm": {"name": name}} for name in ("scaffold", "fedprox", "feddyn", "fednova")}
    history = federated(tmp_path, "run", described(training=training, beside=beside))
    assert history.clients["failure"].isna().all()
    assert set(history.clients["rule"]) == {"DS", *beside}
