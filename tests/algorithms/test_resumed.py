"""What algorithms keep, at clients and at the server, survives a stop: the resumed run ends in the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from steelyard import Experiment
from steelyard.errors import Stopped
from steelyard.experiment.comparing import with_rules
from steelyard.experiment.running import resume, run
from steelyard.runs.reader import History

RULES = ["scaffold,feddyn(alpha=0.1),fedadam,fedavgm+LD,fedprox(mu=0.5)"]


def final(folder: Path) -> dict[str, torch.Tensor]:
    """Models and everything that is kept beside them, as the last checkpoint holds it."""
    states, clients = History(folder).last_checkpoint()
    kept = {f"{name}/{key}": tensor for name, state in states.items() for key, tensor in state.tensors.items()}
    return {name: state.parameters for name, state in states.items()} | kept | clients


def test_a_stopped_comparison_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    document = {
        "rounds": {"count": 4, "fraction": 0.5},
        "partition": {"clients": 6},
        "model": {"name": "logistic"},
        "training": {"momentum": 0.5, "schedule": {"kind": "cosine"}},
    }
    experiment = with_rules(Experiment.model_validate(document), RULES)
    whole = run(experiment, out=tmp_path / "whole")

    def stop(round: int, figures: Mapping[str, float | None]) -> None:
        if round == 2:
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        run(experiment, out=tmp_path / "cut", progress=stop)
    resume(tmp_path / "cut")
    expected, found = final(whole), final(tmp_path / "cut")
    assert set(found) == set(expected)
    # Two kept vectors (SCAFFOLD, FedDyn) of the clients that took part, and five tensors of servers.
    assert sum("vector" in name for name in found) > 6
    of_servers = ("control", "sum_of_changes", "mean", "square", "velocity")
    assert sum(name.split("/")[-1] in of_servers for name in found) == 5
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_store_names_the_algorithm(tmp_path: Path) -> None:
    document = {"rounds": {"count": 1}, "partition": {"clients": 3}, "model": {"name": "logistic"}}
    folder = run(with_rules(Experiment.model_validate(document), ["DS,scaffold"]), out=tmp_path / "run")
    assert dict(History(folder).federations[["rule", "algorithm"]].itertuples(index=False)) == {
        "DS": "fedavg",
        "scaffold": "scaffold",
    }
