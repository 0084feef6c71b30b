"""Columns of answers: what is declared once selects, joins, writes and checks as by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Evaluations, Failure, Task, Updates, joined_columns


def answer(*clients: str, **more: Any) -> Updates:
    """Of client cN all numbers are N."""
    numbers = np.array([int(name[1:]) for name in clients])
    models = torch.tensor(numbers, dtype=torch.float32)[:, None].repeat(1, 2)
    given = {
        "steps": numbers * 2,
        "label_counts": np.stack([numbers, numbers * 3], axis=1),
        "vectors": {"control": -models},
        "listening": numbers[:, None] * 10.0 + numbers,
    }
    said = (numbers, {"DS": numbers * 1.0}, numbers / 4)
    return Updates("f", 3, clients, *said, DenseModels(models), **{**given, **more})


TASK = Task("f", 0, 3, (), torch.zeros(2))


def test_some_clients_keep_all_that_is_theirs() -> None:
    found = answer("c1", "c2", "c5", late={"c5": 0.5, "c1": 0.25}).select([2, 0], [Failure("c2", "no")])
    assert (found.clients, found.samples.tolist(), found.criteria["DS"].tolist()) == (("c5", "c1"), [5, 1], [5.0, 1.0])
    assert found.label_counts is not None
    assert found.label_counts.tolist() == [[5, 15], [1, 3]]
    assert found.listening is not None
    assert found.listening.tolist() == [[55.0, 51.0], [15.0, 11.0]]
    assert found.vectors["control"].tolist() == [[-5.0, -5.0], [-1.0, -1.0]]
    assert (found.late, found.first_losses, found.failures) == ({"c1": 0.25, "c5": 0.5}, None, (Failure("c2", "no"),))


def test_answers_are_joined_by_client_and_what_one_does_not_say_nobody_does() -> None:
    parts = [answer("c2", "c7"), answer("c5", steps=None)]
    found = Updates.joined(TASK, parts, [Failure("b", "1"), Failure("a", "2")], lambda order: parts[0].payload)
    assert (found.clients, found.samples.tolist(), found.losses.tolist()) == (
        ("c2", "c5", "c7"),
        [2, 5, 7],
        [0.5, 1.25, 1.75],
    )
    assert found.steps is None
    assert found.listening is not None
    # Clients of different answers have nothing to do with each other.
    assert found.listening.tolist() == [[22.0, 0.0, 27.0], [0.0, 55.0, 0.0], [72.0, 0.0, 77.0]]
    assert found.vectors["control"][:, 0].tolist() == [-2.0, -5.0, -7.0]
    assert [failure.client for failure in found.failures] == ["a", "b"]
    nobody = Updates.joined(TASK, [], [], lambda order: parts[0].payload)
    assert (nobody.clients, nobody.samples.tolist(), nobody.criteria, nobody.steps) == ((), [], {}, None)


def test_right_or_wrong_goes_with_its_client() -> None:
    """c1 has one sample and c2 three; the first is wrong, then right, wrong, right."""
    right, samples = np.array([False, True, False, True]), np.array([1, 3])
    scores = np.array([[0.0, 2 / 3], [1.0, 0.5]])
    two = Evaluations("f", 1, ("c1", "c2"), samples, scores, scores, {"ndcg": samples / 2}, right)
    assert two.without(["c1"]).right is not None
    assert two.without(["c1"]).right.tolist() == [True, False, True]  # type: ignore[union-attr]
    assert two.without(["c1"]).scores.tolist() == [[2 / 3], [0.5]]
    other = Evaluations(
        "f", 1, ("c0",), samples[1:] - 1, scores[:, :1], scores[:, :1], {"ndcg": samples[:1] * 1.0}, right[:2]
    )
    found, order = joined_columns(Evaluations, [two, other])
    assert (found["clients"], order, found["right"].tolist()) == (("c0", "c1", "c2"), [2, 0, 1], [False, True, *right])


def test_what_is_written_as_json_is_read_back() -> None:
    one = answer("c1", "c4", bytes_sent=np.array([7, 8]))
    back = Updates.read(json.loads(json.dumps(one.write())))
    assert back.keys() == {name for name in Updates.columns() if name != "vectors"}
    for name, values in back.items():
        if name == "criteria":
            assert values["DS"].tolist() == [1.0, 4.0]
        elif getattr(one, name) is None:
            assert values is None
        else:
            np.testing.assert_array_equal(values, getattr(one, name))
            assert values.dtype == Updates.columns()[name].kind


@pytest.mark.parametrize(
    ("name", "values", "fault"),
    [
        ("samples", np.array([0]), "samples = 0; allowed: 1 to 1000000000000"),
        ("samples", np.array([10**12]), None),
        ("steps", np.array([10**12]), "steps = 1000000000000; allowed: 1 to 999999999999"),
        ("steps", None, None),
        ("losses", np.array([-1e15]), None),
        ("losses", np.array([np.nan]), "loss = nan; allowed: -1e+15 to 1e+15"),
        ("criteria", {"DS": np.array([1.0]), "Q": np.array([np.inf])}, "criterion Q = inf"),
        ("label_counts", np.array([[3, -1, -2]]), "label_counts = -1; allowed: 0 to 1000000000000"),
        ("vectors", {"v": torch.tensor([[0.0, -1e16]])}, "vector v = -1.0000000"),
    ],
)
def test_a_number_that_cannot_be_is_named_with_its_column(name: str, values: Any, fault: str | None) -> None:
    found = Updates.columns()[name].fault(values, 0)
    assert found is None if fault is None else found is not None and found.startswith(fault)


def test_whole_numbers_that_no_array_holds_are_out_of_range() -> None:
    column = Updates.columns()["samples"]
    read = column.read([10**30, -(10**30), 5])
    assert [column.fault(read, client) is None for client in range(3)] == [False, False, True]
