"""Online adjustment in the loop itself, with clients whose local models are unit vectors.

The combined model of such clients *is* the vector of weights, so the accuracy of every priority order in every round
can be scripted, and the model that a round keeps shows which order it kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

import numpy as np
import pytest
import torch

from steelyard.messages import Evaluations, Question, Task, Updates
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Federation, Plan, RoundRecord, RoundState
from steelyard.update_payloads import DenseModels, ServerTest
from steelyard.weighing.adafed import ClassLoss
from steelyard.weighing.adjusting import AdjustSettings, chooses, strategy_of
from steelyard.weighing.rule import Rule, WeighingSettings, show_priority

CRITERIA = ("DS", "LD", "CB")
RAW = np.array([[9.0, 2.0, 0.4], [1.0, 8.0, 0.5]])
ORDERS = ["DS>LD>CB", "DS>CB>LD", "LD>DS>CB", "LD>CB>DS", "CB>DS>LD", "CB>LD>DS"]
RULE = Rule(WeighingSettings(criteria=CRITERIA))


def weights_of(order: str) -> np.ndarray:
    return RULE.weigh(RAW, [CRITERIA.index(name) for name in order.split(">")]).weights


class ScriptedClients:
    """Two clients; `script[round][order]` is the accuracy of the model that this order combines."""

    def __init__(self, script: Mapping[int, Mapping[str, float]]) -> None:
        self.script = script
        self.questions: list[tuple[int, int, bool]] = []

    def names(self, seed: int) -> Sequence[str]:
        return ("a", "b")

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        criteria = {name: RAW[:, place] for place, name in enumerate(CRITERIA)}
        samples, payload = np.array([9, 1]), DenseModels(torch.eye(2))
        return [
            Updates(task.federation, task.round, task.clients, samples, criteria, np.zeros(2), payload)
            for task in tasks
        ]

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        return [self._answer(question) for question in questions]

    def _answer(self, question: Question) -> Evaluations:
        self.questions.append((question.round, len(question.models), question.detailed))
        found = [self._accuracy(question.round, model.numpy()) for model in question.models]
        scores = np.repeat(np.array(found)[:, None], 2, axis=1)
        right = np.array([found[0] > 0.5, found[0] > 0.7]) if question.detailed else None
        return Evaluations(
            question.federation,
            question.round,
            ("a", "b"),
            np.array([3, 7]),
            scores,
            np.zeros_like(scores),
            right=right,
        )

    def _accuracy(self, round: int, model: np.ndarray) -> float:
        if round == 0:
            return self.script[0]["start"]
        order = min(ORDERS, key=lambda name: float(np.abs(weights_of(name) - model).max()))
        return self.script[round][order]

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None: ...

    def describe(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None: ...


class ScriptedServer:
    """Its test set finds class 0 easy and class 1 hard; every client's model scores `accuracy`."""

    def __init__(self, accuracy: float = 0.5) -> None:
        self.accuracy = accuracy

    def initial(self, seed: int) -> torch.Tensor:
        return torch.full((2,), 7.0)

    def test(self, seed: int, models: torch.Tensor) -> ServerTest:
        count = len(models)
        return ServerTest(np.full(count, self.accuracy), np.tile([1.0, 0.0], (count, 1)))


class Recorder:
    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def commit(self, round: int, records: Sequence[RoundRecord], states, snapshot, *, last: bool) -> None:
        self.records += records


def run(
    script, federation: Federation, *, detailed: bool = False, server: ScriptedServer | None = None
) -> tuple[list[RoundRecord], RoundState, ScriptedClients]:
    clients, kept = ScriptedClients(script), Recorder()
    plan = Plan(rounds=max(script), fraction=1.0, detailed=detailed)
    states = run_rounds([federation], {}, clients, server or ScriptedServer(), plan, kept)
    return kept.records, states[federation.name], clients


def federation(strategy: str, priority: str = "DS>LD>CB", **settings) -> Federation:
    rule = Rule(WeighingSettings(criteria=CRITERIA, priority=priority))
    return Federation("f", "f", 0, rule, strategy_of(AdjustSettings(strategy=strategy, **settings)))


def row(*accuracies: float) -> dict[str, float]:
    return dict(zip(ORDERS, accuracies, strict=True))


SCRIPT = {
    0: {"start": 0.1},
    1: row(0.5, 0.9, 0.9, 0.9, 0.9, 0.9),  # 0.5 > acc₀ = 0.1: nothing is tried although all others are better
    2: row(0.5, 0.9, 0.9, 0.9, 0.9, 0.9),  # a tie is accepted
    3: row(0.4, 0.45, 0.5, 0.8, 0.9, 0.9),  # fell: the third tried (LD>DS>CB) is the first not below .5
    4: row(0.9, 0.9, 0.45, 0.3, 0.2, 0.47),  # fell; after LD>DS>CB come LD>CB>DS, CB>DS>LD, CB>LD>DS, DS>LD>CB
    5: row(0.6, 0.7, 0.7, 0.7, 0.88, 0.7),  # all below .9: the best, CB>DS>LD, becomes the reference
    6: row(0.1, 0.1, 0.1, 0.1, 0.88, 0.1),  # ties with the lowered reference
}


def test_six_rounds_by_hand():
    records, state, clients = run(SCRIPT, federation("online"))
    kept = [show_priority(record.order, CRITERIA) for record in records[1:]]
    assert kept == ["DS>LD>CB", "DS>LD>CB", "LD>DS>CB", "DS>LD>CB", "CB>DS>LD", "CB>DS>LD"]
    assert [record.accuracy for record in records] == pytest.approx([0.1, 0.5, 0.5, 0.5, 0.9, 0.88, 0.88])
    assert [record.tests for record in records] == [0, 0, 0, 2, 4, 5, 0]
    assert state.orders.testing_rounds == 11
    assert state.orders.reference == pytest.approx(0.88)
    assert state.parameters.numpy() == pytest.approx(weights_of("CB>DS>LD"), rel=2e-7)  # float32 of float64 weights
    tried = [show_priority(order, CRITERIA) for order, _ in records[4].tried]
    assert tried == ["LD>DS>CB", "LD>CB>DS", "CB>DS>LD", "CB>LD>DS", "DS>LD>CB"]
    assert all(len(record.tried) == record.tests + 1 for record in records[1:])
    # The candidates of a round are tested in one question, never one by one.
    assert [count for _, count, _ in clients.questions] == [1, 1, 1, 1, 5, 1, 5, 1, 5, 1]
    # What is recorded of the clients is what the kept order weighed.
    assert records[3].weighing is not None
    assert records[3].weighing.weights == pytest.approx(weights_of("LD>DS>CB"))


class Divided(ScriptedClients):
    """Both clients agree but for one order, which the client that never chooses finds perfect."""

    def _answer(self, question: Question) -> Evaluations:
        answer = super()._answer(question)
        favourite = [float(np.abs(weights_of("DS>CB>LD") - model.numpy()).max()) < 1e-6 for model in question.models]
        reports = [place for place, name in enumerate(answer.clients) if not chooses(name)]
        answer.scores[np.ix_(favourite, reports)] = 1.0
        return answer


def test_rows_that_report_do_not_choose_where_they_are_apart():
    assert sorted(map(chooses, ("a", "b"))) == [False, True]
    script = {0: {"start": 0.6}, 1: row(0.5, 0.4, 0.55, 0.45, 0.4, 0.4)}
    found = {}
    for report in ("same", "apart"):
        rule = Rule(WeighingSettings(criteria=CRITERIA, adjust=AdjustSettings(report=report)))
        assert rule.settings.adjust is not None
        kept = Recorder()
        one = Federation("f", "f", 0, rule, strategy_of(rule.settings.adjust))
        run_rounds([one], {}, Divided(script), ScriptedServer(), Plan(rounds=1, fraction=1.0), kept)
        found[report] = kept.records[-1]
    assert show_priority(found["same"].order, CRITERIA) == "DS>CB>LD"
    assert show_priority(found["apart"].order, CRITERIA) == "LD>DS>CB"
    assert [accuracy for _, accuracy in found["apart"].tried] == pytest.approx([0.5, 0.4, 0.55, 0.45, 0.4, 0.4])
    assert found["apart"].accuracy == pytest.approx(0.55)


def test_greedy_tests_all_orders_in_every_round():
    records, state, _ = run(SCRIPT, federation("greedy"))
    assert [record.tests for record in records[1:]] == [5] * 6
    assert [record.accuracy for record in records[1:]] == pytest.approx([0.9, 0.9, 0.9, 0.9, 0.88, 0.88])
    assert state.orders.testing_rounds == 30


def test_the_bandit_asks_for_one_more_at_most():
    records, _, clients = run(SCRIPT, federation("bandit"))
    assert all(record.tests <= 1 for record in records)
    assert max(count for _, count, _ in clients.questions) == 1


def test_a_budget_holds_over_the_run():
    records, state, _ = run(SCRIPT, federation("online", budget=3))
    assert [record.tests for record in records[1:]][:3] == [0, 0, 2]
    assert state.orders.testing_rounds == 3


def test_right_and_wrong_per_sample_are_those_of_the_order_kept():
    script = {0: {"start": 0.6}, 1: row(0.55, 0.4, 0.8, 0.9, 0.9, 0.9)}
    records, _, clients = run(script, federation("online"), detailed=True)
    assert show_priority(records[1].order, CRITERIA) == "LD>DS>CB"
    # Of the first candidate (.4) both would be wrong, of the order that began (.55) the second.
    assert records[1].evaluations is not None
    assert records[1].evaluations.right is not None
    assert records[1].evaluations.right.tolist() == [True, True]
    assert clients.questions[-1] == (1, 1, True)


def test_all_performances_zero_keep_the_old_model():
    rule = Rule(WeighingSettings(criteria=("VP",), when_zero="keep"))
    script = {0: {"start": 0.2}, 1: row(*[0.9] * 6)}
    records, state, _ = run(script, Federation("f", "f", 0, rule), server=ScriptedServer(accuracy=0.0))
    assert records[1].kept_old
    assert state.parameters.tolist() == [7.0, 7.0]
    rule = Rule(WeighingSettings(criteria=("VP",)))
    records, state, _ = run(script, Federation("f", "f", 0, rule), server=ScriptedServer(accuracy=0.0))
    assert not records[1].kept_old
    assert state.parameters.tolist() == [0.5, 0.5]


def test_the_adaptive_loss_travels_with_the_next_task():
    rule = Rule(WeighingSettings(criteria=("VP",)))
    script = {0: {"start": 0.2}, 1: row(*[0.9] * 6), 2: row(*[0.9] * 6)}
    records, state, _ = run(script, Federation("f", "f", 0, rule, loss=ClassLoss()))
    assert records[1].loss is not None
    assert records[1].loss.class_weights is None
    assert records[2].loss is not None
    assert records[2].loss.class_weights == (1 / 1.1, 1 / 0.1)
    assert state.loss.class_weights == (1 / 1.1, 1 / 0.1)
    assert records[1].server_macro_f1 == 0.5


def test_orders_of_three_criteria_weigh_these_clients_differently():
    found = {tuple(np.round(weights_of(order), 6)) for order in ORDERS}
    assert len(found) == len(list(permutations(CRITERIA)))
