"""The two Flower apps, joined without a network: the same weights, record and private states as a simulation."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from tests.clients.flower.flower_fakes import FakeGrid
from tests.federate.small_experiment import SMALL, assert_same_weights, weights

from steelyard.clients.flower.adapter.messages import enter_run
from steelyard.clients.flower.checks import RECORD_COLUMNS
from steelyard.clients.node import NodeConfig
from steelyard.errors import UserError
from steelyard.experiment.loading import build, read_experiment
from steelyard.experiment.running import run
from steelyard.federate import client_app
from steelyard.federate.client_app import app, within
from steelyard.federate.run_config import experiment_of, experiment_text
from steelyard.federate.server_app import federate
from steelyard.runs.reader import History

enter_run(1, 1)

BUSY = threading.Lock()


def described(**sections: Any) -> dict[str, Any]:
    return {
        name: {**SMALL.get(name, {}), **value} if isinstance(value, dict) else value
        for name, value in {**SMALL, **sections}.items()
    }


def node(config: dict[str, Any], run_config: dict[str, Any], fresh: bool = False) -> Any:
    """A node that runs the real ClientApp, with a state of its own."""
    own = {"allow": "*", **config}  # The federation is our own; what a node's own rules refuse is tested apart.
    context = Context(run_id=1, node_id=1, node_config=own, state=RecordDict(), run_config=run_config)

    def answer(message: Message) -> Any:
        with BUSY:  # The clients of a node are made for one message at a time.
            if fresh:
                client_app._built.clear()  # As on a real node: every message is a process of its own.
            return app(message, context).content

    answer.context = context  # type: ignore[attr-defined]
    return answer


def grid_of(document: dict[str, Any], nodes: int, fresh: bool = False, **extra: Any) -> tuple[FakeGrid, dict[str, Any]]:
    document = {**document, "federate": {"nodes": nodes, "timeout": 60.0}}
    config = {"experiment": experiment_text(build(document)), "set": "", **extra}
    made = {40 + i: node({"partition-id": i, "num-partitions": nodes}, config, fresh) for i in range(nodes)}
    return FakeGrid(made), config


@pytest.mark.parametrize("nodes", [2, 6])
def test_a_federation_gives_the_weights_of_the_simulation(tmp_path: Path, nodes: int):
    document = described(beside={"fedavg": {"criteria": ["DS"]}})
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, nodes, out=str(tmp_path / "federated"))
    folder = federate(grid, config, "77")  # type: ignore[arg-type]
    first, second = weights(tmp_path / "simulated"), weights(tmp_path / "federated")
    assert set(first) == set(second) == {"LD>DS>MD", "fedavg"}
    for name in first:
        # A simulation may train clients in a stack and a node trains them singly: float32 sums in another order.
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-6)
    here, there = History(tmp_path / "simulated"), History(tmp_path / "federated")
    assert here.clients["client"].tolist() == there.clients["client"].tolist()
    np.testing.assert_allclose(here.clients["weight"], there.clients["weight"], rtol=1e-6)
    np.testing.assert_allclose(here.evaluations["score"], there.evaluations["score"])
    assert (there.clients["bytes"] > 650 * 4).all()
    assert {*there.evaluations.columns, "metrics"} == RECORD_COLUMNS  # No metric may take one of these names.
    assert there.info["clients"] == "flower"
    assert there.info["federation_run"] == "77"
    assert folder == tmp_path / "federated"


def test_online_adjustment_and_the_adaptive_loss_work_as_in_the_simulation(tmp_path: Path):
    document = described(
        partition={"server": "fraction", "server_fraction": 0.2},
        training={"learning_rate": 1.0},  # Large steps, so that the accuracy also falls and other orders are tried.
        rounds={"count": 6, "fraction": 0.5},
        weighing={"adjust": {"strategy": "online"}},
        beside={"adafed": {"criteria": ["VP"], "when_zero": "keep", "loss": {"adapt": "class-f1"}}},
    )
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 2, out=str(tmp_path / "federated"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    here, there = History(tmp_path / "simulated").rounds, History(tmp_path / "federated").rounds
    assert there["tests"].sum() > 0  # Several candidate models went out in one question.
    assert here["tests"].tolist() == there["tests"].tolist()
    assert here["priority"].tolist() == there["priority"].tolist()
    assert there["loss"].nunique() > 5  # κ changed from round to round and reached the nodes.
    for name, ours in weights(tmp_path / "simulated").items():
        # Steps of 1.0 over six rounds enlarge what float32 sums in another order differ by.
        torch.testing.assert_close(ours, weights(tmp_path / "federated")[name], rtol=1e-3, atol=1e-4)


def test_fitted_weights_and_the_server_alone_work_as_in_the_simulation(tmp_path: Path):
    document = described(
        partition={"server": "fraction", "server_fraction": 0.2},
        weighing={"criteria": ["EQ"], "priority": "EQ", "fit": {"steps": 3}},
        beside={"alone": {"trained_by": "server"}},
    )
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 2, out=str(tmp_path / "federated"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    here, there = History(tmp_path / "simulated").clients, History(tmp_path / "federated").clients
    # The fit takes exponentials of float32 slopes, which differ in the last bits between a stack and single clients.
    np.testing.assert_allclose(here["weight"], there["weight"], rtol=1e-4)
    assert set(there["rule"]) == {"fitted(EQ)"}  # Nobody was asked for the other rule.
    for name, ours in weights(tmp_path / "simulated").items():
        # As wide as the fitted weights above, which these models are combined with.
        torch.testing.assert_close(ours, weights(tmp_path / "federated")[name], rtol=1e-4, atol=1e-6)


def test_a_client_with_a_model_of_its_own_keeps_it_in_the_node_state(tmp_path: Path):
    document = described(flaws=[{"kind": "own-model", "clients": ["client-001"]}], rounds={"count": 3, "fraction": 1.0})
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 3, fresh=True, out=str(tmp_path / "federated"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    assert_same_weights(tmp_path / "simulated", tmp_path / "federated", rtol=1e-5, atol=1e-6)
    states = [made.context.state for made in grid.nodes.values()]  # type: ignore[attr-defined]
    assert [sorted(state) for state in states] == [
        [],
        [f"steelyard/LD>DS>MD/{part}" for part in ("about", "tensors")],
        [],
    ]
    # As far back as a resume may go: to the checkpoint before the last.
    assert sorted(json.loads(states[1]["steelyard/LD>DS>MD/about"]["states"])) == ["1", "2", "3"]


def test_flawed_clients_are_as_flawed_on_nodes_as_in_the_simulation(tmp_path: Path):
    flaws = [
        {"kind": "labels-flipped", "pick": "biggest", "count": 1, "how": "pairs"},
        {"kind": "noisy", "pick": "random", "count": 1},
        {"kind": "stale", "pick": "random", "count": 1, "amount": 2, "among": "all"},
        {"kind": "free-rider", "pick": "random", "count": 1},
        {"kind": "claims-size", "pick": "random", "count": 1, "among": "all"},
    ]
    document = described(flaws=flaws, rounds={"count": 4, "fraction": 1.0})
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 3, fresh=True, out=str(tmp_path / "federated"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    assert_same_weights(tmp_path / "simulated", tmp_path / "federated", rtol=1e-5, atol=1e-6)


def test_without_a_share_the_clients_that_came_decide_and_the_run_records_it(tmp_path: Path):
    flaws = [{"kind": "stale", "clients": ["client-001"]}]  # needs every client in every round
    document = {**described(flaws=flaws), "rounds": {"count": 2}}
    grid, config = grid_of(document, 2, out=str(tmp_path / "federated"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    assert History(tmp_path / "federated").rounds["answered"].tolist()[1:] == [6, 6]
    assert read_experiment(tmp_path / "federated").rounds.fraction == 1.0


def test_flaws_that_a_node_cannot_have_are_refused(tmp_path: Path):
    stale = build(described(flaws=[{"kind": "stale", "clients": ["client-001"]}], rounds={"fraction": 0.5}))
    with pytest.raises(UserError, match=r"flaws: got kind 'stale' with rounds.fraction = 0.5"):
        stale.on_node(NodeConfig.read({"partition-id": 0, "num-partitions": 2}))
    copied = [{"kind": "copy", "of": "client-000"}, {"kind": "stale", "clients": ["client-001"]}]
    unknown = {**described(flaws=copied), "rounds": {"count": 3}}
    with pytest.raises(UserError, match=r"flaws: got kind 'stale' with rounds.fraction not given"):
        build(unknown).on_node(NodeConfig.read({"partition-id": 0, "num-partitions": 2}))
    np.savez(tmp_path / "north.npz", x=np.eye(40, dtype=np.float32), y=np.arange(40) % 2)
    own = build(
        {
            "data": {"source": "npz", "path": "nowhere.npz", "classes": 2},
            "partition": {"scheme": "iid", "clients": 2},
            "model": {"name": "logistic"},
            "flaws": [{"kind": "free-rider", "pick": "random", "count": 1}],
        }
    )
    with pytest.raises(UserError, match="flaws: got 1 on a node with data of its own"):
        own.on_node(NodeConfig.read({"client": "north", "data": str(tmp_path / "north.npz")}))


def test_a_run_that_lost_its_nodes_is_resumed_to_the_same_weights(tmp_path: Path):
    document = described(flaws=[{"kind": "own-model", "clients": ["client-000"]}], rounds={"count": 4, "fraction": 1.0})
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 2, out=str(tmp_path / "federated"))
    client_app._built.clear()
    honest = dict(grid.nodes)

    def dies(message: Message) -> Any:
        if message.metadata.message_type.startswith("train") and message.metadata.group_id.startswith("3:"):
            honest[40](message)  # It trains, and the answer is lost with the server.
            raise KeyboardInterrupt
        return honest[40](message)

    class Mortal(FakeGrid):
        def push_messages(self, messages: Any) -> list[str]:
            names = super().push_messages(messages)
            for name in names:
                message = self.sent[name][0]
                if message.metadata.dst_node_id == 40:
                    dies(message) if message.metadata.group_id.startswith("3:") else None
            return names

    with pytest.raises(KeyboardInterrupt):
        federate(Mortal(honest), config, "1")  # type: ignore[arg-type]
    assert History(tmp_path / "federated").rounds["round"].max() == 2
    back = {90 + number: made for number, made in enumerate(honest.values())}  # The same nodes under other ids.
    federate(FakeGrid(back), {**config, "resume": True}, "2")  # type: ignore[arg-type]
    assert_same_weights(tmp_path / "simulated", tmp_path / "federated", rtol=1e-5, atol=1e-6)


def test_a_server_without_data_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    for name in ("north", "south"):
        x = rng.normal(size=(40, 5)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
    document = {
        "name": "two-hospitals",
        "data": {"source": "npz", "path": "nowhere.npz", "classes": 2},
        "partition": {"scheme": "iid", "clients": 2, "test": "local", "minimum": 2},
        "model": {"name": "logistic"},
        "rounds": {"count": 2, "fraction": 1.0},
        "compute": {"engine": "loop", "device": "cpu"},
        "federate": {"nodes": 2},
    }
    config = {"experiment": experiment_text(build(document)), "out": str(tmp_path / "run")}
    nodes = {
        i: node({"client": name, "data": str(tmp_path / f"{name}.npz"), "device-battery": 0.5}, config)
        for i, name in enumerate(("north", "south"), 2)
    }
    federate(FakeGrid(nodes), config, "1")  # type: ignore[arg-type]
    history = History(tmp_path / "run")
    assert sorted(set(history.clients["client"])) == ["north", "south"]
    assert history.clients["samples"].tolist() == [32, 32, 32, 32]


def test_changes_travel_in_the_run_config():
    config = {"experiment": experiment_text(build(SMALL)), "set": "rounds.count=9 'description=two words'"}
    experiment = experiment_of(config)
    assert (experiment.rounds.count, experiment.description) == (9, "two words")


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({}, "run config experiment: not JSON"),
        ({"experiment": "[]"}, "run config experiment: not a JSON object"),
        ({"experiment": '{"rounds": {"count": 0}}'}, "run config experiment: rounds.count"),
        ({"experiment": "{}", "set": "rounds"}, "--set: got 'rounds'"),
        ({"experiment": "{}", "set": "'"}, "run config set: "),
    ],
)
def test_a_wrong_run_config_is_named(config: dict[str, Any], line: str):
    with pytest.raises(UserError, match=re.escape(line)):
        experiment_of(config)


def test_work_that_takes_too_long_gives_up_by_itself():
    import time

    with pytest.raises(TimeoutError, match=r"took longer than the 0.1 s that the server waits"):
        within(0.1, lambda: time.sleep(5))
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)
    assert within(5, lambda: 7) == 7


def test_what_an_experiment_says_of_the_data_is_not_for_nodes_to_say():
    def about(**data: Any) -> dict[str, Any]:
        return dict(build({"data": data, "partition": {"scheme": "natural"}}).about_data())

    assert dict(build({}).about_data()) == {"classes": 10, "features": [1, 8, 8]}
    assert about(source="npz", path="x.npz", classes=7) == {"classes": 7}
    assert about(source="npz", path="x.npz") == {}
    assert about(source="npz", path="x.npz", task="regression") == {"classes": 0}
