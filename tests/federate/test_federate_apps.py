"""The two Flower apps, joined without a network: the same weights, record and private states as a simulation."""

from __future__ import annotations

import errno
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from flwr.app import Error, Message
from tests.clients.contract import ClientsContract, Make
from tests.clients.flower.flower_fakes import FakeGrid
from tests.federate.small_experiment import (
    SMALL,
    assert_same_weights,
    both,
    described,
    federated,
    forget,
    grid_of,
    node,
    weights,
)
from tests.kit import assert_refused, changed

from steelyard.algorithms.fedprox import FedProx
from steelyard.algorithms.scaffold import CONTROL, Scaffold
from steelyard.clients.flower.checks import RECORD_COLUMNS
from steelyard.clients.flower.forms import EVALUATE, INTRODUCE
from steelyard.clients.node import NodeConfig
from steelyard.clients.protocol import Clients
from steelyard.errors import UserError
from steelyard.experiment.loading import build, read_experiment
from steelyard.experiment.node_rules import agreed_question, agreed_task
from steelyard.experiment.running import run
from steelyard.federate import server_app
from steelyard.federate.client_app import within
from steelyard.federate.outcomes import read_outcome
from steelyard.federate.run_config import experiment_of, experiment_text
from steelyard.federate.server_app import clients_behind, federate
from steelyard.messages import Question, Task
from steelyard.runs import tensor_files
from steelyard.runs.reader import History

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
        assert (there.info["clients"], there.info["federation_run"]) == ("flower", "77")

    def test_online_adjustment_and_the_adaptive_loss(self, tmp_path: Path) -> None:
        document = described(
            partition={"server": "fraction", "server_fraction": 0.2},
            training={"learning_rate": 1.0},  # Large steps, so that the accuracy also falls and other orders are tried.
            rounds={"count": 6, "fraction": 0.5},
            weighing={"adjust": {"strategy": "online"}},
            beside={"adafed": {"criteria": ["VP"], "when_zero": "keep", "loss": {"adapt": "class-f1"}}},
        )
        # Steps of 1.0 over six rounds enlarge what float32 sums in another order differ by.
        histories = both(tmp_path, document, rtol=1e-3, atol=1e-4)
        here, there = (history.rounds for history in histories[:2])
        assert there["tests"].sum() > 0  # Several candidate models went out in one question.
        assert here["tests"].tolist() == there["tests"].tolist()
        assert here["priority"].tolist() == there["priority"].tolist()
        assert there["loss"].nunique() > 5  # κ changed from round to round and reached the nodes.

    def test_fitted_weights_and_the_server_alone(self, tmp_path: Path) -> None:
        document = described(
            partition={"server": "fraction", "server_fraction": 0.2},
            weighing={"criteria": ["EQ"], "priority": "EQ", "fit": {"steps": 3}},
            beside={"alone": {"trained_by": "server"}},
        )
        # The fit takes exponentials of float32 slopes, which differ in the last bits between stack and single clients.
        here, there, _ = both(tmp_path, document, rtol=1e-4)
        np.testing.assert_allclose(here.clients["weight"], there.clients["weight"], rtol=1e-4)
        assert set(there.clients["rule"]) == {"fitted(EQ)"}  # Nobody was asked for the other rule.

    def test_flawed_clients_and_one_with_a_model_of_its_own(self, tmp_path: Path) -> None:
        flaws = [
            {"kind": "labels-flipped", "pick": "biggest", "count": 1, "how": "pairs"},
            {"kind": "noisy", "pick": "random", "count": 1},
            {"kind": "stale", "pick": "random", "count": 1, "amount": 2, "among": "all"},
            {"kind": "free-rider", "pick": "random", "count": 1},
            {"kind": "claims-size", "pick": "random", "count": 1, "among": "all"},
        ]
        both(tmp_path / "flawed", described(flaws=flaws, rounds={"count": 4, "fraction": 1.0}), 3, fresh=True)
        own = [{"kind": "own-model", "clients": ["client-001"]}]
        _, _, grid = both(tmp_path / "own", described(flaws=own, rounds={"count": 3, "fraction": 1.0}), 3, fresh=True)
        states = [sorted(made.context.state) for made in grid.nodes.values()]  # type: ignore[attr-defined]
        assert states == [[], [f"steelyard/LD>DS>MD/{part}" for part in ("about", "tensors")], []]
        about = grid.nodes[41].context.state["steelyard/LD>DS>MD/about"]  # type: ignore[attr-defined]
        # As far back as a resume may go: to the checkpoint before the last.
        assert sorted(json.loads(about["states"])) == ["1", "2", "3"]

    def test_robust_rules_caps_and_hostile_clients(self, tmp_path: Path) -> None:
        equal: dict[str, Any] = {"criteria": ["EQ"]}
        rules: dict[str, Any] = {
            "plain": equal,
            "trimmed": {**equal, "defence": {"rule": "trimmed-mean", "mix": True}},
            "krum": {**equal, "defence": {"rule": "multi-krum"}},
            "clip": {**equal, "defence": {"rule": "clip", "smooth": 0.5}},
            "trust": {**equal, "defence": {"rule": "fltrust"}},
            "guarded": {"criteria": ["VP"], "score": "power", "max_shares": 2.0, "defence": {"rule": "centred-clip"}},
        }
        document = described(
            partition={"server": "fraction", "server_fraction": 0.2},
            rounds={"count": 2, "fraction": 1.0},
            flaws=[
                {"kind": "reversed", "amount": 10, "clients": ["client-001"]},
                {"kind": "backdoor", "clients": ["client-002"]},
                {"kind": "claims-size", "amount": 50, "clients": ["client-002"]},
            ],
            beside=rules,
        )
        here, there, _ = both(tmp_path, document, rtol=1e-4, atol=1e-5)
        models = {model.numpy().tobytes() for model in weights(tmp_path / "federated").values()}
        assert len(models) == 1 + len(rules)  # None of them can have been left out.
        assert there.clients.groupby("rule")["weight"].max()["guarded"] <= 2 / 6 + 1e-12
        np.testing.assert_allclose(here.evaluations["backdoor"], there.evaluations["backdoor"], atol=1e-9)

    def test_algorithms_that_correct_keep_and_count(self, tmp_path: Path) -> None:
        _, there, _ = both(tmp_path, side_by_side(training={"schedule": {"kind": "cosine"}}), 3, fresh=True)
        models = {model.numpy().tobytes() for model in weights(tmp_path / "federated").values()}
        assert len(models) == 1 + len(ALGORITHMS)  # None is FedAvg.
        sent = there.clients.groupby("rule")["bytes"].min()
        assert sent["scaffold"] > 2 * 650 * 4 > sent["feddyn"] > 650 * 4  # SCAFFOLD alone sends a second vector.
        assert there.info["federation_notes"] == ""  # A first round is no loss.

    def test_clients_that_test_models_of_their_own(self, tmp_path: Path) -> None:
        names = ("fine-tuned", "ditto", "fedrep", "fedala")
        document = described(
            weighing=BY_SIZE,
            beside={name: {"criteria": ["DS"], "algorithm": {"name": name}} for name in names},
            model={"name": "mlp", "hidden": [6]},
            training={"batch_size": 150, "schedule": {"kind": "step", "every": 1, "factor": 0.5}},
            rounds={"count": 2, "fraction": 0.7},
        )
        histories = both(tmp_path, document, 3, fresh=True)
        order = ["rule", "round", "client"]
        here, there = (history.evaluations.sort_values(order) for history in histories[:2])
        assert here[order].to_numpy().tolist() == there[order].to_numpy().tolist()
        np.testing.assert_allclose(here["loss"], there["loss"], rtol=1e-4)
        last = here[here["round"] == 2].groupby("rule")["loss"].sum()
        assert last.nunique() == 1 + len(names)  # None of them tests what another tests.
        assert histories[1].personal == frozenset(names)

    @pytest.mark.parametrize("criterion", ["first", "labels", "steps"])
    def test_what_criteria_of_the_server_need_of_clients(self, tmp_path: Path, criterion: str) -> None:
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
        here, there, _ = both(tmp_path, described(weighing=rule, rounds={"count": 1, "fraction": 1.0}))
        assert here.clients["weight"].nunique() > 2
        np.testing.assert_allclose(here.clients["weight"], there.clients["weight"], rtol=1e-6)

    def test_an_algorithm_that_needs_the_sum_alone_with_hidden_sums_and_a_robust_rule(self, tmp_path: Path) -> None:
        shared = described(algorithm=ALGORITHMS["feddyn"], rounds={"count": 2, "fraction": 1.0}, weighing=BY_SIZE)
        both(tmp_path / "robust", changed(shared, weighing={"defence": {"rule": "median"}}), 3)
        federated(tmp_path / "open", shared, 3)
        federated(tmp_path / "hidden", changed(shared, privacy={"aggregation": {"kind": "secure"}}), 3)
        # Hidden sums round to fixed point, so a federation that hides is held to one in the open less closely.
        assert_same_weights(tmp_path / "open", tmp_path / "hidden", 1e-5, 1e-4)

    def test_adapters_are_weighed_as_products(self, tmp_path: Path) -> None:
        (tmp_path / "adapted.py").write_text(ADAPTED)
        document = described(
            model={"name": f"{tmp_path / 'adapted.py'}:Adapted"},
            algorithm={"name": "flexlora", "ranks": {"client-001": 1}},
            rounds={"count": 2},
        )
        histories = both(tmp_path, document, 3, fresh=True)
        ours, theirs = (json.loads(found.rounds["server_metrics"].iloc[-1]) for found in histories[:2])
        assert ours == pytest.approx(theirs, rel=1e-3)
        assert 0 < ours["product_error"] < ours["factor_error"]

    def test_several_labels(self, tmp_path: Path) -> None:
        here, there, _ = both(tmp_path, described(**labels(tmp_path), rounds={"count": 1, "fraction": 0.5}))
        assert here.clients["client"].tolist() == there.clients["client"].tolist()
        np.testing.assert_allclose(here.clients["weight"], there.clients["weight"], rtol=1e-5)
        assert here.clients["weight"].nunique() > 2  # What the clients' tests say counts in the weights.
        np.testing.assert_allclose(here.evaluations["score"], there.evaluations["score"], rtol=1e-5)
        assert here.evaluations["score"].nunique() > 2


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


def labels(folder: Path) -> dict[str, Any]:
    """A table with three columns of labels, one of them in words."""
    x, y = np.random.default_rng(2).normal(size=(2, 300))
    columns = {"fever": np.where(x > 0, "yes", "no"), "cough": (y > 0.5).astype(int), "rash": (x + y > 1).astype(int)}
    pandas.DataFrame({"x": x, "y": y, **columns}).to_csv(folder / "t.csv", index=False)
    data = {"source": "csv", "path": str(folder / "t.csv"), "task": "multi-label", "labels": "fever"}
    return {
        "data": {**data, "further_labels": ["cough", "rash"]},
        "partition": {"scheme": "iid", "server": "fraction", "server_fraction": 0.2},
        "model": {"name": "mlp", "hidden": [6]},
        "weighing": {"criteria": ["DS", "VL"], "priority": "VL>DS"},
    }


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


@pytest.mark.parametrize("lost", [False, True])
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
        for client in ("client-001", "client-003", "client-005"):
            assert f"round 3: client {client} of {name} lost what it kept ({kept}); it begins at 0" in notes
    assert "client-000 of" not in notes  # Its node kept what it had.
    assert "fedprox" not in notes  # Its clients keep nothing.
    ours, theirs = weights(tmp_path / "simulated"), weights(tmp_path / "federated")
    assert all(torch.isfinite(model).all() for model in theirs.values())
    assert not torch.allclose(ours["scaffold"], theirs["scaffold"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours["fedprox"], theirs["fedprox"], rtol=1e-5, atol=1e-6)


def test_a_second_run_on_warm_nodes_begins_with_nothing_kept(tmp_path: Path) -> None:
    forget()
    grid, config = grid_of(side_by_side(rounds={"count": 2, "fraction": 1.0}), 2, out=str(tmp_path / "first"))
    federate(grid, config, "1")  # type: ignore[arg-type]
    federate(FakeGrid(grid.nodes), {**config, "out": str(tmp_path / "second")}, "2")  # type: ignore[arg-type]
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
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
            ({}, {"name": "fedavg"}, ("algorithm", "{'name': 'fedavg'}", "(scaffold)")),
            ({}, {**NAMED, "server_rate": 2.0}, ("algorithm",)),
            ({}, {}, ("algorithm", "{}")),
            ({"vectors": {}}, NAMED, ("vectors", "none", "control")),
            ({"vectors": {"x": torch.ones(2)}}, NAMED, ("vectors", "x", "control")),
            *(({"round": round}, NAMED, ("round", str(round), "1 to 3")) for round in (0, 4, -1000)),
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

    def test_a_node_says_why_it_does_not_do_a_task_of_another_algorithm(self, tmp_path: Path) -> None:
        """A server that sends another algorithm than its experiment names, to nodes that read the experiment."""
        document = described(algorithm={"name": "fedprox", "mu": 0.5}, rounds={"count": 1, "fraction": 1.0})
        grid, config = grid_of(document, 2, out=str(tmp_path / "run"))
        honest = grid.nodes[40]

        def tampered(message: Message) -> Any:
            form = message.content["form"]
            form["json"] = str(form["json"]).replace('"mu":0.5', '"mu":1e9')
            return honest(message)

        grid.nodes[40] = tampered
        federate(grid, config, "1")  # type: ignore[arg-type]
        failed = History(tmp_path / "run").clients.set_index("client")["failure"].dropna()
        assert sorted(failed.index) == ["client-000", "client-002", "client-004"]
        (reason,) = set(failed)
        assert "NotAllowed: algorithm: got {'name': 'fedprox', 'mu': 1000000" in reason


def test_without_a_share_the_clients_that_came_decide_and_the_run_records_it(tmp_path: Path) -> None:
    flaws = [{"kind": "stale", "clients": ["client-001"]}]  # needs every client in every round
    there, _ = federated(tmp_path / "run", {**described(flaws=flaws), "rounds": {"count": 2}})
    assert there.rounds["answered"].tolist()[1:] == [6, 6]
    assert read_experiment(tmp_path / "run").rounds.fraction == 1.0


STALE = {"kind": "stale", "clients": ["client-001"]}


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"flaws": [STALE]}, ("flaws", "'stale'", "rounds.fraction = 0.5")),
        ({"flaws": [{"kind": "copy", "of": "client-000"}, STALE], "rounds": None}, ("flaws", "'stale'", "not given")),
        *(
            ({"flaws": [{"kind": kind, "clients": ["client-001"]}]}, ("flaws", kind, "the updates of all others"))
            for kind in ("alie", "ipm", "min-max")
        ),
    ],
)
def test_flaws_that_a_node_cannot_have_are_refused(sections: dict[str, Any], parts: tuple[str, ...]) -> None:
    experiment = build(described(**sections))
    assert_refused(lambda: experiment.on_node(ON_TWO), *parts)


def test_a_server_without_data_needs_none_and_nodes_with_files_have_no_flaws(tmp_path: Path) -> None:
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
    own = [{"client": name, "data": str(tmp_path / f"{name}.npz")} for name in ("north", "south")]
    federate(FakeGrid({i: node(one, config) for i, one in enumerate(own, 2)}), config, "1")  # type: ignore[arg-type]
    history = History(tmp_path / "run")
    assert sorted(set(history.clients["client"])) == ["north", "south"]
    assert history.clients["samples"].tolist() == [32, 32, 32, 32]
    flawed = build({**document, "flaws": [{"kind": "free-rider", "pick": "random", "count": 1}]})
    assert_refused(lambda: flawed.on_node(NodeConfig.read(own[0])), "flaws", "got 1", "data of its own")


class TestRunConfig:
    """What the SuperLink hands to the apps."""

    def test_changes_travel_in_it(self) -> None:
        config = {"experiment": experiment_text(build(SMALL)), "set": "rounds.count=9 'description=two words'"}
        experiment = experiment_of(config)
        assert (experiment.rounds.count, experiment.description) == (9, "two words")

    @pytest.mark.parametrize(
        ("config", "parts"),
        [
            ({}, ("run config experiment", "not JSON")),
            ({"experiment": "[]"}, ("run config experiment", "not a JSON object")),
            ({"experiment": '{"rounds": {"count": 0}}'}, ("run config experiment", "rounds.count")),
            ({"experiment": "{}", "set": "rounds"}, ("--set", "'rounds'")),
            ({"experiment": "{}", "set": "'"}, ("run config set",)),
        ],
    )
    def test_a_wrong_one_is_named(self, config: dict[str, Any], parts: tuple[str, ...]) -> None:
        assert_refused(lambda: experiment_of(config), *parts)


def test_work_that_takes_too_long_gives_up_by_itself() -> None:
    with pytest.raises(TimeoutError, match=r"took longer than the 0.1 s that the server waits"):
        within(0.1, lambda: time.sleep(5))
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)
    assert within(5, lambda: 7) == 7


def test_what_an_experiment_says_of_the_data_is_not_for_nodes_to_say() -> None:
    def about(**data: Any) -> dict[str, Any]:
        return dict(build({"data": data, "partition": {"scheme": "natural"}}).about_data())

    assert dict(build({}).about_data()) == {"classes": 10, "features": [1, 8, 8]}
    assert about(source="npz", path="x.npz", classes=7) == {"classes": 7}
    assert about(source="npz", path="x.npz", task="regression") == {"classes": 0}


class TestRecords:
    """Everything is recorded: faults of tests as those of training, why a run stopped, what was noted."""

    def test_faults_of_tests_and_notes_of_nodes_while_the_run_goes_on(self, tmp_path: Path) -> None:
        grid, config = grid_of(described(rounds={"count": 2, "fraction": 1.0}), 2, out=str(tmp_path / "run"))
        first, second = grid.nodes.values()
        noted: list[str] = []

        def answer(message: Message) -> Any:
            tested, about = message.metadata.message_type == EVALUATE, message.metadata.group_id
            if about.startswith("1:"):
                grid.nodes[99] = lambda m: Error(2, "UserError: x") if m.metadata.message_type == INTRODUCE else None
            if about.startswith("2:") and tested:
                noted.append(History(tmp_path / "run").info["federation_notes"])  # The last round is not stored yet.
            return first(message)

        grid.nodes[40] = answer
        grid.nodes[41] = lambda m: Error(2, "ValueError") if m.metadata.message_type == EVALUATE else second(m)
        history = History(federate(grid, config, "1"))  # type: ignore[arg-type]
        assert "round 1: node 99 was not admitted: raised an error: UserError: x" in noted[0]
        assert history.untested["round"].tolist() == [0] * 3 + [1] * 3 + [2] * 3
        assert set(history.untested["client"]) == {"client-001", "client-003", "client-005"}
        assert set(history.untested["failure"]) == {"raised an error: ValueError"}
        assert history.clients["failure"].isna().all()  # Their training was fine.

    def test_why_a_run_stopped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(path: Path, *rest: Any) -> Any:
            if "round-000002" in path.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(path, *rest)

        write = tensor_files.write_tensors
        monkeypatch.setattr(tensor_files, "write_tensors", full)
        with pytest.raises(UserError, match=r"round 2 .*: No space left on device; .*`steelyard resume"):
            run(build(SMALL), out=tmp_path / "run")
        history = History(tmp_path / "run")
        assert history.info["status"] == "stopped"
        assert "No space left on device" in history.info["stopped"]
        assert history.rounds["round"].tolist() == [0, 1]

    def test_a_run_that_was_stopped_before_its_first_round_is_resumed_by_starting_it(self, tmp_path: Path) -> None:
        grid, config = grid_of(described(rounds={"count": 1}), 2, out=str(tmp_path / "run"), resume=True)
        assert History(federate(grid, config, "1")).info["status"] == "finished"  # type: ignore[arg-type]

    def test_an_app_that_a_signal_of_flowers_ends_was_stopped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def ended(*_: object) -> Path:
            raise SystemExit(0)

        monkeypatch.setattr(server_app, "federate", ended)
        monkeypatch.setattr(server_app, "_print_into", lambda file: None)
        context: Any = SimpleNamespace(run_config={"report": str(tmp_path)}, run_id=1)
        with pytest.raises(SystemExit):
            server_app.main(context, context)
        outcome = read_outcome(tmp_path)
        assert (outcome["status"], outcome["line"]) == ("stopped", "the SuperLink stopped this run (`flwr stop`?)")
