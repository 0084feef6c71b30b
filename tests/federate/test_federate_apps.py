"""The two Flower apps, joined without a network: the same weights, record and private states as a simulation."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from tests.clients.contract import ClientsContract, Make
from tests.clients.flower.flower_fakes import FakeGrid
from tests.federate.small_experiment import (
    SMALL,
    assert_same_weights,
    both,
    described,
    grid_of,
)
from tests.kit import assert_refused, changed
from tests.runs.contents import models

from steelyard.algorithms.fedprox import FedProx
from steelyard.algorithms.scaffold import CONTROL, Scaffold
from steelyard.clients.flower.tasks import read_question
from steelyard.clients.flower.wire import EVALUATE, RECORD_COLUMNS, split
from steelyard.clients.node import NodeConfig
from steelyard.clients.protocol import Clients, RemainingClients
from steelyard.experiment.loading import build
from steelyard.experiment.node_rules import agreed_question, agreed_task
from steelyard.experiment.running import run
from steelyard.federate.app_folder import experiment_of
from steelyard.federate.client_app import within
from steelyard.federate.server_app import clients_behind, federate
from steelyard.messages.updates import Question, Task
from steelyard.runs.history import History

ON_TWO = NodeConfig.read({"partition-id": 0, "num-partitions": 2})
ALGORITHMS = {
    "scaffold": {"name": "scaffold"},
    "fedprox": {"name": "fedprox", "mu": 0.5},
    "fednova": {"name": "fednova"},
    "feddyn": {"name": "feddyn", "alpha": 0.1},
}
BY_SIZE = {"criteria": ["DS"], "priority": "DS"}


class TestContract(ClientsContract):
    """Clients behind the two real apps."""

    seed = int(SMALL["seed"])

    @pytest.fixture
    def make(self) -> Make:
        def build() -> Clients:
            grid, config = grid_of(SMALL, nodes=2)
            return clients_behind(grid, experiment_of(config), "1")  # type: ignore[arg-type]

        return build

    @pytest.fixture
    def start(self) -> torch.Tensor:
        return 0.01 * torch.sin(torch.arange(650, dtype=torch.float32))


def side_by_side(**sections: Any) -> dict[str, Any]:
    """All algorithms beside FedAvg; the fractions of clients, their momentum and their unequal sizes count in each."""
    beside = {name: {"criteria": ["DS"], "algorithm": algorithm} for name, algorithm in ALGORITHMS.items()}
    training = {"batch_size": 150, "momentum": 0.5}
    return changed(described(weighing=BY_SIZE, beside=beside, training=training, rounds={"fraction": 0.7}), **sections)


class TestAsSimulated:
    """What a federation and a simulation of the same experiment give."""

    @pytest.mark.parametrize("nodes", [2, 6])
    def test_weights_and_records(self, tmp_path: Path, nodes: int) -> None:
        here, there, _ = both(tmp_path, described(beside={"fedavg": {"criteria": ["DS"]}}), nodes)
        assert here.clients["client"].tolist() == there.clients["client"].tolist()
        np.testing.assert_allclose(here.clients["weight"], there.clients["weight"], rtol=1e-6)
        np.testing.assert_allclose(here.evaluations["score"], there.evaluations["score"])
        assert (there.clients["bytes"] > 650 * 4).all()
        assert {*there.evaluations.columns, "metrics"} == RECORD_COLUMNS  # No metric may take one of these names.

    def test_algorithms_that_correct_keep_and_count(self, tmp_path: Path) -> None:
        _, there, _ = both(tmp_path, side_by_side(training={"schedule": {"kind": "cosine"}}), 3, fresh=True)
        found = {model.numpy().tobytes() for model in models(tmp_path / "federated").values()}
        assert len(found) == 1 + len(ALGORITHMS)  # None is FedAvg.
        sent = there.clients.groupby("rule")["bytes"].min()
        assert sent["scaffold"] > 2 * 650 * 4 > sent["feddyn"] > 650 * 4  # SCAFFOLD alone sends a second vector.
        assert there.info["federation_notes"] == ""  # A first round is no loss.

    def test_clients_that_test_models_of_their_own(self, tmp_path: Path) -> None:
        names = ("ditto", "fedrep")
        document = described(
            weighing=BY_SIZE,
            beside={name: {"criteria": ["DS"], "algorithm": {"name": name}} for name in names},
            model={"name": "mlp", "hidden": [6]},
            rounds={"count": 2, "fraction": 0.7},
        )
        histories = both(tmp_path, document, 3, fresh=True)
        order = ["rule", "round", "client"]
        here, there = (history.evaluations.sort_values(order) for history in histories[:2])
        np.testing.assert_allclose(here["loss"], there["loss"], rtol=1e-4)
        last = here[here["round"] == 2].groupby("rule")["loss"].sum()
        assert last.nunique() == 1 + len(names)  # None of them tests what another tests.
        assert histories[1].personal == frozenset(names)

    @pytest.mark.parametrize("criterion", ["first", "labels"])
    def test_what_criteria_of_the_server_need_of_clients(self, tmp_path: Path, criterion: str) -> None:
        plugin = tmp_path / "measures.py"
        plugin.write_text(
            "from steelyard import Needs, server_criterion\n"
            "@server_criterion('first', needs=Needs(models=True, first_losses=True))\n"
            "def first(view): return view.first_losses\n"
            "@server_criterion('labels', needs=Needs(models=True, label_counts=True))\n"
            "def labels(view): return (view.label_counts ** 2).sum(1) ** 0.5\n"
        )
        rule = {"criteria": [criterion], "priority": criterion, "plugins": [str(plugin)]}
        here, there, _ = both(tmp_path, described(weighing=rule, rounds={"count": 1, "fraction": 1.0}))
        assert here.clients["weight"].nunique() > 2
        np.testing.assert_allclose(here.clients["weight"], there.clients["weight"], rtol=1e-6)


class Mortal(FakeGrid):
    """The server dies in round 3, when every node has trained and kept what came of it."""

    def push_messages(self, messages: Any) -> list[str]:
        names = super().push_messages(messages)
        asked = [self.sent[name][0] for name in names]
        if any(one.metadata.group_id.startswith("3:") and one.metadata.message_type[:5] == "train" for one in asked):
            for message in asked:
                self.nodes[message.metadata.dst_node_id](message)
            raise KeyboardInterrupt
        return names


@pytest.mark.parametrize("lost", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_resumed_run_goes_on_from_what_clients_kept_or_notes_that_it_is_lost(tmp_path: Path, lost: bool) -> None:
    flaws = [{"kind": "own-model", "clients": ["client-000"]}]
    document = side_by_side(rounds={"count": 3, "fraction": 1.0}, flaws=flaws)
    run(build(document), out=tmp_path / "simulated")
    grid, config = grid_of(document, 2, fresh=True, out=str(tmp_path / "federated"))
    with pytest.raises(KeyboardInterrupt):
        federate(Mortal(grid.nodes), config, "1")  # type: ignore[arg-type]
    assert History(tmp_path / "federated").rounds["round"].max() == 2
    if lost:
        grid.nodes[41].context.state.clear()  # type: ignore[attr-defined]
    back = {90 + number: made for number, made in enumerate(grid.nodes.values())}  # The same nodes under other ids.
    federate(FakeGrid(back), {**config, "resume": True}, "2")  # type: ignore[arg-type]
    notes = History(tmp_path / "federated").info["federation_notes"]
    if not lost:
        assert_same_weights(tmp_path / "simulated", tmp_path / "federated", 1e-5, 1e-6)
        assert "lost" not in notes
        return
    for name, kept in (("scaffold", "control"), ("feddyn", "gradient")):
        assert f"round 3: client client-001 of {name} lost what it kept ({kept}); it begins at 0" in notes
    assert "client-000 of" not in notes  # Its node kept what it had.
    assert "fedprox" not in notes  # Its clients keep nothing.


def test_a_second_run_on_warm_nodes_begins_with_nothing_kept(tmp_path: Path) -> None:
    grid, config = grid_of(side_by_side(rounds={"count": 2, "fraction": 1.0}), 2, out=str(tmp_path / "first"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    federate(FakeGrid(grid.nodes), {**config, "out": str(tmp_path / "second")}, "2")  # type: ignore[arg-type]
    first, second = models(tmp_path / "first"), models(tmp_path / "second")
    assert all(torch.equal(first[name], second[name]) for name in first)


HALVED = {"learning_rate": 1.0, "schedule": {"kind": "step", "every": 1, "factor": 0.5}}
NAMED = {"name": "scaffold", "server_rate": 1.0}


class TestAgreement:
    """A node takes algorithm and rate from the experiment and not from the message."""

    def task(self, **changes: Any) -> Task:
        return replace(Task("f", 0, 1, ("a",), torch.zeros(2), vectors={CONTROL: torch.ones(2)}), **changes)

    def test_of_a_task(self) -> None:
        experiment = build(described(algorithm={"name": "scaffold"}, training=HALVED))
        own = agreed_task(self.task(round=3, rate=7.0, algorithm=FedProx()), NAMED, experiment)
        assert (own.algorithm, own.rate) == (Scaffold(), 0.25)
        for changes, said, parts in (
            ({}, {**NAMED, "server_rate": 2.0}, ("algorithm", "2.0", "(scaffold)")),
            ({"vectors": {}}, NAMED, ("vectors", "none", "control")),
            ({"vectors": {"x": torch.ones(2)}}, NAMED, ("vectors", "x", "control")),
            *(({"round": round}, NAMED, ("round", str(round), "1 to 3")) for round in (0, 4)),
        ):
            assert_refused(lambda c=changes, n=said: agreed_task(self.task(**c), n, experiment), *parts)

    def test_of_a_question(self) -> None:
        ditto = {"name": "ditto", "strength": 0.5}
        experiment = build(described(algorithm=ditto, training=HALVED))
        asked = Question("f", 0, 3, torch.zeros(1, 2), rate=7.0)
        own = agreed_question(asked, ditto, experiment)
        assert (own.algorithm.name, own.rate) == ("ditto", 0.25)
        assert agreed_question(asked, {}, experiment) is asked
        assert_refused(lambda: agreed_question(asked, {"name": "fine-tuned"}, experiment), "algorithm", "(ditto)")


STALE = {"kind": "stale", "clients": ["client-001"]}


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"flaws": [STALE]}, ("flaws", "'stale'", "rounds.fraction = 0.5")),
        ({"flaws": [{"kind": "alie", "clients": ["client-001"]}]}, ("flaws", "alie", "the updates of all others")),
    ],
)
def test_flaws_that_a_node_cannot_have_are_refused(sections: dict[str, Any], parts: tuple[str, ...]) -> None:
    experiment = build(described(**sections))
    assert_refused(lambda: experiment.on_node(ON_TWO), *parts)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({}, ("run config experiment", "not JSON")),
        ({"experiment": '{"rounds": {"count": 0}}'}, ("run config experiment", "rounds.count")),
        ({"experiment": "{}", "set": "'"}, ("run config set",)),
    ],
)
def test_a_wrong_run_config_is_named(config: dict[str, Any], parts: tuple[str, ...]) -> None:
    assert_refused(lambda: experiment_of(config), *parts)


def test_work_that_takes_too_long_gives_up_by_itself() -> None:
    with pytest.raises(TimeoutError, match=r"took longer than the 0.1 s that the server waits"):
        within(0.1, lambda: time.sleep(5))
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)
    assert within(5, lambda: 7) == 7


def test_what_an_experiment_says_of_the_data_is_not_for_nodes_to_say() -> None:
    assert dict(build({}).about_data()) == {"classes": 10, "features": [1, 8, 8]}
    own = {"data": {"source": "npz", "path": "x.npz", "classes": 7}, "partition": {"scheme": "natural"}}
    assert dict(build(own).about_data()) == {"classes": 7}


def test_a_run_that_was_stopped_before_its_first_round_is_resumed_by_starting_it(tmp_path: Path) -> None:
    grid, config = grid_of(described(rounds={"count": 1}), 2, out=str(tmp_path / "run"), resume=True)
    assert History(federate(grid, config, "1")).info["status"] == "finished"  # type: ignore[arg-type]


@pytest.mark.parametrize("withdrawn", [("client-001",), ("client-001", "client-003", "client-005")])
def test_who_has_withdrawn_does_nothing_and_nodes_hear_no_more_than_that(
    tmp_path: Path, withdrawn: tuple[str, ...]
) -> None:
    """Node 41 holds clients 1, 3 and 5. A floor may name one of those, and one that may come later."""
    rounds = {"count": 2, "fraction": 1.0, "withdrawn": list(withdrawn)}
    floors = {"client-001": 0.1, "client-later": 0.1}
    grid, config = grid_of(described(rounds=rounds, weighing={"floors": floors}), 2, out=str(tmp_path / "run"))
    asked: dict[int, set[str]] = {40: set(), 41: set()}

    def look(question: Message, answer: Message) -> list[Message]:
        if question.metadata.message_type == EVALUATE:
            asked[question.metadata.dst_node_id] |= set(read_question(question.content)[0].withdrawn)
            assert not set(withdrawn) & set(json.loads(str(split(answer.content)[0]))["clients"])
        return [answer]

    grid.tamper = look
    assert History(federate(grid, config, "1")).info["status"] == "finished"  # type: ignore[arg-type]
    assert asked == {40: set(), 41: set(withdrawn) if len(withdrawn) == 1 else set()}
    types = [message.metadata.message_type for message, _ in grid.sent.values() if message.metadata.dst_node_id == 41]
    assert (EVALUATE in types) is (len(withdrawn) == 1)


def test_what_is_noted_of_nodes_is_still_heard_where_some_clients_have_withdrawn() -> None:
    grid, config = grid_of(described(), 2)
    clients = clients_behind(grid, experiment_of(config), "1")  # type: ignore[arg-type]
    clients.roster.note("node 7 was not admitted")
    assert RemainingClients(clients, ["client-001"]).notes == ["node 7 was not admitted"]
