"""Answers that rest on too few rows are not given, whatever the task or the question is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.clients.node import NodeConfig
from steelyard.experiment.enough_rows import EnoughRows
from steelyard.experiment.node_rules import agreed
from steelyard.messages import Evaluations, LossState, Question, Task, Updates
from steelyard.update_payloads import DenseModels


class Recorded:
    """Clients that answer anything, and remember what they were asked."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.questions: list[Question] = []

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        self.tasks += tasks
        return [self._trained(task) for task in tasks]

    def _trained(self, task: Task) -> Updates:
        count = len(task.clients)
        models = DenseModels(torch.zeros(count, 2))
        return Updates(task.federation, task.round, task.clients, np.ones(count, int), {}, np.zeros(count), models)

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        self.questions += questions
        return [self._tested(question) for question in questions]

    def _tested(self, question: Question) -> Evaluations:
        table = np.arange(4.0).reshape(2, 2)
        right = np.ones(12, dtype=bool) if question.detailed else None
        about = {"rmse": np.array([1.0, 2.0])}
        return Evaluations(question.federation, 1, ("big", "small"), np.array([9, 3]), table, table, about, right)


def guarded(min_rows: int = 5, secret: int = 11) -> tuple[EnoughRows, Recorded]:
    inner: Any = Recorded()
    labels = {"big": [8, 8, 0], "small": [20, 4, 0]}
    return EnoughRows(inner, min_rows, secret, {"big": 9, "small": 3}, labels), inner


def task(*weights: float, seed: int = 1) -> Task:
    return Task("f", seed, 1, ("big", "small"), torch.zeros(2), LossState(class_weights=weights or None))


def test_class_weights_that_single_out_few_rows_get_no_update():
    """Two answers whose weights differ for one class differ by that class alone, whatever the weights are."""
    clients, inner = guarded()
    for weights, answering in (
        ((), ("big", "small")),
        ((2.0, 2.0, 9.0), ("big", "small")),  # Of the last class there are no rows.
        ((1.0, 0.0, 1.0), ("big",)),
        ((1.0, 1.001, 1.0), ("big",)),
    ):
        (updates,) = clients.train([task(*weights)])
        assert updates.clients == inner.tasks[-1].clients == answering
        left = {failure.client: failure.reason for failure in updates.failures}
        assert left == ({} if "small" in answering else {"small": left["small"]})
    assert left["small"] == "loss: under its class weights, fewer than 5 rows of a class are behind an update"


@pytest.mark.parametrize("training", [{"updates": 12, "batch_size": 1}, {"updates": 1, "batch_size": 12}])
def test_class_weights_and_few_steps_do_not_single_out_a_row(tmp_path: Path, training: dict[str, Any]):
    """Under weights of 0 for all classes but one, twelve rows may hold one of that class: its update is that row."""
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "own.npz", x=rng.random((120, 5), dtype=np.float32), y=(np.arange(120) % 5 == 0).astype(int))
    node = NodeConfig.read({"client": "a", "data": str(tmp_path / "own.npz")})
    for fields, answers in ((training, False), ({"epochs": 2, "batch_size": 8}, True)):
        asked = {
            "name": "x",
            "data": {"source": "npz", "path": "theirs.npz", "classes": 2},
            "model": {"name": "logistic"},
            "training": fields,
            "compute": {"engine": "loop", "device": "cpu"},
        }
        own = agreed(asked, node).on_node(node)
        for weights, answered in (((0.0, 1.0), answers), ((1.0, 1.0), True)):
            loss = LossState(class_weights=weights)
            (updates,) = own.clients.train([Task("f", 1, 1, ("a",), torch.zeros(12), loss)])
            assert updates.clients == (("a",) if answered else ())


def test_small_test_sets_are_not_told():
    clients, inner = guarded()
    (answer,) = clients.evaluate([Question("f", 1, 1, torch.zeros(2, 2))])
    assert (answer.clients, answer.samples.tolist(), answer.scores.tolist()) == (("big",), [9], [[0.0], [2.0]])
    assert {name: values.tolist() for name, values in answer.metrics.items()} == {"rmse": [1.0]}
    (failure,) = answer.failures
    assert failure.client == "small"
    assert failure.reason == "tests: the test set has fewer, and this node answers with 5 rows or more"
    assert len(inner.questions) == 1


def test_right_or_wrong_of_one_row_is_not_told():
    clients, inner = guarded()
    (answer,) = clients.evaluate([Question("f", 1, 1, torch.zeros(2, 2), detailed=True)])
    assert (answer.clients, answer.scores.shape, len(answer.failures)) == ((), (2, 0), 2)
    assert answer.right is not None
    assert (answer.right.size, inner.questions[0].detailed) == (0, False)
    (answer,) = guarded(min_rows=1)[0].evaluate([Question("f", 1, 1, torch.zeros(2, 2), detailed=True)])
    assert answer.clients == ("big", "small")
    assert answer.right is not None
    assert answer.right.size == 12


def test_what_is_drawn_follows_from_the_file_and_not_from_the_servers_seed_alone():
    (one, first), (other, second) = guarded(secret=11), guarded(secret=12)
    for clients in (one, other):
        clients.train([task(seed=1), task(seed=2), task(seed=1)])
        clients.evaluate([Question("f", 1, 1, torch.zeros(2, 2))])
    seeds = [asked.seed for asked in first.tasks]
    assert seeds[0] == seeds[2] == first.questions[0].seed  # The same again for the same seed, so that runs repeat.
    assert len({*seeds, *(asked.seed for asked in second.tasks), 1, 2}) == 6


def test_counts_of_labels_are_not_told_where_a_class_has_few_rows():
    inner: Any = Recorded()
    labels = {"big": [8, 8, 0], "small": [20, 4, 0]}
    clients = EnoughRows(inner, 5, 11, {"big": 9, "small": 9}, labels, counts_labels=True)
    (updates,) = clients.train([task()])
    assert updates.clients == inner.tasks[-1].clients == ("big",)
    (failure,) = updates.failures
    assert failure.client == "small"
    assert failure.reason == "label counts: a class has fewer than 5 rows, and its number is not told"
