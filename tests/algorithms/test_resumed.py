"""What algorithms keep, at clients and at the server, survives a stop: the resumed run ends in the same bits."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from tests.stopping import stopped_and_resumed

from steelyard import Experiment
from steelyard.experiment.comparing import with_rules
from steelyard.experiment.running import run
from steelyard.runs.reader import History

RULES = ["scaffold,feddyn(alpha=0.1),fedadam,fedavgm+LD,fedprox(mu=0.5),client-momentum+centred-clip(EQ)"]
PERSONAL = ["local-only,fine-tuned,ditto,apfl,fedrep(head_epochs=2),fedala,fedfomo"]


def final(folder: Path) -> dict[str, torch.Tensor]:
    """Models and everything that is kept beside them, as the last checkpoint holds it."""
    states, clients = History(folder).last_checkpoint()
    kept = {f"{name}/{key}": tensor for name, state in states.items() for key, tensor in state.tensors.items()}
    return {name: state.parameters for name, state in states.items()} | kept | clients


@pytest.mark.parametrize(("rules", "kept", "servers"), [(RULES, 3, 5), (PERSONAL, 9, 0)])
def test_a_stopped_comparison_goes_on_to_the_same_bits(
    tmp_path: Path, rules: list[str], kept: int, servers: int
) -> None:
    document = {
        "rounds": {"count": 4, "fraction": 0.5},
        "partition": {"clients": 6},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"batch_size": 120, "momentum": 0.5, "schedule": {"kind": "cosine"}},
    }
    experiment = with_rules(Experiment.model_validate(document), rules)
    whole = run(experiment, out=tmp_path / "whole")
    stopped_and_resumed(experiment, tmp_path / "cut", after=2)
    expected, found = final(whole), final(tmp_path / "cut")
    assert set(found) == set(expected)
    # The vectors that clients keep (control variates, momenta, models of their own), each of those who took part.
    assert sum("vector" in name for name in found) > 3 * kept
    of_servers = ("control", "sum_of_changes", "mean", "square", "velocity")
    assert sum(name.split("/")[-1] in of_servers for name in found) == servers
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    scores = [History(folder).rounds[["rule", "round", "accuracy"]] for folder in (whole, tmp_path / "cut")]
    pd.testing.assert_frame_equal(*scores)


def test_the_store_names_the_algorithm(tmp_path: Path) -> None:
    document = {"rounds": {"count": 1}, "partition": {"clients": 3}, "model": {"name": "logistic"}}
    folder = run(with_rules(Experiment.model_validate(document), ["DS,scaffold"]), out=tmp_path / "run")
    assert dict(History(folder).federations[["rule", "algorithm"]].itertuples(index=False)) == {
        "DS": "fedavg",
        "scaffold": "scaffold",
    }
