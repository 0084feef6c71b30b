"""What looks at the clients' accuracy is refused before the first round where nobody tells one."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from tests.rounds.scripted import Clients, Recorder, Server, federation

from steelyard.errors import UserError
from steelyard.messages import Evaluations, Failure
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Plan
from steelyard.rounds.testing import check_tested
from steelyard.weighing.adjusting import AdjustSettings

PLAIN = Plan(rounds=2, fraction=1.0)
STOPPING = Plan(rounds=2, fraction=1.0, stop_at=(0.5, 0.5, False))
ADJUSTED: dict[str, Any] = {"criteria": ("DS", "LD"), "adjust": AdjustSettings()}


def answered(*clients: str, samples: int = 3, failures: tuple[Failure, ...] = ()) -> Evaluations:
    counts, scores = np.full(len(clients), samples), np.zeros((1, len(clients)))
    return Evaluations("f", 0, clients, counts, scores, scores, failures=failures)


@pytest.mark.parametrize(
    ("rule", "plan", "line"),
    [
        ({}, STOPPING, r"^rounds\.stop_at_target: got true, and no client tests the model \(b: no\); allowed: false"),
        (ADJUSTED, PLAIN, r"^weighing\.adjust: 'f' compares accuracies, and no client tests the model \(b: no\); "),
    ],
)
def test_who_needs_an_accuracy_is_refused_where_nobody_tells_one(rule: dict[str, Any], plan: Plan, line: str) -> None:
    for found in (answered(), answered("a", samples=0)):
        with pytest.raises(UserError, match=r"no client tests the model; allowed: "):
            check_tested(federation(**rule), plan, found)
    with pytest.raises(UserError, match=line):
        check_tested(federation(**rule), plan, answered(failures=(Failure("b", "no"),)))
    check_tested(federation(**rule), plan, answered("a", failures=(Failure("b", "no"),)))  # One is enough.
    check_tested(federation(), PLAIN, answered())  # And nobody else needs any.


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
