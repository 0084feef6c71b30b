"""What a server can ask of a node: no code, path or kind of its own, no row or column apart, no few rows."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kit import assert_refused, named, refusal
from tests.rounds.scripted import Clients

from steelyard.base.errors import UserError
from steelyard.base.tallies import Leading, Tally, tallied
from steelyard.base.usercode import NotAllowed, only
from steelyard.clients.node import NodeConfig
from steelyard.experiment.node import EnoughRows
from steelyard.experiment.node_rows import own_seed
from steelyard.experiment.node_rules import agreed, check_own, public_error, public_reason
from steelyard.messages.updates import LossState, Question, Task


def document(**sections: Any) -> dict[str, Any]:
    return {
        "name": "hospitals",
        "data": {"source": "npz", "path": "own.npz", "classes": 2},
        "partition": {"scheme": "iid", "clients": 2, "minimum": 2, "test": "local"},
        "model": {"name": "logistic"},
        **sections,
    }


def config(tmp_path: Path, **more: Any) -> NodeConfig:
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "mine.npz", x=rng.normal(size=(20, 3)).astype("f4"), y=np.arange(20) % 2)
    return NodeConfig.read({"client": "a", "data": str(tmp_path / "mine.npz"), **more})


FIELDS = [
    # Reading the settings reads that table, so it must be refused before; who opens this one waits for ever.
    ("facts", {"facts": {"path": "PLACE/patients.csv"}}, "facts.path"),
    ("trace", {"rounds": {"select": {"path": "PLACE/secret.csv"}}}, "rounds.select.path"),
    ("attributes", {"data": {"source": "images", "path": "x", "attributes": "/etc/passwd"}}, "data.attributes"),
    ("kind", {"kind": "recommend", "interactions": {"path": "/etc/passwd"}}, "kind", "'recommend'"),
]


@pytest.mark.parametrize(("sections", "parts"), named((name, sections, parts) for name, sections, *parts in FIELDS))
def test_no_file_and_no_kind_of_the_servers_choice(tmp_path: Path, sections: dict[str, Any], parts: list[str]):
    os.mkfifo(tmp_path / "patients.csv")
    (tmp_path / "secret.csv").write_text("client,from,to\nalice,1,2\n")
    told = json.loads(json.dumps(sections).replace("PLACE", str(tmp_path)))
    assert_refused(lambda: agreed(told if "kind" in told else document(**told), config(tmp_path)), *parts)


def test_what_only_a_simulation_has_is_refused(tmp_path: Path):
    flawed = document(flaws=[{"kind": "reversed", "clients": ["client-000"]}])
    node = config(tmp_path)
    assert_refused(lambda: agreed(flawed, node), "flaws: given, but a server may not choose among the rows")
    clocked = agreed(document(clock={"deadline": 1.0}), node)
    assert_refused(clocked.check_federated, "clock: devices across machines take the time they take")


def test_data_come_from_the_nodes_own_config_alone(tmp_path: Path):
    assert agreed(document(), config(tmp_path)).data.path == tmp_path / "mine.npz"
    bare = NodeConfig.read({"client": "a"})
    included = {"source": "csv", "path": "included/../../../secret.csv", "labels": "y", "classes": 2}
    for data in ({"source": "npz", "path": "/etc/passwd"}, included):
        assert_refused(partial(agreed, document(data=data), bare), "data.path: a server may not name a file")


def train_as(sections: dict[str, Any], node: NodeConfig) -> None:
    """As the client app does it, up to a task."""
    with only(node.allow):
        agreed(sections, node).on_node(node).clients.train([Task("f", 0, 1, ("a",), torch.zeros(8))])


@pytest.mark.parametrize("code", ["os:system", "/usr/lib/python3.11/os.py:system", "mine.py:net"])
def test_code_that_the_server_names_is_not_run(tmp_path: Path, code: str):
    spy = tmp_path / "spy.py"
    spy.write_text(f"open({str(tmp_path / 'owned')!r}, 'w').write('x')\n")
    node = config(tmp_path)
    model = {"name": code, "arguments": {"command": f"touch {tmp_path}/owned"}}
    for sections, parts in (
        ({"model": model}, ("model.name", code)),
        ({"training": {"loss": f"{spy}:loss"}}, ("training.loss",)),
        ({"weighing": {"criteria": ["DS"], "plugins": [str(spy)]}}, ("plugin",)),
    ):
        assert_refused(partial(train_as, document(**sections), node), "is not run here", *parts)
    assert not (tmp_path / "owned").exists()


def test_what_the_owner_allows_by_name_is_run_and_code_of_that_name_is_the_nodes_own(tmp_path: Path):
    net = tmp_path / "net.py"
    net.write_text(
        "from torch import nn\n\n"
        "def network(feature_shape, outputs):\n    return nn.Linear(feature_shape[0], outputs)\n"
    )
    code = f"{net}:network"
    node = config(tmp_path, allow=[code])
    for theirs in (code, "/home/server/net.py:network", "steelyard_app.code.net:network"):
        sections = document(model={"name": theirs})
        train_as(sections, node)
        with only(node.allow):
            assert agreed(sections, node).model.name == code
    for other in (f"{net}:nn.Linear", "/home/server/net.py:spy"):
        assert_refused(partial(train_as, document(model={"name": other}), node), "model.name", "is not run here")


def noisy(noise: float, rounds: int = 10) -> dict[str, Any]:
    return document(
        privacy={"criteria": "public", "local": {"clip": 1.0, "noise": noise}},
        rounds={"count": rounds, "fraction": 1.0},
    )


def test_a_node_that_requires_noise_takes_part_in_no_experiment_without_it(tmp_path: Path):
    node = config(tmp_path, require="local", epsilon=8, state=str(tmp_path))
    central = {"central": {"clip": 1.0, "noise": 1.0, "references": {"DS": 10.0}}}
    for sections in ({}, {"privacy": central, "weighing": {"max_shares": 2.0}}):
        assert_refused(partial(agreed, document(**sections), node), "privacy.local: missing")
    assert_refused(partial(agreed, noisy(1e-3), node), "spends epsilon 5", "this node allows 8")


def test_a_node_reckons_for_itself_what_the_noise_tells(tmp_path: Path):
    """Four rounds with noise 2 are one with noise 1: ε = 4.3772 at δ = 1e-5."""
    node = config(tmp_path, require="local", epsilon=4.38, state=str(tmp_path))
    assert agreed(noisy(2.0, rounds=4), node).privacy is not None
    # Rules side by side ask for an update each: two in two rounds are four releases, in three they are six.
    beside = {"beside": {"EQ": {"criteria": ["EQ"]}}}
    assert agreed({**noisy(2.0, rounds=2), **beside}, node).privacy is not None
    # A criterion with noise is a release of its own: five instead of four.
    charged = noisy(2.0, rounds=4)
    charged["privacy"] |= {"criteria": "charged", "criteria_noise": 4.0, "criteria_bounds": {"DS": 100.0}}
    # A δ of the server's own choice changes nothing.
    loose = noisy(2.0, rounds=5)
    loose["privacy"]["budget"] = {"delta": 0.5}
    for asked, spent in (
        (charged, "epsilon 4.9"),
        (loose, "epsilon 4.9"),
        ({**noisy(2.0, rounds=3), **beside}, "over 3 rounds of 2 rules"),
    ):
        assert_refused(partial(agreed, asked, node), "this node allows 4.38", spent)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("could not convert string to float: 'Ada Lovelace, HIV positive'"), "ValueError"),
        (UserError("data.labels: got 'Ada Lovelace'; allowed: numbers"), "UserError: data.labels"),
        (UserError("/srv/secret.csv: line 1: root:x:0:0"), "UserError"),
        (NotAllowed("model.name: 'os:system' is not run here"), "NotAllowed: model.name: 'os:system' is not run here"),
    ],
)
def test_an_error_goes_back_as_class_and_field(error: Exception, words: str):
    assert public_error(error) == words
    assert public_reason(f"criterion FT failed: ValueError: {error}") == "criterion FT failed: ValueError"
    assert public_reason("no training samples") == "no training samples"


ROWS = 60


def own_file(folder: Path, rows: int = ROWS, name: str = "mine.npz", **more: Any) -> str:
    rng = np.random.default_rng(1)
    ssn = np.array([f"123-45-{number:04d}" for number in range(rows)])
    old = np.arange(rows) % 4 == 0
    arrays = {"x": rng.normal(size=(rows, 3)).astype("f4"), "y": np.arange(rows) % 2, "ssn": ssn, "old": old, **more}
    np.savez(folder / name, **arrays)
    return str(folder / name)


def node(folder: Path, **more: Any) -> NodeConfig:
    return NodeConfig.read({"client": "a", "data": own_file(folder), **more})


def asked(**sections: Any) -> dict[str, Any]:
    """Return an honest experiment with some fields of its sections changed."""
    usual = document(rounds={"count": 1, "fraction": 1.0}, training={"batch_size": 10, "learning_rate": 0.1})
    merged = {name: {**usual.get(name, {}), **part} for name, part in sections.items() if isinstance(part, dict)}
    return {**usual, **sections, **merged}


def hosted(own: NodeConfig, sections: dict[str, Any]) -> Any:
    """As the client app does it."""
    with only(own.allow):
        return agreed(sections, own).on_node(own)


def rows_of(made: Any) -> tuple[list[int], list[int]]:
    """The rows that the only client trains and tests on."""
    (rows,) = made.clients.clients.context.population(0).source.clients
    return rows.train.tolist(), rows.test.tolist()


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"data": {"share": 1e-9}}, ["data.share", "1e-09"]),
        ({"data": {"owner": "ssn"}}, ["data.owner", "'ssn'"]),
        ({"data": {"held_out": "old"}}, ["data.held_out", "'old'"]),
        ({"partition": {"validation": 0.1}}, ["partition.validation"]),
        ({"rounds": {"samples": True}}, ["rounds.samples"]),
        ({"flaws": [{"kind": "free-rider", "pick": "random", "count": 1}]}, ["flaws"]),
        ({"data": {"source": "csv", "path": "own.csv", "labels": "ssn"}}, ["data.source", "'csv'"]),
    ],
)
def test_what_chooses_rows_or_columns_is_refused(tmp_path: Path, sections: dict[str, Any], parts: list[str]):
    line = refusal(hosted, node(tmp_path), asked(**sections))
    assert line.startswith(f"{parts[0]}: ")
    assert parts[-1] in line
    assert "123-45" not in line


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**9),
    partition=st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 99),
            "test_fraction": st.floats(0.01, 0.99),
            "test": st.sampled_from(["local", "none"]),
            "minimum": st.integers(2, 50),
            "scheme": st.sampled_from(["iid", "natural", "shard", "dirichlet"]),
            "clients": st.integers(1, 40),
        },
    ),
)
def test_the_rows_are_the_same_whatever_is_asked(tmp_path: Path, seed: int, partition: dict[str, Any]):
    own = node(tmp_path)
    assert rows_of(hosted(own, {**asked(partition=partition), "seed": seed})) == rows_of(hosted(own, asked()))


def test_the_split_follows_from_the_file_or_is_the_owners(tmp_path: Path):
    own = node(tmp_path)
    usual = rows_of(hosted(own, asked()))
    other = NodeConfig.read({"client": "a", "data": own_file(tmp_path, name="other.npz", x=np.ones((ROWS, 3), "f4"))})
    assert own_seed(own) != own_seed(other)
    assert rows_of(hosted(other, asked())) != usual
    halved = node(tmp_path, partition={"test_fraction": 0.5, "seed": 3})
    assert len(rows_of(hosted(halved, asked()))[1]) == ROWS // 2
    held = node(tmp_path, data={"path": own_file(tmp_path), "source": "npz", "held_out": "old"})
    assert rows_of(hosted(held, asked(data={"held_out": "old"})))[1] == list(range(0, ROWS, 4))


def test_the_owners_reading_is_what_an_experiment_must_ask_for(tmp_path: Path):
    reading = {"path": own_file(tmp_path), "source": "npz", "labels": "old", "share": 0.5, "classes": 2}
    own, theirs = node(tmp_path, data=reading), {"labels": "old", "share": 0.5}
    assert len(hosted(own, asked(data=theirs)).names) == 1
    assert_refused(partial(hosted, own, asked(data={"share": 0.5})), "data.labels: got ")


def test_few_rows_give_no_introduction_and_the_owner_is_told(tmp_path: Path):
    few = {"client": "a", "data": own_file(tmp_path, rows=9)}
    assert_refused(partial(hosted, NodeConfig.read(few), asked()), "min-rows")
    assert hosted(NodeConfig.read({**few, "min-rows": 7}), asked()).names
    owners = np.array(["a"] * 50 + ["b"] * 10)
    data = {"path": own_file(tmp_path, owner=owners), "source": "npz"}
    made = hosted(NodeConfig.read({"clients": "a,b", "data": data}), asked())
    assert made.names == ("a",)
    assert made.notes == ("b takes no part: an update would rest on 8 rows, and min-rows is 10",)


def test_the_number_of_classes_does_not_rest_on_a_few_rows(tmp_path: Path):
    rare = np.where(np.arange(ROWS) < 3, 977, np.arange(ROWS) % 2)
    own = NodeConfig.read({"client": "a", "data": own_file(tmp_path, y=rare)})
    line = refusal(hosted, own, asked(data={"classes": None}))
    assert line.startswith("data.classes: missing")
    assert "97" not in line
    assert hosted(own, asked(data={"classes": 978})).about["classes"] == 978


SHARED = {"scheme": "iid", "clients": 2, "seed": 7}


def test_a_part_of_a_file_is_shared_out_as_the_nodes_file_says(tmp_path: Path):
    given = {"partition-id": 0, "num-partitions": 1, "data": own_file(tmp_path)}
    assert_refused(lambda: check_own(NodeConfig.read(given)), "node config partition.seed: missing")
    own = NodeConfig.read({**given, "partition": SHARED})
    check_own(own)
    assert hosted(own, asked(partition=SHARED)).names == ("client-000", "client-001")
    for field, value in {"clients": 20, "seed": 8, "samples": 12}.items():
        assert_refused(partial(hosted, own, asked(partition={**SHARED, field: value})), f"partition.{field}", value)
    natural = {"scheme": "natural", "clients": None}
    assert_refused(partial(hosted, own, asked(data={"owner": "ssn"}, partition=natural)), "data.owner", "'ssn'")


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"data": {"path": "x.npz", "labels": "y"}}, "data.source", "missing"),
        ({"data": "x.npz", "partition": {"samples": 3}}, "partition.samples", "no effect"),
        ({"data": "x.tsv", "kind": "recommend", "partition": {"seed": 1}}, "partition", "kind"),
    ],
)
def test_a_wrong_table_of_a_nodes_file_is_named_when_it_starts(given: dict[str, Any], field: str, value: str):
    assert_refused(lambda: check_own(NodeConfig.read({"client": "a", **given})), f"node config {field}: ", value)


def guarded(min_rows: int = 5, secret: int = 11, second: int = 3, **more: Any) -> tuple[EnoughRows, Clients]:
    """Clients a with nine test rows and b with few."""
    inner = Clients(("a", "b"), metrics=True)
    labels = {"a": [8, 8, 0], "b": [20, 4, 0]}
    return EnoughRows(inner, min_rows, secret, {"a": 9, "b": second}, labels, **more), inner


def task(*weights: float, seed: int = 1) -> Task:
    return Task("f", seed, 1, ("a", "b"), torch.zeros(10), LossState(class_weights=weights or None))


def test_class_weights_that_single_out_few_rows_get_no_update():
    """Two answers whose weights differ for one class differ by that class alone, whatever the weights are."""
    clients, inner = guarded()
    for weights, answering in (
        ((), ("a", "b")),
        ((2.0, 2.0, 9.0), ("a", "b")),  # Of the last class there are no rows.
        ((1.0, 0.0, 1.0), ("a",)),
        ((1.0, 1.001, 1.0), ("a",)),
    ):
        (updates,) = clients.train([task(*weights)])
        assert updates.clients == inner.tasks[-1].clients == answering
        assert len(updates.clients) + len(updates.failures) == 2


def test_class_weights_and_few_steps_do_not_single_out_a_row(tmp_path: Path):
    """Under weights of 0 for all classes but one, twelve rows may hold one of that class: its update is that row."""
    y = (np.arange(120) % 5 == 0).astype(int)
    own = NodeConfig.read({"client": "a", "data": own_file(tmp_path, rows=120, y=y)})
    for training, answers in (
        ({"updates": 12, "batch_size": 1}, False),
        ({"updates": 1, "batch_size": 12}, False),
        ({"epochs": 2, "batch_size": 8}, True),
    ):
        made = hosted(own, {**asked(), "training": training})
        for weights, answered in (((0.0, 1.0), answers), ((1.0, 1.0), True)):
            loss = LossState(class_weights=weights)
            (updates,) = made.clients.train([Task("f", 1, 1, ("a",), torch.zeros(8), loss)])
            assert updates.clients == (("a",) if answered else ())
            assert len(updates.failures) == 1 - answered


def test_small_test_sets_and_right_or_wrong_of_one_row_are_not_told():
    clients, inner = guarded()
    asked_for = Question("f", 1, 1, torch.eye(10)[:2])
    (answer,) = clients.evaluate([asked_for])
    assert (answer.clients, answer.samples.tolist(), answer.scores.tolist()) == (("a",), [3], [[0.5], [0.375]])
    assert {name: values.tolist() for name, values in answer.metrics.items()} == {"recall": [0.0]}
    assert [failure.client for failure in answer.failures] == ["b"]
    detailed = replace(asked_for, detailed=True)
    (answer,) = clients.evaluate([detailed])
    assert (answer.clients, answer.scores.shape, len(answer.failures), answer.right.size) == ((), (2, 0), 2, 0)
    assert not inner.questions[-1].detailed
    (answer,) = guarded(min_rows=1)[0].evaluate([detailed])
    assert (answer.clients, answer.right.size) == (("a", "b"), 2)


def test_sums_show_no_bin_of_scores_and_no_class_with_fewer_rows(monkeypatch: pytest.MonkeyPatch):
    chance = np.random.default_rng(3)
    labels = np.array([0] * 6 + [1] * 6 + [0] * 9 + [1] * 3)
    sites = np.repeat([0, 1], 12)
    cells = tallied(chance.normal(size=(24, 1)), labels, sites, 2)
    clients, inner = guarded(second=12)

    def evaluate(questions: list[Question]) -> list[Any]:
        return [replace(one, tallies=cells[None]) for one in Clients.evaluate(inner, questions)]

    monkeypatch.setattr(inner, "evaluate", evaluate)
    (answer,) = clients.evaluate([Question("f", 1, 1, torch.zeros(1, 10), measure=Leading("roc_auc"))])
    # Of b's twelve rows three are of one class, and five is the least.
    assert answer.clients == ("a",)
    assert answer.tallies is not None
    kept = Tally(answer.tallies[0, 0])
    for table in (kept.scores, kept.calibration[:, :2]):
        bins = table.sum(axis=(0, 1))
        assert bins.sum() == 12
        assert bins[bins > 0].min() >= 5
    assert kept.confusion.tolist() == Tally(cells[0]).confusion.tolist()


def test_what_is_drawn_follows_from_the_file_and_not_from_the_servers_seed_alone():
    (one, first), (other, second) = guarded(secret=11), guarded(secret=12)
    for clients in (one, other):
        clients.train([task(seed=1), task(seed=2), task(seed=1)])
        clients.evaluate([Question("f", 1, 1, torch.zeros(2, 10))])
    seeds = [asked.seed for asked in first.tasks]
    assert seeds[0] == seeds[2] == first.questions[0].seed  # The same again for the same seed, so that runs repeat.
    assert len({*seeds, *(asked.seed for asked in second.tasks), 1, 2}) == 6


def test_counts_of_labels_are_not_told_where_a_class_has_few_rows():
    clients, inner = guarded(counts_labels=True, second=9)
    (updates,) = clients.train([task()])
    assert updates.clients == inner.tasks[-1].clients == ("a",)
    assert [(failure.client, failure.reason[:12]) for failure in updates.failures] == [("b", "label counts")]
