"""What a server can ask of a node with a file of its own: the node's file decides which rows and columns answer."""

from __future__ import annotations

import csv
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.experiment.test_node_rules import document

from steelyard.clients.node import NodeConfig
from steelyard.errors import UserError
from steelyard.experiment.loading import read_document
from steelyard.experiment.node_rows import check_own, own_seed
from steelyard.experiment.node_rules import agreed
from steelyard.messages import LossState, Question, Task
from steelyard.usercode import NotAllowed, only

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
    ("sections", "field"),
    [
        ({"data": {"share": 1e-9}}, "data.share: got 1e-09"),
        ({"data": {"share": 0.5, "seed": 9}}, "data.share: got 0.5"),
        ({"data": {"owner": "ssn"}}, "data.owner: got 'ssn'"),
        ({"data": {"labels": "old"}}, "data.labels: got 'old'"),
        ({"data": {"features": "old"}}, "data.features: got 'old'"),
        ({"data": {"held_out": "old"}}, "data.held_out: got 'old'"),
        ({"data": {"marks": {"m": "old"}}}, "data.marks: "),
        ({"data": {"task": "regression", "classes": None}}, "data.task: got 'regression'"),
        ({"partition": {"validation": 0.1}}, "partition.validation: "),
        ({"rounds": {"samples": True}}, "rounds.samples: asks for an answer about each single row"),
        ({"flaws": [{"kind": "free-rider", "pick": "random", "count": 1}]}, "flaws: "),
        (
            {"data": {"source": "csv", "path": "own.csv", "labels": "ssn"}},
            "data.source: got 'csv', but this node's configuration does not name the columns",
        ),
    ],
)
def test_what_chooses_rows_or_columns_is_refused(tmp_path: Path, sections: dict[str, Any], field: str):
    with pytest.raises(NotAllowed) as caught:
        hosted(node(tmp_path), asked(**sections))
    assert str(caught.value).startswith(field)
    assert "123-45" not in str(caught.value)


@pytest.mark.parametrize(
    "sections",
    [{}, {"data": {"normalise": "standard"}}, {"data": {"labels": "y"}}, {"data": {"seed": 4}}],
)
def test_what_changes_no_row_is_answered(tmp_path: Path, sections: dict[str, Any]):
    train, test = rows_of(hosted(node(tmp_path), asked(**sections)))
    assert sorted(train + test) == list(range(ROWS))
    assert len(test) == ROWS // 5


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    assert (own_seed(own) == own_seed(other), rows_of(hosted(other, asked())) == usual) == (False, False)
    halved = node(tmp_path, partition={"test_fraction": 0.5, "seed": 3})
    assert len(rows_of(hosted(halved, asked()))[1]) == ROWS // 2
    untested = node(tmp_path, partition={"test": "none"})
    assert rows_of(hosted(untested, asked())) == (list(range(ROWS)), [])
    held = node(tmp_path, data={"path": own_file(tmp_path), "source": "npz", "held_out": "old"})
    assert rows_of(hosted(held, asked(data={"held_out": "old"})))[1] == list(range(0, ROWS, 4))


def test_the_owners_reading_is_what_an_experiment_must_ask_for(tmp_path: Path):
    reading = {"path": own_file(tmp_path), "source": "npz", "labels": "old", "share": 0.5, "classes": 2}
    own = node(tmp_path, data=reading)
    assert len(hosted(own, asked(data={"labels": "old", "share": 0.5})).names) == 1
    with pytest.raises(NotAllowed, match=r"^data\.labels: got nothing|^data\.labels: got None"):
        hosted(own, asked(data={"share": 0.5}))
    with pytest.raises(NotAllowed, match=r"^data\.seed: got 7"):
        hosted(own, asked(data={"labels": "old", "share": 0.5, "seed": 7}))


def test_too_few_rows_give_no_introduction(tmp_path: Path):
    few = NodeConfig.read({"client": "a", "data": own_file(tmp_path, rows=9)})
    with pytest.raises(NotAllowed, match=r"^min-rows: no client here has enough rows to train on"):
        hosted(few, asked())
    assert hosted(NodeConfig.read({"client": "a", "data": own_file(tmp_path, rows=9), "min-rows": 7}), asked()).names


def test_a_client_of_few_rows_is_left_out_and_its_owner_is_told(tmp_path: Path):
    owners = np.array(["a"] * 50 + ["b"] * 10)
    data = {"path": own_file(tmp_path, owner=owners), "source": "npz"}
    made = hosted(NodeConfig.read({"clients": "a,b", "data": data}), asked())
    assert made.names == ("a",)
    assert made.notes == ("b takes no part: an update would rest on 8 rows, and min-rows is 10",)


def test_the_number_of_classes_does_not_rest_on_a_few_rows(tmp_path: Path):
    rare = np.where(np.arange(ROWS) < 3, 977, np.arange(ROWS) % 2)
    own = NodeConfig.read({"client": "a", "data": own_file(tmp_path, y=rare)})
    with pytest.raises(NotAllowed, match=r"^data\.classes: missing, and a class here has few rows") as caught:
        hosted(own, asked(data={"classes": None}))
    assert "97" not in str(caught.value)
    assert hosted(own, asked(data={"classes": 1000})).about["classes"] == 1000


SHARED = {"scheme": "iid", "clients": 2, "seed": 7}


def test_a_part_of_a_file_is_shared_out_as_the_nodes_file_says(tmp_path: Path):
    config = {"partition-id": 0, "num-partitions": 1, "data": own_file(tmp_path)}
    with pytest.raises(UserError, match=r"^node config partition\.seed: missing beside partition-id and data"):
        check_own(NodeConfig.read(config))
    own = NodeConfig.read({**config, "partition": SHARED})
    check_own(own)
    assert hosted(own, asked(partition=SHARED)).names == ("client-000", "client-001")
    for change in ({"clients": 20}, {"seed": 8}, {"samples": 12}, {"scheme": "natural", "clients": None}):
        with pytest.raises(NotAllowed, match=r"^partition\."):
            hosted(own, asked(partition={**SHARED, **change}))
    with pytest.raises(NotAllowed, match=r"^data\.owner: got 'ssn'"):
        hosted(own, asked(data={"owner": "ssn"}, partition={"scheme": "natural", "clients": None}))


def test_names_come_from_a_column_where_the_nodes_file_says_so(tmp_path: Path):
    wards = np.repeat(["east", "west"], ROWS // 2)
    natural = {"scheme": "natural", "seed": 7, "minimum": 2, "test": "local"}
    data = {"path": own_file(tmp_path, ward=wards), "source": "npz", "owner": "ward"}
    own = NodeConfig.read({"partition-id": 0, "num-partitions": 1, "data": data, "partition": natural})
    assert hosted(own, {**asked(data={"owner": "ward"}), "partition": natural}).names == ("east", "west")


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"data": {"path": "x.npz", "labels": "y"}}, "node config data.source: missing"),
        ({"data": {"path": "x.csv", "source": "csv"}}, "node config data: labels: got nothing"),
        ({"data": {"path": "x.npz", "source": "npz", "colour": 1}}, "node config data: colour: unknown field"),
        ({"data": "x.npz", "partition": {"samples": 3}}, "node config partition.samples: has no effect for named"),
        ({"data": "x.npz", "partition": {"test": "some"}}, "node config partition: test: got 'some'"),
        ({"data": "x.tsv", "kind": "recommend", "partition": {"seed": 1}}, "node config partition: given with kind"),
    ],
)
def test_a_wrong_table_of_a_nodes_file_is_named_when_it_starts(config: dict[str, Any], line: str):
    with pytest.raises(UserError) as caught:
        check_own(NodeConfig.read({"client": "a", **config}))
    assert str(caught.value).startswith(line)


def test_the_bundled_hospitals_run_on_files_of_their_own(tmp_path: Path):
    """Each hospital with its own rows, a copy of the recipe's [data], and no other rule: its updates leave as ever."""
    table = resources.files("steelyard.data").joinpath("included/heart_disease.csv").read_text(encoding="utf-8")
    lines = list(csv.reader(table.splitlines()))
    column = lines[0].index("hospital")
    recipe = read_document("hospitals")
    recipe["partition"] = {"scheme": "natural", "test": "local"}
    # One hospital never records cholesterol, and a column that is empty throughout is no input.
    recipe["data"] |= {"ignore": ["flamby", "chol"], "indicators": ["slope", "ca", "thal"], "na_values": {}}
    for name in sorted({line[column] for line in lines[1:]}):
        path = tmp_path / f"{name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([lines[0], *(line for line in lines if line[column] == name)])
        own = NodeConfig.read({"client": name, "data": {**recipe["data"], "path": str(path)}})
        check_own(own)
        made = hosted(own, recipe)
        size = 2 * (int(np.prod(made.about["features"])) + 1)
        (updates,) = made.clients.train([Task("f", 1, 1, (name,), torch.zeros(size))])
        (tests,) = made.clients.evaluate([Question("f", 1, 1, torch.zeros(1, size))])
        assert (updates.clients, updates.failures, tests.clients, made.notes) == ((name,), (), (name,), ())


def test_a_task_that_nobody_may_answer_is_answered_with_reasons(tmp_path: Path):
    rare = np.where(np.arange(ROWS) < 5, 1, 0)
    own = NodeConfig.read({"client": "a", "data": own_file(tmp_path, y=rare)})
    made = hosted(own, asked())
    apart = LossState(class_weights=(0.0, 1.0))
    (updates,) = made.clients.train([Task("f", 1, 1, ("a",), torch.zeros(8), apart)])
    assert (updates.clients, [failure.client for failure in updates.failures]) == ((), ["a"])
    (updates,) = made.clients.train([Task("f", 1, 1, ("a",), torch.zeros(8))])
    assert updates.clients == ("a",)
