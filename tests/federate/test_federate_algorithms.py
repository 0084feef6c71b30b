"""Algorithms whose clients correct, keep, send or count: across machines they give the model of the simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from tests.clients.flower.flower_fakes import FakeGrid
from tests.federate.small_experiment import weights
from tests.federate.test_federate_apps import described, grid_of

from steelyard.algorithms.fedprox import FedProx
from steelyard.algorithms.scaffold import CONTROL, Scaffold
from steelyard.clients.flower import tasks
from steelyard.clients.flower.forms import Refused
from steelyard.experiment.loading import build
from steelyard.experiment.node_rules import agreed_question, agreed_task
from steelyard.experiment.running import run
from steelyard.federate import client_app
from steelyard.federate.server_app import federate
from steelyard.messages import Question, Task
from steelyard.runs.reader import History
from steelyard.usercode import NotAllowed

ALGORITHMS = {
    "scaffold": {"name": "scaffold"},
    "fedprox": {"name": "fedprox", "mu": 0.5},
    "fednova": {"name": "fednova"},
    "feddyn": {"name": "feddyn", "alpha": 0.1},
}


def side_by_side(**sections: Any) -> dict[str, Any]:
    """All algorithms beside FedAvg; the fractions of clients, their momentum and their unequal sizes count in each."""
    beside = {name: {"criteria": ["DS"], "algorithm": algorithm} for name, algorithm in ALGORITHMS.items()}
    return described(
        **{
            "weighing": {"criteria": ["DS"], "priority": "DS"},
            "beside": beside,
            "training": {"batch_size": 150, "momentum": 0.5},
            "rounds": {"count": 3, "fraction": 0.7},
            **sections,
        }
    )


def assert_same_models(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    assert set(ours) == set(theirs)
    for name in ours:
        # A simulation may train clients in a stack and a node trains them singly: float32 sums in another order.
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_algorithms_give_the_models_of_the_simulation(tmp_path: Path):
    document = side_by_side(training={"batch_size": 150, "momentum": 0.5, "schedule": {"kind": "cosine"}})
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 3, fresh=True, out=str(tmp_path / "federated"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    assert_same_models(tmp_path / "simulated", tmp_path / "federated")
    found = weights(tmp_path / "federated")
    assert len({model.numpy().tobytes() for model in found.values()}) == 1 + len(ALGORITHMS)  # None is FedAvg.
    there = History(tmp_path / "federated")
    sent = there.clients.groupby("rule")["bytes"].min()
    assert sent["scaffold"] > 2 * 650 * 4 > sent["feddyn"] > 650 * 4  # SCAFFOLD alone sends a second vector.
    assert there.info["federation_notes"] == ""  # A first round is no loss.


def test_clients_across_machines_test_models_of_their_own(tmp_path: Path):
    names = ("local-only", "fine-tuned", "ditto", "apfl", "fedrep", "fedala")
    document = described(
        weighing={"criteria": ["DS"], "priority": "DS"},
        beside={name: {"criteria": ["DS"], "algorithm": {"name": name}} for name in names},
        model={"name": "mlp", "hidden": [6]},
        training={"batch_size": 150, "schedule": {"kind": "step", "every": 1, "factor": 0.5}},
        rounds={"count": 2, "fraction": 0.7},
    )
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 3, fresh=True, out=str(tmp_path / "federated"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    assert_same_models(tmp_path / "simulated", tmp_path / "federated")
    here, there = (History(tmp_path / name).evaluations for name in ("simulated", "federated"))
    order = ["rule", "round", "client"]
    here, there = here.sort_values(order), there.sort_values(order)
    assert here[order].to_numpy().tolist() == there[order].to_numpy().tolist()
    np.testing.assert_allclose(here["loss"], there["loss"], rtol=1e-4)
    last = here[here["round"] == 2].groupby("rule")["loss"].sum()
    assert last.nunique() == 1 + len(names)  # None of them tests what another tests.
    # The body of FedRep moves, its head stays at the clients.
    assert History(tmp_path / "federated").personal == frozenset(names)


def test_a_node_answers_a_question_with_the_algorithm_of_its_experiment_or_not_at_all():
    schedule = {"learning_rate": 1.0, "schedule": {"kind": "step", "every": 1, "factor": 0.5}}
    experiment = build(described(algorithm={"name": "ditto", "strength": 0.5}, training=schedule))
    asked = Question("f", 0, 3, torch.zeros(1, 2), rate=7.0)
    own = agreed_question(asked, {"name": "ditto", "strength": 0.5}, experiment)
    assert (own.algorithm.name, own.rate) == ("ditto", 0.25)
    assert agreed_question(asked, {}, experiment) is asked
    with pytest.raises(NotAllowed, match=r"algorithm: got .* allowed: as the experiment has it \(ditto\)"):
        agreed_question(asked, {"name": "fine-tuned"}, experiment)


@pytest.mark.parametrize("criterion", ["first", "labels", "steps"])
def test_what_criteria_of_the_server_need_of_clients_travels(tmp_path: Path, criterion: str):
    plugin = tmp_path / "measures.py"
    plugin.write_text(
        "from steelyard import server_criterion\n"
        "@server_criterion('first', needs_first_losses=True)\n"
        "def first(view): return view.first_losses\n"
        "@server_criterion('labels', needs_label_counts=True)\n"
        "def labels(view): return (view.label_counts ** 2).sum(1) ** 0.5\n"
        "@server_criterion('steps')\n"
        "def steps(view): return view.steps.astype(float)\n"
    )
    rule = {"criteria": [criterion], "priority": criterion, "plugins": [str(plugin)]}
    document = described(weighing=rule, rounds={"count": 2, "fraction": 1.0})
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 2, out=str(tmp_path / "federated"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    here, there = History(tmp_path / "simulated").clients, History(tmp_path / "federated").clients
    assert here["weight"].nunique() > 2
    np.testing.assert_allclose(here["weight"], there["weight"], rtol=1e-6)
    assert_same_models(tmp_path / "simulated", tmp_path / "federated")


@pytest.mark.parametrize("name", ["fedprox", "feddyn"])
def test_algorithms_that_need_the_sum_alone_go_with_hidden_sums_and_robust_rules(tmp_path: Path, name: str):
    """Hidden sums round to fixed point, so a federation that hides is held to one in the open less closely."""
    rounds = {"count": 3, "fraction": 1.0}
    shared: dict[str, Any] = {"algorithm": ALGORITHMS[name], "rounds": rounds}
    robust = described(weighing={"criteria": ["DS"], "priority": "DS", "defence": {"rule": "median"}}, **shared)
    opened = described(weighing={"criteria": ["DS"], "priority": "DS"}, **shared)
    hidden = {**opened, "privacy": {"aggregation": {"kind": "secure"}}}
    for case, here, there, gap in (("robust", robust, robust, 1e-6), ("hidden", opened, hidden, 1e-4)):
        run(build(here), out=tmp_path / f"{case}-here")
        grid, config = grid_of(there, 3, out=str(tmp_path / f"{case}-there"))
        federate(grid, config, "1")  # type: ignore[arg-type]
        (ours,), (theirs,) = (weights(tmp_path / f"{case}-{where}").values() for where in ("here", "there"))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=gap)


class Mortal(FakeGrid):
    """The server dies in round 3, when every node has trained and kept what came of it."""

    def push_messages(self, messages: Any) -> list[str]:
        names = super().push_messages(messages)
        asked = [self.sent[name][0] for name in names]
        if any(
            message.metadata.group_id.startswith("3:") and message.metadata.message_type[:5] == "train"
            for message in asked
        ):
            for message in asked:
                self.nodes[message.metadata.dst_node_id](message)
            raise KeyboardInterrupt
        return names


@pytest.mark.parametrize("lost", [False, True])
def test_a_resumed_run_goes_on_from_what_clients_kept_or_notes_that_it_is_lost(tmp_path: Path, lost: bool):
    document = side_by_side(rounds={"count": 3, "fraction": 1.0})
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 2, fresh=True, out=str(tmp_path / "federated"))
    with pytest.raises(KeyboardInterrupt):
        federate(Mortal(grid.nodes), config, "1")  # type: ignore[arg-type]
    assert History(tmp_path / "federated").rounds["round"].max() == 2
    if lost:
        grid.nodes[41].context.state.clear()  # type: ignore[attr-defined]
    federate(FakeGrid(grid.nodes), {**config, "resume": True}, "2")  # type: ignore[arg-type]
    notes = History(tmp_path / "federated").info["federation_notes"]
    if not lost:
        assert_same_models(tmp_path / "simulated", tmp_path / "federated")
        assert notes == ""
        return
    for name, kept in (("scaffold", "control"), ("feddyn", "gradient")):
        for client in ("client-001", "client-003", "client-005"):
            assert f"round 3: client {client} of {name} lost what it kept ({kept}); it begins at 0" in notes
    assert "client-000" not in notes  # Its node kept what it had.
    assert "fedprox" not in notes  # Its clients keep nothing.
    ours, theirs = weights(tmp_path / "simulated"), weights(tmp_path / "federated")
    assert all(torch.isfinite(model).all() for model in theirs.values())
    assert not torch.allclose(ours["scaffold"], theirs["scaffold"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours["fedprox"], theirs["fedprox"], rtol=1e-5, atol=1e-6)


def test_a_second_run_on_warm_nodes_begins_with_nothing_kept(tmp_path: Path):
    document = side_by_side(rounds={"count": 2, "fraction": 1.0})
    grid, config = grid_of(document, 2, out=str(tmp_path / "first"))
    client_app._built.clear()
    federate(grid, config, "1")  # type: ignore[arg-type]
    federate(FakeGrid(grid.nodes), {**config, "out": str(tmp_path / "second")}, "2")  # type: ignore[arg-type]
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert all(torch.equal(first[name], second[name]) for name in first)


def task(**changes: Any) -> Task:
    return replace(Task("f", 0, 1, ("a",), torch.zeros(2), vectors={CONTROL: torch.ones(2)}), **changes)


def test_a_node_takes_algorithm_and_rate_from_the_experiment_and_not_from_the_message():
    schedule = {"learning_rate": 1.0, "schedule": {"kind": "step", "every": 1, "factor": 0.5}}
    experiment = build(described(algorithm={"name": "scaffold"}, training=schedule))
    named = {"name": "scaffold", "server_rate": 1.0}
    own = agreed_task(task(round=3, rate=7.0, algorithm=FedProx()), named, experiment)
    assert (own.algorithm, own.rate) == (Scaffold(), 0.25)
    for given, described_as, line in (
        (task(), {"name": "fedavg"}, "algorithm: got {'name': 'fedavg'}; allowed: as the experiment has it (scaffold)"),
        (task(), {**named, "server_rate": 2.0}, "algorithm: got"),
        (task(), {}, "algorithm: got {}"),
        (task(vectors={}), named, "vectors: got none; allowed with scaffold: control"),
        (task(vectors={"x": torch.ones(2)}), named, "vectors: got x; allowed with scaffold: control"),
        (task(round=0), named, "round: got 0; allowed: 1 to 3"),
        (task(round=-1000), named, "round: got -1000; allowed: 1 to 3"),
        (task(round=4), named, "round: got 4; allowed: 1 to 3"),
    ):
        with pytest.raises(NotAllowed) as caught:
            agreed_task(given, described_as, experiment)
        assert str(caught.value).startswith(line)


def test_a_node_refuses_a_vector_of_another_length():
    sent = task(algorithm=Scaffold(), vectors={CONTROL: torch.ones(3)})
    with pytest.raises(Refused, match=r"array vector/control: shape \(3,\); allowed: \(2,\)"):
        tasks.read_task(tasks.write_task(sent, ["a"], 1.0, tasks.pack_parameters(sent)))


def test_a_node_says_why_it_does_not_do_a_task_of_another_algorithm(tmp_path: Path):
    """A server that sends another algorithm than its experiment names, to nodes that read the experiment."""
    document = described(algorithm={"name": "fedprox", "mu": 0.5}, rounds={"count": 1, "fraction": 1.0})
    grid, config = grid_of(document, 2, out=str(tmp_path / "run"))
    honest = dict(grid.nodes)

    def tampered(message: Message) -> Any:
        form = message.content["form"]
        form["json"] = str(form["json"]).replace('"mu":0.5', '"mu":1e9')
        return honest[40](message)

    grid.nodes[40] = tampered
    federate(grid, config, "1")  # type: ignore[arg-type]
    failed = History(tmp_path / "run").clients.set_index("client")["failure"].dropna()
    assert sorted(failed.index) == ["client-000", "client-002", "client-004"]
    (reason,) = set(failed)
    assert reason.startswith(
        "its answer could not be read: NodeFault: NotAllowed: algorithm: got {'name': 'fedprox', 'mu': 1000000"
    )


ADAPTED = """
from torch import nn

class Adapted(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.base = nn.Linear(64, 6)
        self.base.requires_grad_(False)
        self.lora_A, self.lora_B, self.head = nn.Linear(64, 2, False), nn.Linear(2, 6, False), nn.Linear(6, classes)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        x = x.flatten(1)
        return self.head((self.base(x) + self.lora_B(self.lora_A(x))).tanh())
"""


def test_adapters_are_weighed_as_products_across_machines(tmp_path: Path):
    (tmp_path / "adapted.py").write_text(ADAPTED)
    document = described(
        model={"name": f"{tmp_path / 'adapted.py'}:Adapted"},
        algorithm={"name": "flexlora", "ranks": {"client-001": 1}},
        rounds={"count": 2},
    )
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 3, fresh=True, out=str(tmp_path / "federated"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    assert_same_models(tmp_path / "simulated", tmp_path / "federated")
    told = [History(tmp_path / folder).rounds["server_metrics"].iloc[-1] for folder in ("simulated", "federated")]
    ours, theirs = map(json.loads, told)
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert 0 < ours["product_error"] < ours["factor_error"]
