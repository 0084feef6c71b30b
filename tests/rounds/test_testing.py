"""What looks at the clients' accuracy is refused before the first round where nobody tells one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from tests.rounds.scripted import Clients, Recorder, Server, federation, state

from steelyard.errors import UserError
from steelyard.messages import Evaluations, Failure, Floats, Task
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Draft, Plan
from steelyard.rounds.testing import _ask_without, _decide, check_tested
from steelyard.weighing.adjusting import AdjustSettings
from steelyard.weighing.needs import Needs
from steelyard.weighing.policies.policy import Policy
from steelyard.weighing.priorities import Decision, Order, OrderState
from steelyard.weighing.view import Memory
from steelyard.weighing.weights import Weighing

PLAIN = Plan(rounds=2, fraction=1.0)
STOPPING = Plan(rounds=2, fraction=1.0, stop_at=(0.5, 0.5, False))
ADJUSTED: dict[str, Any] = {"criteria": ("DS", "LD"), "adjust": AdjustSettings()}


def answered(*clients: str, samples: int = 3, failures: tuple[Failure, ...] = ()) -> Evaluations:
    counts, scores = np.full(len(clients), samples), np.zeros((1, len(clients)))
    return Evaluations("f", 0, clients, counts, scores, scores, failures=failures)


@pytest.mark.parametrize(
    ("rule", "plan", "line"),
    [
        (
            {},
            STOPPING,
            "rounds.stop_at_target: got true, and no client tests the model (b: no); allowed: false, or clients that "
            "test",
        ),
        (
            ADJUSTED,
            PLAIN,
            "weighing.adjust: 'f' compares accuracies, and no client tests the model (b: no); allowed: a fixed order, "
            "or clients that test",
        ),
    ],
)
def test_who_needs_an_accuracy_is_refused_where_nobody_tells_one(rule: dict[str, Any], plan: Plan, line: str) -> None:
    for found in (answered(), answered("a", samples=0)):
        with pytest.raises(UserError, match=r"no client tests the model; allowed: "):
            check_tested(federation(**rule), plan, found)
    with pytest.raises(UserError) as refused:
        check_tested(federation(**rule), plan, answered(failures=(Failure("b", "no"), Failure("c", "late"))))
    assert str(refused.value) == line
    check_tested(federation(**rule), plan, answered("a", failures=(Failure("b", "no"),)))  # One is enough.
    check_tested(federation(), PLAIN, answered())  # And nobody else needs any.


@pytest.mark.parametrize(
    ("clients", "side"),
    [("ABC", "3 clients that test none chooses"), ("EE", "2 clients that test all choose and none")],
)
def test_apart_needs_clients_that_choose_and_clients_that_report(clients: str, side: str) -> None:
    rule = {"criteria": ("DS", "LD"), "adjust": AdjustSettings(report="apart")}
    with pytest.raises(UserError, match=rf"weighing\.adjust\.report: got 'apart', and of {side}.*allowed: 'same'"):
        check_tested(federation(**rule), PLAIN, answered(*clients))
    check_tested(federation(**rule), PLAIN, answered(*clients, "E", "A"))
    check_tested(federation(**ADJUSTED), PLAIN, answered(*clients))


def test_the_loop_asks_before_anybody_trains() -> None:
    clients, kept = Clients(scores=lambda _: ()), Recorder()
    with pytest.raises(UserError, match=r"^rounds\.stop_at_target: "):
        run_rounds([federation()], {}, clients, Server(), STOPPING, kept)
    assert (clients.tasks, kept.rounds) == ([], [])
    run_rounds([federation()], {}, clients, Server(), PLAIN, kept)
    assert [np.isnan(record.accuracy) for record in kept.records] == [True] * 3


@pytest.mark.parametrize("strategy", ["online", "greedy", "bandit"])
def test_a_round_that_nobody_tests_teaches_a_strategy_nothing(strategy: Literal["online", "greedy", "bandit"]) -> None:
    rule: dict[str, Any] = {"criteria": ("DS", "LD"), "adjust": AdjustSettings(strategy=strategy)}
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
    """Remembers what each client scored."""

    needs: ClassVar[Needs] = Needs(client_tests=True)

    def after_tests(self, memory: Mapping[str, Memory], scores: Mapping[str, float]) -> dict[str, Memory]:
        return {"seen": {**memory["seen"], **scores}}


class Noting:
    """Gives models of zeros, and notes the weights that they were asked for."""

    def __init__(self) -> None:
        self.asked: list[Floats] = []

    def models(self, weights: Floats) -> torch.Tensor:
        self.asked.append(weights)
        return torch.zeros(len(weights), 10)


def drafted(weights: list[float], policy: Policy | None = None, **given: Any) -> Draft:
    names, shares = tuple("abcd"[: len(weights)]), np.array(weights)
    updates = Clients()._trained(Task("f", 3, 5, names, torch.zeros(10)))
    weighing = Weighing(("DS",), shares[:, None], shares[:, None], shares, shares, (), uniform=False)
    kept = {"combine": Noting(), "weighing": weighing, "memory": {"seen": {"z": 1.0}, "other": 2}, **given}
    found = replace(federation(), rule=SimpleNamespace(policy=policy or Scored()))  # type: ignore[arg-type]
    return Draft(found, state(4), updates, model=torch.zeros(10), order=(0,), **kept)


def test_each_client_scores_the_model_of_the_others() -> None:
    clients = Clients(scores=lambda _: (0.5, 0.25, float("nan")))
    one, other = drafted([0.5, 0.25, 0.125, 0.125]), drafted([1.0, 0.0, 0.0])
    _ask_without([one, other], clients, PLAIN, 5)
    assert isinstance(one.combine, Noting)
    assert isinstance(other.combine, Noting)
    assert one.combine.asked[0].tolist() == [
        [0.0, 0.5, 0.25, 0.25],
        pytest.approx([2 / 3, 0, 1 / 6, 1 / 6]),
        pytest.approx([4 / 7, 2 / 7, 0, 1 / 7]),
        pytest.approx([4 / 7, 2 / 7, 1 / 7, 0]),
    ]
    # Who has all the weight is missing from its own model, which the others then make alike.
    assert other.combine.asked[0].tolist() == [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    # Each further model scores an eighth less; c scores no number, and d tests nothing.
    assert one.memory == {"seen": {"z": 1.0, "a": 0.5, "b": 0.125}, "other": 2}
    assert other.memory == one.memory
    assert clients.calls == 1
    assert [(asked.federation, asked.seed, asked.round, asked.detailed) for asked in clients.questions] == [
        ("f", 3, 5, False)
    ] * 2
    assert [len(asked.models) for asked in clients.questions] == [4, 3]


def test_nobody_is_asked_where_there_are_no_others_or_nothing_was_combined() -> None:
    clients = Clients()
    plain: Any = SimpleNamespace(needs=Needs())
    drafts = [
        drafted([1.0]),
        drafted([0.5, 0.5], plain),
        drafted([0.5, 0.5], kept_old=True),
        drafted([0.5, 0.5], weighing=None),
        drafted([0.5, 0.5], combine=None),
    ]
    _ask_without(drafts, clients, PLAIN, 5)
    assert clients.questions == []
    # Others of the same round are asked nonetheless.
    _ask_without([*drafts, drafted([0.5, 0.5])], clients, PLAIN, 5)
    assert len(clients.questions) == 1


def test_an_order_that_nobody_tested_is_the_worst_of_all() -> None:
    seen: list[Any] = []

    def decide(before: OrderState, orders: list[Order], accuracies: list[float]) -> Decision:
        seen.append((before, orders, accuracies))
        return Decision(0, 1, OrderState((1, 0), 0.5))

    draft = drafted([0.5, 0.5])
    draft.federation = replace(draft.federation, strategy=SimpleNamespace(decide=decide))  # type: ignore[arg-type]
    draft.tried = (((0, 1), 0.5), ((1, 0), float("nan")), ((0, 1), 0.25))
    _decide(draft, None, None)
    assert seen == [(draft.before.orders, [(0, 1), (1, 0), (0, 1)], [0.5, -np.inf, 0.25])]
    assert (draft.orders, draft.tests) == (OrderState((1, 0), 0.5), 1)
    assert [order for order, _ in draft.tried] == [(0, 1), (1, 0)]
