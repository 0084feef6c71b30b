"""What looks at the clients' accuracy is refused before the first round where nobody tells one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.rounds.scripted import Clients, Kept, Server, federation

from steelyard.errors import UserError
from steelyard.messages import Evaluations, Failure
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Plan
from steelyard.rounds.tested import check_tested
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
    clients, kept = Clients(scores=lambda _: ()), Kept()
    with pytest.raises(UserError, match=r"^rounds\.stop_at_target: "):
        run_rounds([federation()], {}, clients, Server(), STOPPING, kept)
    assert (clients.tasks, kept.rounds) == ([], [])
    run_rounds([federation()], {}, clients, Server(), PLAIN, kept)
    assert [np.isnan(record.accuracy) for record in kept.records] == [True] * 3
