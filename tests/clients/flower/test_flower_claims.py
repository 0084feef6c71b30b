"""Numbers that a client may not claim, and words that it may not have stored or printed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord
from tests.clients.flower.flower_fakes import FakeGrid, evaluate, failing, honest, reasons, task, train

from steelyard.clients.flower import checks, wire
from steelyard.clients.flower.forms import TRAIN
from steelyard.clients.flower.grid import FlowerClients
from steelyard.clients.flower.settings import FederateSettings
from steelyard.messages import DenseModels, Evaluations, Question, Task, Updates

JUDGES: dict[str, Any] = {"DS": lambda value: None, "FT": lambda value: None}


def with_criteria(change: Any) -> Any:
    def work(asked: Task) -> Updates:
        found = train(asked)
        found = replace(found, criteria={**found.criteria, "FT": np.ones(len(found.clients))})
        return change(found)

    return work


def crowd(*nodes: Any, timeout: float = 20.0) -> FlowerClients:
    grid = FakeGrid(dict(enumerate(nodes, 1)))
    settings = FederateSettings(timeout=timeout, nodes=len(nodes))
    made = FlowerClients(grid, JUDGES, settings, scores=(0.0, 1.0))  # type: ignore[arg-type]
    made.wait()
    return made


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda u: replace(u, criteria={**u.criteria, "DS": u.criteria["DS"] + 1}),
            "criterion DS = 11, but samples = 10; allowed: the same number",
        ),
        (
            lambda u: replace(u, criteria={**u.criteria, "FT": np.full(1, 1e308)}),
            "criterion FT = 1e+308; allowed: at most 1e+15",
        ),
        (
            lambda u: replace(u, payload=DenseModels(torch.tensor([[1e38, -1e38, 1e38]]))),
            "update: farther than 1e+06 times the model; that is no training",
        ),
    ],
)
def test_an_impossible_claim_leaves_out_its_client_alone(change: Any, reason: str):
    liar, good = honest("c1", train=with_criteria(change)), honest("c2", train=with_criteria(lambda u: u))
    (updates,) = crowd(liar, good).train([task("c1", "c2")])
    assert updates.clients == ("c2",)
    assert reasons(updates.failures) == {"c1": reason}


def test_a_large_but_honest_step_is_no_explosion():
    far = honest("c1", train=with_criteria(lambda u: replace(u, payload=DenseModels(torch.tensor([[9e5, 0.0, -9e5]])))))
    (updates,) = crowd(far).train([task("c1")])
    assert updates.clients == ("c1",)


def test_one_node_cannot_decide_the_accuracy_with_the_size_of_its_test_set():
    def boast(question: Question, clients: tuple[str, ...]) -> Evaluations:
        found = evaluate(question, clients)
        return replace(found, samples=np.full(len(clients), 10**12), scores=np.ones_like(found.scores))

    (answer,) = crowd(honest("c1"), honest("c2", evaluate=boast), honest("c3")).evaluate(
        [Question("fed", 7, 1, torch.zeros(1, 3))]
    )
    assert answer.clients == ("c1", "c3")
    assert answer.overall().tolist() == [pytest.approx(0.02)]  # (1 % + 3 %) / 2, not 99.99 %
    assert reasons(answer.failures)["c2"] == "samples = 1000000000000; allowed: 100 times the median client's, 200"


def test_the_bound_of_test_sets_is_the_lower_middle_one():
    assert checks.size_faults([5, 0, 500], 100.0) == [None, None, None]
    assert checks.size_faults([10**9], 100.0) == [None]  # Nobody to compare with.
    fault = checks.size_faults([5, 501], 100.0)[1]
    assert fault == "samples = 501; allowed: 100 times the median client's, 500"


HEADERS = [
    b"\x93NUMPY\x01\x00\x10\x00{'descr': '<f4',",
    b"\x93NUMPY\x01\x00\xff\xff",
    b"",
    b"\x93NUMPY\x01\x00\x06\x00((((((",
    b"\x93NUMPY\x01\x00\x08\x00'\\N{x}'  ",
    b"\x93NUMPY\x03\x00\x00\x00",
]


@pytest.mark.parametrize("content", HEADERS)
def test_an_array_header_that_does_not_parse_refuses_its_answer_alone(content: bytes):
    good = with_criteria(lambda u: u)
    record = wire.write_updates(good(task("c1")))
    record["arrays"] = ArrayRecord({"models": FlowerArray("float32", (1, 3), "numpy.ndarray", content)})
    (updates,) = crowd(failing("c1", kind=TRAIN, answer=record), honest("c2", train=good)).train([task("c1", "c2")])
    assert updates.clients == ("c2",)
    assert "array" in reasons(updates.failures)["c1"]


def test_a_nodes_words_are_one_printable_line_of_bounded_length():
    nasty = "\x1b[31mred\x1b[0m\n\r\x00" + "x" * 10_000

    def work(asked: Task) -> Updates:
        return replace(train(asked), federation=nasty, criteria={"DS": train(asked).criteria["DS"], "FT": np.ones(1)})

    (updates,) = crowd(honest("c1", train=work), honest("c2", train=with_criteria(lambda u: u))).train(
        [task("c1", "c2")]
    )
    reason = reasons(updates.failures)["c1"]
    assert len(reason) <= checks.LONGEST_REASON
    assert reason.isprintable()


def _with_metrics(**metrics: list[float]) -> Any:
    def test(question: Question, clients: tuple[str, ...]) -> Evaluations:
        return replace(evaluate(question, clients), metrics={name: np.asarray(v) for name, v in metrics.items()})

    return test


def _nobody(question: Question, clients: tuple[str, ...]) -> Evaluations:
    return evaluate(question, ())


def test_one_node_neither_takes_a_metric_from_the_others_nor_adds_one():
    ours = _with_metrics(ndcg=[0.5, 0.25])
    question = Question("f", 1, 1, torch.zeros(1, 3), False)
    for other in (evaluate, _nobody, _with_metrics(mine=[1.0])):
        nodes = [honest("c1", "c2", evaluate=ours), honest("c3", evaluate=other)]
        (answer,) = crowd(*nodes).evaluate([question])
        assert list(answer.metrics) == ["ndcg"]
        assert answer.metrics["ndcg"][:2].tolist() == [0.5, 0.25]
        assert np.isnan(answer.metrics["ndcg"][2:]).all()
        assert len(answer.metrics["ndcg"]) == len(answer.clients)


@pytest.mark.parametrize("name", ["a\x1b[2Kb", "x" * 65, ""])
def test_a_metric_that_cannot_be_shown_refuses_its_answer(name: str):
    question = Question("f", 1, 1, torch.zeros(1, 3), False)
    hostile = _with_metrics(**{name: [1.0]})
    (answer,) = crowd(honest("c1"), honest("c2", evaluate=hostile)).evaluate([question])
    assert answer.clients == ("c1",)
    assert reasons(answer.failures)["c2"].startswith("metrics: got 1, such as ")
    many = _with_metrics(**{f"m{number}": [1.0] for number in range(101)})
    (answer,) = crowd(honest("c1"), honest("c2", evaluate=many)).evaluate([question])
    assert "allowed: at most 100" in reasons(answer.failures)["c2"]
