"""Rounds whose models are tested, and other orders beside the current one: what is asked, kept and refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.kit import assert_refused
from tests.rounds.scripted import Clients, Recorder, Server, federation, ran, state

from steelyard.base.errors import UserError
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Evaluations, Failure, Floats, Question, Task, Updates
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Federation, Plan, RoundRecord, RoundState
from steelyard.rounds.testing import check_tested
from steelyard.weighing.cohort import CohortView, Memory
from steelyard.weighing.criterion import Needs
from steelyard.weighing.order import AdjustSettings, Decision, OrderState, chooses, strategy_of
from steelyard.weighing.policy import Policy
from steelyard.weighing.rule import Rule, WeighingSettings
from steelyard.weighing.words import show_priority

CRITERIA = ("DS", "LD", "CB")


RAW = np.array([[9.0, 2.0, 0.4], [1.0, 8.0, 0.5]])


ORDERS = ["DS>LD>CB", "DS>CB>LD", "LD>DS>CB", "LD>CB>DS", "CB>DS>LD", "CB>LD>DS"]


RULE = Rule(WeighingSettings(criteria=CRITERIA))


def weights_of(order: str) -> np.ndarray:
    return RULE.weigh(RAW, [CRITERIA.index(name) for name in order.split(">")]).weights


class ScriptedClients(Clients):
    """Two clients whose local models are unit vectors: the combined model *is* the vector of weights.

    `script[round][order]` is the accuracy of the model that this order combines.
    """

    def __init__(self, script: Mapping[int, Mapping[str, float]]) -> None:
        super().__init__(("a", "b"))
        self.script = script

    def _trained(self, task: Task) -> Updates:
        criteria = {name: RAW[:, place] for place, name in enumerate(CRITERIA)}
        samples, payload = np.array([9, 1]), DenseModels(torch.eye(2))
        return Updates(task.federation, task.round, task.clients, samples, criteria, np.zeros(2), payload)

    def _tested(self, question: Question) -> Evaluations:
        found = [self._accuracy(question.round, model.numpy()) for model in question.models]
        scores = np.repeat(np.array(found)[:, None], 2, axis=1)
        samples, none = np.array([3, 7]), np.zeros_like(scores)
        return Evaluations(question.federation, question.round, ("a", "b"), samples, scores, none)

    def _accuracy(self, round: int, model: np.ndarray) -> float:
        if round == 0:
            return self.script[0]["start"]
        order = min(ORDERS, key=lambda name: float(np.abs(weights_of(name) - model).max()))
        return self.script[round][order]


class Plain(Server):
    def initial(self, seed: int) -> torch.Tensor:
        return torch.full((2,), 7.0)


def row(*accuracies: float) -> dict[str, float]:
    return dict(zip(ORDERS, accuracies, strict=True))


class Divided(ScriptedClients):
    """Both clients agree but for one order, which the client that never chooses finds perfect."""

    def _tested(self, question: Question) -> Evaluations:
        answer = super()._tested(question)
        favourite = [float(np.abs(weights_of("DS>CB>LD") - model.numpy()).max()) < 1e-6 for model in question.models]
        reports = [place for place, name in enumerate(answer.clients) if not chooses(name)]
        answer.scores[np.ix_(favourite, reports)] = 1.0
        return answer


@pytest.mark.parametrize(("report", "order", "accuracy"), [("same", "DS>CB>LD", None), ("apart", "LD>DS>CB", 0.55)])
def test_rows_that_report_do_not_choose_where_they_are_apart(report: str, order: str, accuracy: float | None):
    assert sorted(map(chooses, ("a", "b"))) == [False, True]
    script = {0: {"start": 0.6}, 1: row(0.5, 0.4, 0.55, 0.45, 0.4, 0.4)}
    adjust = AdjustSettings(report=report)
    rule, kept = Rule(WeighingSettings(criteria=CRITERIA, adjust=adjust)), Recorder()
    run_rounds([Federation("f", "f", 0, rule, strategy_of(adjust))], {}, Divided(script), Plain(), Plan(1, 1.0), kept)
    found = kept.records[-1]
    assert show_priority(found.order, CRITERIA) == order
    if accuracy is not None:
        assert [accuracy for _, accuracy in found.tried] == pytest.approx([0.5, 0.4, 0.55, 0.45, 0.4, 0.4])
        assert found.accuracy == pytest.approx(accuracy)


def tried(clients: Clients, strategy: Any, **rule: Any) -> tuple[RoundRecord, RoundState]:
    """One round in which a strategy has other orders tested."""
    made = replace(federation(**{"criteria": ("DS", "LD", "MD"), **rule}), strategy=strategy)
    begun = replace(state(0), orders=OrderState(made.rule.start_order, 0.9))
    done = ran(made, before=begun, clients=clients, fraction=0.3)
    return done.record, done.state


@pytest.mark.parametrize("metrics", [True, False])
def test_several_candidates_are_told_apart_and_the_kept_one_is_asked_again(metrics: bool) -> None:
    """Each candidate scores ⅛ less than the one before; metrics come for the first of a question only."""
    clients = Clients(scores=lambda _: (0.5, 0.5), metrics=metrics)
    record, after = tried(clients, Keeping(), floors={"a": 0.5})
    assert [len(question.models) for question in clients.questions] == [1, 3, 1][: 2 + metrics]
    assert {(asked.federation, asked.seed, asked.round) for asked in clients.questions} == {("f", 3, 1)}
    assert len({asked.detailed for asked in clients.questions}) == 1
    assert record.order == (1, 0, 2)
    assert torch.equal(after.parameters, clients.questions[1].models[1])
    weights = after.parameters[after.parameters > 0].tolist()
    assert record.weighing.weights.tolist() == pytest.approx(weights)
    assert record.tests == 2
    assert record.tried == (((0, 1, 2), 0.5), ((0, 2, 1), 0.5), ((1, 0, 2), 0.375))
    if metrics:
        assert torch.equal(after.parameters, clients.questions[2].models[0])
        assert record.evaluations.metrics["recall"].tolist() == [float(after.parameters.argmax())] * 2
    else:  # there is nothing to ask again
        assert record.evaluations.scores.tolist() == [[0.375, 0.375]]
        assert record.evaluations.losses.tolist() == [[0.625, 0.625]]


def test_the_first_candidate_is_not_asked_again() -> None:
    """What was told in detail was told of it."""
    clients = Clients(scores=lambda _: (0.5, 0.5), metrics=True)
    record, after = tried(clients, Keeping(1), floors={"a": 0.5})
    assert [len(question.models) for question in clients.questions] == [1, 3]
    assert torch.equal(after.parameters, clients.questions[1].models[0])
    assert record.evaluations.metrics["recall"].tolist() == [float(after.parameters.argmax())] * 2


def test_an_order_that_nobody_tested_is_the_worst_of_all() -> None:
    class Partly(Clients):
        def _tested(self, question: Question) -> Evaluations:
            answer = super()._tested(question)
            answer.scores[1:] = np.nan
            return answer

    def decide(before: OrderState, orders: Sequence[tuple[int, ...]], accuracies: list[float]) -> Decision:
        seen.append(accuracies)
        return Decision(0, 1, before)

    seen: list[list[float]] = []
    strategy = SimpleNamespace(others=lambda *_: [(2, 1, 0), (0, 2, 1)], decide=decide)
    record, _ = tried(Partly(scores=lambda _: (0.5, 0.5)), strategy)
    assert seen == [[0.5, 0.5, -np.inf]]
    assert [order for order, _ in record.tried] == [(0, 1, 2), (2, 1, 0)]


@dataclass(frozen=True)
class Keeping:
    """Tests three further orders and keeps the second of them, or another one, at the price of two tests."""

    kept: int = 2

    def others(self, state: OrderState, accuracy: float, seed: int, round: int) -> Sequence[tuple[int, ...]]:
        assert (accuracy, seed, round) == (0.5, 3, 1)
        return [(0, 2, 1), (1, 0, 2), (1, 2, 0)]

    def decide(self, state: OrderState, tried: Sequence[tuple[int, ...]], accuracies: Sequence[float]) -> Decision:
        assert list(tried) == [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0)]
        assert list(accuracies) == [0.5, 0.5, 0.375, 0.25]
        return Decision(self.kept, 2, OrderState(tried[2], accuracies[2], 2))


PLAIN = Plan(rounds=2, fraction=1.0)


STOPPING = Plan(rounds=2, fraction=1.0, stop_at=(0.5, 0.5, False))


ADJUSTED: dict[str, Any] = {"criteria": ("DS", "LD"), "adjust": AdjustSettings()}


def answered(*clients: str, samples: int = 3, failures: tuple[Failure, ...] = ()) -> Evaluations:
    counts, scores = np.full(len(clients), samples), np.zeros((1, len(clients)))
    return Evaluations("f", 0, clients, counts, scores, scores, failures=failures)


@pytest.mark.parametrize(
    ("rule", "plan", "field"), [({}, STOPPING, "rounds.stop_at_target"), (ADJUSTED, PLAIN, "weighing.adjust")]
)
def test_who_needs_an_accuracy_is_refused_where_nobody_tells_one(rule: dict[str, Any], plan: Plan, field: str) -> None:
    failed = (Failure("b", "no"), Failure("c", "late"))
    for found, why in ((answered(), ""), (answered("a", samples=0), ""), (answered(failures=failed), " (b: no)")):
        check = partial(check_tested, federation(**rule), plan, found)
        assert_refused(check, f"{field}: ", f"no client tests the model{why}; allowed: ")
    check_tested(federation(**rule), plan, answered("a", failures=failed))  # One is enough.
    check_tested(federation(), PLAIN, answered())  # And nobody else needs any.


@pytest.mark.parametrize(
    ("clients", "side"),
    [("ABC", "3 clients that test none chooses"), ("E", "1 clients that test all choose and none")],
)
def test_apart_needs_clients_that_choose_and_clients_that_report(clients: str, side: str) -> None:
    rule = federation(criteria=("DS", "LD"), adjust=AdjustSettings(report="apart"))
    assert_refused(partial(check_tested, rule, PLAIN, answered(*clients)), "weighing.adjust.report", side)
    check_tested(rule, PLAIN, answered(*clients, "E", "A"))
    check_tested(federation(**ADJUSTED), PLAIN, answered(*clients))


def test_the_loop_asks_before_anybody_trains() -> None:
    clients, kept = Clients(scores=lambda _: ()), Recorder()
    with pytest.raises(UserError, match=r"^rounds\.stop_at_target: "):
        run_rounds([federation()], {}, clients, Server(), STOPPING, kept)
    assert (clients.tasks, kept.rounds) == ([], [])


def test_a_round_that_nobody_tests_teaches_a_strategy_nothing() -> None:
    rule: dict[str, Any] = {"criteria": ("DS", "LD"), "adjust": AdjustSettings(strategy="greedy")}
    # All who test the models have left in the second round, and are back in the third.
    clients, kept = Clients(scores=lambda round: () if round == 2 else (0.5, 0.25)), Recorder()
    after = [
        run_rounds([federation(**rule)], {}, clients, Server(), Plan(rounds=rounds, fraction=1.0), kept)["f"].orders
        for rounds in (1, 2)
    ]
    assert after[1] == after[0]
    asked = [question for question in clients.questions if question.round == 2]
    assert [len(question.models) for question in asked] == [1]  # No other order is tested either.
    run_rounds([federation(**rule)], {}, clients, Server(), Plan(rounds=3, fraction=1.0), kept)
    assert kept.records[-1].accuracy == pytest.approx(0.4375)  # (3 × 0.5 + 1 × 0.25) / 4


class Scored(Policy):
    """Gives weights by the number of samples, and remembers what each client scored."""

    needs: ClassVar[Needs] = Needs(client_tests=True)

    def weigh(self, measures: Any, view: CohortView) -> Floats:
        return measures["DS"]

    def after_tests(self, memory: Mapping[str, Memory], scores: Mapping[str, float]) -> dict[str, Memory]:
        return {"seen": {**memory["seen"], **scores}}


def with_policy(name: str = "f", policy: Policy | None = None, **rule: Any) -> Federation:
    made = federation(name, **rule)
    made.rule.policy = policy or Scored()
    return made


def test_each_client_scores_the_model_of_the_others() -> None:
    clients = Clients(("a", "b", "c"), scores=lambda _: (0.5, 0.25, float("nan")))
    before = replace(state(4), memory={"seen": {"z": 1.0}, "other": 2})
    after = ran(with_policy(), before=before, clients=clients, rounds=5).state
    combined, without = clients.questions
    # a, b and c weigh 1, 2 and 3 sixths; their models are 1 in columns of their own.
    assert combined.models[0, :3].tolist() == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    for found, expected in zip(without.models, ([0, 2 / 5, 3 / 5], [1 / 4, 0, 3 / 4], [1 / 3, 2 / 3, 0]), strict=True):
        assert found[:3].tolist() == pytest.approx(expected)
    assert (without.federation, without.seed, without.round, without.detailed) == ("f", 3, 5, False)
    # Each further model scores an eighth less; c scores no number.
    assert after.memory == {"seen": {"z": 1.0, "a": 0.5, "b": 0.125}, "other": 2}


def test_where_one_has_all_the_weight_the_others_make_its_model_alike() -> None:
    class Heavy(Scored):
        def weigh(self, measures: Any, view: CohortView) -> Floats:
            return np.array([1.0, 0.0, 0.0])

    clients = Clients(("a", "b", "c"))
    before = replace(state(0), memory={"seen": {}})
    ran(with_policy(policy=Heavy()), before=before, clients=clients)
    assert clients.questions[1].models[:, :3].tolist() == [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_nobody_is_asked_where_there_are_no_others_or_nothing_was_combined() -> None:
    class Worthless(Scored):
        def weigh(self, measures: Any, view: CohortView) -> Floats:
            return 0 * measures["DS"]

    for names, made, asked in (
        ("a", with_policy(), 1),
        ("ab", with_policy(), 2),
        ("ab", with_policy(policy=Worthless(), when_zero="keep"), 1),
    ):
        clients = Clients(names)
        before = replace(state(0), memory={"seen": {}})
        ran(federation("plain"), made, before=before, clients=clients)
        assert len(clients.questions) == 1 + asked
