"""What answers say beside models: an algorithm's vectors, steps, first losses, label counts; every fault is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from tests.clients.flower.flower_fakes import FakeGrid, introduction, reasons, task, train

from steelyard.algorithms.fednova import FedNova
from steelyard.algorithms.scaffold import CHANGE, CONTROL, Scaffold
from steelyard.clients.flower import tasks
from steelyard.clients.flower.arrays import pack
from steelyard.clients.flower.forms import INTRODUCE, Refused
from steelyard.clients.flower.grid import FlowerClients
from steelyard.clients.flower.settings import FederateSettings
from steelyard.messages import Task, Updates

TASK = replace(task("c1", "c2"), algorithm=Scaffold(), vectors={CONTROL: torch.ones(3)})
VECTORS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
EXPECTED = tasks.Expected(
    {"DS": lambda value: None}, further=frozenset({"steps", "first_losses", "label_counts"}), classes=2
)

PLAIN = tasks.Expected({"DS": lambda value: None})


def answered(asked: Task = TASK) -> Updates:
    """An honest answer with all that can be said; of client 1 the first row, of client 2 the second."""
    rows = [int(client[1:]) - 1 for client in asked.clients]
    return replace(
        train(asked),
        steps=np.array([3, 5])[rows],
        first_losses=np.array([0.5, 0.25])[rows],
        label_counts=np.array([[10, 0], [12, 8]])[rows],
        vectors={CHANGE: VECTORS[rows]},
    )


def read(records: RecordDict, asked: Task = TASK) -> Updates:
    return tasks.read_updates(records, asked, asked.clients, EXPECTED)


def tampered(arrays: dict[str, NDArray[Any] | None] | None = None, **form: Any) -> RecordDict:
    """An honest answer with some arrays or fields of its form replaced, or left out where None."""
    records = tasks.write_updates(answered())
    held = {name: array.numpy() for name, array in records.array_records["arrays"].items()} | (arrays or {})
    written = json.loads(str(records.config_records["form"]["json"])) | form
    kept = {name: array for name, array in held.items() if array is not None}
    return RecordDict({"form": ConfigRecord({"json": json.dumps(written)}), "arrays": pack(kept)})


def test_a_task_carries_its_algorithm_and_its_vectors():
    got, header = tasks.read_task(tasks.write_task(TASK, ["c1"], 1.0, tasks.pack_parameters(TASK)))
    assert header.algorithm == {"name": "scaffold", "server_rate": 1.0}
    assert got.algorithm.name == "fedavg"  # The node makes its own, of its experiment.
    assert {name: vector.tolist() for name, vector in got.vectors.items()} == {CONTROL: [1.0, 1.0, 1.0]}


def test_all_that_clients_say_survives_the_wire():
    got = read(tasks.write_updates(answered()))
    assert got.clients == ("c1", "c2")
    assert torch.equal(got.vectors[CHANGE], VECTORS)
    assert got.steps is not None
    assert got.steps.tolist() == [3, 5]
    assert got.first_losses is not None
    assert got.first_losses.tolist() == [0.5, 0.25]
    assert got.label_counts is not None
    assert got.label_counts.tolist() == [[10, 0], [12, 8]]


def test_what_was_not_asked_for_is_not_used():
    bare = replace(answered(), vectors={}, label_counts=None)
    got = tasks.read_updates(tasks.write_updates(bare), task("c1", "c2"), ["c1", "c2"], PLAIN)
    assert (got.steps, got.first_losses, got.label_counts, got.vectors) == (None, None, None, {})
    with pytest.raises(Refused, match="arrays: got label_counts, models; allowed: exactly models"):
        tasks.read_updates(tampered({f"vector/{CHANGE}": None}), task("c1", "c2"), ["c1", "c2"], PLAIN)


@pytest.mark.parametrize(
    ("arrays", "form", "reason"),
    [
        ({f"vector/{CHANGE}": None}, {}, "arrays: vector/control_change is missing, which scaffold or a criterion"),
        ({f"vector/{CHANGE}": np.zeros((2, 4), "f4")}, {}, "array vector/control_change: shape (2, 4); allowed: (2, 3"),
        ({f"vector/{CHANGE}": np.zeros((1, 3), "f4")}, {}, "array vector/control_change: shape (1, 3); allowed: (2, 3"),
        (
            {f"vector/{CHANGE}": np.zeros((2, 3), "f8")},
            {},
            "array vector/control_change: dtype float64; allowed: f",
        ),
        ({"vector/other": np.zeros((2, 3), "f4")}, {}, "arrays: got models, vector/other; allowed: exactly models"),
        ({f"vector/{CHANGE}": np.zeros((2, 90000), "f4")}, {}, "size: "),
        ({"label_counts": None}, {}, "arrays: label_counts is missing"),
        ({"label_counts": np.zeros((2, 3), "i8")}, {}, "array label_counts: shape (2, 3); allowed: (2, 2)"),
        ({}, {"steps": None}, "steps: missing; allowed: one for each client"),
        ({}, {"steps": [1]}, "steps: 1 values; allowed: 2, one per client"),
        ({}, {"steps": [1.5, 2]}, "steps.0: Input should be a valid integer"),
        ({}, {"first_losses": None}, "first_losses: missing; allowed: one for each client"),
        ({}, {"first_losses": [1.0, 2.0, 3.0]}, "first_losses: 3 values; allowed: 2, one per client"),
    ],
)
def test_an_answer_that_lacks_or_bends_any_of_it_is_refused(arrays: dict[str, Any], form: dict[str, Any], reason: str):
    with pytest.raises(Refused) as caught:
        read(tampered(arrays, **form))
    assert str(caught.value).startswith(reason)


def with_number(value: float, dtype: str = "f4") -> NDArray[Any]:
    """Client 2's row holds one number that cannot be."""
    found = np.zeros((2, 3 if dtype == "f4" else 2), dtype)
    found[1, 1] = value
    return found


@pytest.mark.parametrize(
    ("arrays", "form", "reason"),
    [
        *(
            ({f"vector/{CHANGE}": with_number(value)}, {}, f"vector {CHANGE}: holds NaN, infinity or a number beyond")
            for value in (np.nan, np.inf, -np.inf, 1e30, -1e16)
        ),
        ({"label_counts": with_number(-1, "i8")}, {}, "label_counts: holds -1 to 0; allowed: 0 to 1000000000000"),
        (
            {"label_counts": with_number(1 << 60, "i8")},
            {},
            "label_counts: holds 0 to 1152921504606846976; allowed:",
        ),
        ({}, {"steps": [3, 0]}, "steps = 0; allowed: 1 to 999999999999"),
        ({}, {"steps": [3, -5]}, "steps = -1; allowed: 1 to 999999999999"),
        ({}, {"steps": [3, 10**30]}, "steps = 1000000000000; allowed: 1 to 999999999999"),
        ({}, {"first_losses": [1.0, float("nan")]}, "first loss = nan; allowed: a number of at most 1e+15"),
    ],
)
def test_a_wrong_number_leaves_out_only_its_client(arrays: dict[str, Any], form: dict[str, Any], reason: str):
    got = read(tampered(arrays, **form))
    assert got.clients == ("c1",)
    assert got.vectors[CHANGE].shape == (1, 3)
    (failure,) = got.failures
    assert failure.client == "c2"
    assert failure.reason.startswith(reason)


def test_an_algorithm_that_counts_steps_needs_them_whatever_the_run_asks_for():
    asked = replace(task("c1"), algorithm=FedNova())
    silent = tasks.write_updates(train(asked))
    with pytest.raises(Refused, match="steps: missing"):
        tasks.read_updates(silent, asked, ["c1"], PLAIN)


def test_answers_of_several_nodes_are_joined_and_a_hostile_one_is_left_out():
    def node(*clients: str, lie: dict[str, NDArray[Any] | None] | None = None) -> Any:
        def answer(message: Any) -> RecordDict:
            if message.metadata.message_type == INTRODUCE:
                return introduction(*clients)
            if lie is not None:
                return tampered(lie)
            asked = tasks.read_task(message.content)[0]
            return tasks.write_updates(replace(answered(asked), label_counts=None))

        return answer

    def crowd(nodes: dict[int, Any]) -> FlowerClients:
        further = ("steps", "first_losses")
        made = FlowerClients(
            FakeGrid(nodes),  # type: ignore[arg-type]
            {"DS": lambda value: None},
            FederateSettings(nodes=len(nodes), timeout=20.0),
            further=further,
        )
        made.wait()
        return made

    asked = replace(TASK, clients=("c1", "c2"))
    (updates,) = crowd({7: node("c2"), 8: node("c1")}).train([asked])
    assert updates.clients == ("c1", "c2")
    assert torch.equal(updates.vectors[CHANGE], VECTORS)
    assert updates.steps is not None
    assert updates.steps.tolist() == [3, 5]
    assert updates.first_losses is not None
    assert updates.first_losses.tolist() == [0.5, 0.25]
    assert updates.label_counts is None
    (updates,) = crowd({7: node("c1", "c2", lie={f"vector/{CHANGE}": None})}).train([asked])
    assert updates.clients == ()
    assert updates.vectors[CHANGE].shape == (0, 3)
    assert set(reasons(updates.failures)) == {"c1", "c2"}
    assert reasons(updates.failures)["c1"].startswith("arrays: vector/control_change is missing")
