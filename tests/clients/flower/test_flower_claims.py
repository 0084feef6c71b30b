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

from steelyard.clients.flower import checks, tasks
from steelyard.clients.flower.forms import TRAIN
from steelyard.clients.flower.grid import FlowerClients
from steelyard.clients.flower.settings import FederateSettings
from steelyard.messages import MOST_SAMPLES, Evaluations, Question, Task, Updates
from steelyard.update_payloads import DenseModels

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
        (  # Finite, though their sum is not in float32.
            lambda u: replace(u, payload=DenseModels(torch.full((1, 3), 3e38))),
            "update: farther than 1e+06 times the model; that is no training",
        ),
        (lambda u: replace(u, losses=np.full(1, np.nan)), "loss = nan; allowed: a number of at most 1e+15"),
        (lambda u: replace(u, losses=np.full(1, 1e300)), "loss = 1e+300; allowed: a number of at most 1e+15"),
        (
            lambda u: replace(u, samples=u.samples * 0, criteria={**u.criteria, "DS": np.zeros(1)}),
            "samples = 0; allowed: 1 to 1000000000000",
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


def boasting(times: int) -> Any:
    """A test that claims so many times the rows it has, all of them right."""

    def test(question: Question, clients: tuple[str, ...]) -> Evaluations:
        found = evaluate(question, clients)
        right = None if found.right is None else np.ones(len(found.right) * times, dtype=np.bool_)
        return replace(found, samples=found.samples * times, scores=np.ones_like(found.scores), right=right)

    return test


@pytest.mark.parametrize("times", [90, 5 * 10**11])
def test_a_client_that_claims_more_test_rows_counts_three_times_the_median_one(times: int):
    nodes = [honest(f"c{number}", evaluate=boasting(times) if number == 2 else evaluate) for number in range(10)]
    crowded = crowd(*nodes)
    (answer,) = crowded.evaluate([Question("fed", 7, 1, torch.zeros(1, 3))])
    assert answer.clients == tuple(f"c{number}" for number in range(10))
    assert dict(zip(answer.clients, answer.samples.tolist(), strict=True))["c2"] == 6
    honest_sum = sum(number / 100 for number in range(10) if number != 2)
    assert answer.overall().tolist() == [pytest.approx((honest_sum + 3 * 1.0) / 12)]  # With 90 times: 0.91.
    note = f"client c2 says {2 * times} test samples; 6 count, federate.test_bound = 3 times the median client's"
    assert list(crowded.notes) == [note]
    crowded.evaluate([Question("fed", 7, 2, torch.zeros(1, 3))])
    assert list(crowded.notes) == [note]


def test_rows_that_do_not_count_are_not_recorded_either():
    nodes = [honest("c1"), honest("c2", evaluate=boasting(9)), honest("c3")]
    (answer,) = crowd(*nodes).evaluate([Question("fed", 7, 1, torch.zeros(1, 3), detailed=True)])
    assert answer.samples.tolist() == [2, 6, 2]
    assert answer.right is not None
    assert answer.right.tolist() == [True] * 10


def test_a_client_without_test_rows_or_with_an_impossible_loss_is_left_out():
    def without(question: Question, clients: tuple[str, ...]) -> Evaluations:
        return replace(evaluate(question, clients), samples=np.zeros(len(clients), dtype=np.int64))

    def lossy(question: Question, clients: tuple[str, ...]) -> Evaluations:
        return replace(evaluate(question, clients), losses=np.full((len(question.models), len(clients)), np.inf))

    nodes = [honest("c1"), honest("c2", evaluate=without), honest("c3", evaluate=lossy)]
    (answer,) = crowd(*nodes).evaluate([Question("fed", 7, 1, torch.zeros(1, 3))])
    assert answer.clients == ("c1",)
    assert reasons(answer.failures) == {
        "c2": "samples = 0; allowed: 1 to 1000000000000",
        "c3": "loss = inf; allowed: a number of at most 1e+15",
    }


def test_the_bound_of_test_sets_is_the_lower_middle_one():
    assert checks.most_counted([5, 0, 500], 3.0) == 15
    assert checks.most_counted([5, 501], 3.0) == 15
    assert checks.most_counted([10**9], 3.0) == MOST_SAMPLES  # Nobody to compare with.


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
    record = tasks.write_updates(good(task("c1")))
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
