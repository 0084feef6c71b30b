"""Policies through comparisons, sweeps, machines and reports: every one once, what cannot run with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.federate.small_experiment import weights
from tests.federate.test_federate_apps import described, grid_of

from steelyard import Experiment
from steelyard.experiment.comparing import load_comparison
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.federate.server_app import federate
from steelyard.runs.reader import History
from steelyard.weighing.policies.catalogue import known

PERSONAL = {"apfl", "ditto", "fedala", "fedbn", "fedfomo", "fedrep", "fine-tuned", "local-only"}
EVERY = {"fedavg", "SV", *known(), *PERSONAL}


def test_all_is_every_rule_once_and_the_rest_with_its_reason(messages: list[str]) -> None:
    found = load_comparison("quickstart", rules=["all"])
    left_out = {"afl", "cgsv", "feddg-ga", "fedbn"}
    assert set(found.rules()) == EVERY - left_out
    assert set(found.left_out) == left_out
    assert found.left_out["afl"].startswith("weighing.policy: afl needs full participation")
    assert found.left_out["fedbn"].startswith("algorithm.name: got 'fedbn' with a model without batch norm")
    lines = [f"--rules all: without {name}: {why}" for name, why in found.left_out.items()]
    assert messages == lines
    whole = load_comparison("quickstart", ["rounds.fraction=1"], ["all"])
    assert EVERY - set(whole.rules()) == {"fedbn"} == set(whole.left_out)
    assert load_comparison("quickstart", rules=["fedavg"]).left_out == {}


def test_all_beside_another_rule_without_rows_at_the_server() -> None:
    found = load_comparison("mnist-noniid", ["rounds.fraction=1"], ["all", "DS>LD"])
    assert "DS>LD" in found.rules()
    assert EVERY - set(found.rules()) == {"fedlaw", "SV", "fedbn"} == set(found.left_out)
    assert "fedlaw is measured on the server's test set" in found.left_out["fedlaw"]


def test_a_network_of_one_layer_has_no_head_apart() -> None:
    found = load_comparison("quickstart", ["model.name=logistic"], ["all"])
    assert found.left_out["fedrep"] == (
        "algorithm.name: got 'fedrep' with a model of one layer, which is all head; allowed: two or more"
    )


RULES = ("feddisco", "q-fedavg", "fedce", "shapfed", "fedawa", "nvflare-adaptive(warmup=0,patience=1)")


def test_across_machines_policies_give_the_models_of_the_simulation(tmp_path: Path) -> None:
    """Label counts, losses before training, tests of models without a client, and the last layer, from nodes."""
    document = described(weighing={"criteria": ["DS"], "priority": "DS"}, rounds={"count": 3, "fraction": 1.0})
    document.pop("beside", None)
    document["beside"] = {name: {"policy": {"name": name}} for name in RULES[:-1]}
    document["beside"]["adaptive"] = {"policy": {"name": "nvflare-adaptive", "warmup": 0, "patience": 1}}
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 3, out=str(tmp_path / "federated"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    ours, theirs = weights(tmp_path / "simulated"), weights(tmp_path / "federated")
    assert set(ours) == set(theirs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    assert len({model.numpy().tobytes() for model in theirs.values()}) >= len(RULES)


def test_weights_that_do_not_sum_to_1_step_from_the_received_model(tmp_path: Path) -> None:
    """q-FedAvg's stored weights give the model back: Θ + Σ w(θ − Θ); with q = 0 it is the plain mean."""
    document = {
        "rounds": {"count": 1, "fraction": 1.0},
        "partition": {"clients": 4},
        "model": {"name": "logistic"},
        "weighing": {"policy": {"name": "q-fedavg", "q": 0}},
        "beside": {"equal": {"criteria": ["EQ"]}, "fair": {"policy": {"name": "q-fedavg", "q": 2.0}}},
    }
    folder = run(Experiment.model_validate(document), out=tmp_path / "run")
    states = History(folder).last_checkpoint()[0]
    torch.testing.assert_close(states["q-fedavg(q=0)"].parameters, states["equal"].parameters)
    clients = History(folder).clients
    sums = clients[clients["weight"].notna()].groupby("rule")["weight"].sum()
    assert sums["q-fedavg(q=0)"] == pytest.approx(1.0)
    assert 0 < sums["fair"] < 0.9
