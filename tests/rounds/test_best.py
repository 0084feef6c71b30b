"""Which round is the best, on whose rows, and when nothing better comes for too long."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import assert_refused
from tests.rounds.scripted import NAMES, Clients, Server, federation, ran
from tests.rounds.test_testing import answered

from steelyard.base.tallies import Leading
from steelyard.messages.payloads import ServerTest
from steelyard.rounds.state import Plan
from steelyard.rounds.testing import check_tested
from steelyard.weighing.order import chooses

COURSE = (0.5, 0.75, 0.75, 0.25, 0.5, 1.0)
"""What round after round is worth, by rows that choose; of equals the earlier one stays."""


class Choosing(Server):
    """A server whose rows choose; a regression has errors in place of an accuracy."""

    def __init__(self, *, regression: bool) -> None:
        self.regression, self.rounds = regression, iter(COURSE)

    def test(self, seed: int, models: torch.Tensor, measure: Leading | None = None) -> ServerTest:
        worth = np.array([next(self.rounds)])
        if self.regression:
            return ServerTest(np.zeros(1), np.zeros((1, 0)), {"mae": worth, "rmse": 4 - worth})
        return ServerTest(worth, np.zeros((1, 2)))


def scores(round: int) -> tuple[float, ...]:
    """Clients that choose follow the course, and those that report its opposite."""
    return tuple(COURSE[round - 1] if chooses(name) else 1 - COURSE[round - 1] for name in NAMES[:5])


@pytest.mark.parametrize("chosen_by", ["clients", "server", "server, of a regression"])
def test_the_best_round_is_chosen_by_rows_that_do_not_report(chosen_by: str) -> None:
    assert 0 < sum(map(chooses, NAMES[:5])) < 5
    server = None if chosen_by == "clients" else Choosing(regression="regression" in chosen_by)
    plan: dict[str, Any] = {"chosen_by": chosen_by.split(",")[0], "keeps_best": True}
    done = ran(clients=Clients(scores=scores), server=server, rounds=5, fraction=0.1, **plan)
    best = done.state.best
    assert best is not None
    assert (best.round, best.score) == (2, 0.75 if "regression" not in chosen_by else 0.75 - 4)
    assert [round for round, _ in done.state.models] == [5, 2]
    assert torch.equal(best.parameters, ran(rounds=2, fraction=0.1).state.parameters)


def test_patience_ends_a_run_that_nothing_makes_better_and_keeps_no_model_by_itself() -> None:
    server = Choosing(regression=False)
    done = ran(server=server, rounds=6, fraction=0.1, chosen_by="server", patience=3)
    assert done.kept.rounds[-1] == (5, True)
    assert done.state.finished
    assert [round for round, _ in done.state.models] == [5]
    # Rounds that nobody tests choose nothing, and count all the same.
    server = Choosing(regression=False)
    done = ran(server=server, rounds=9, fraction=0.1, chosen_by="server", patience=3, evaluate_every=2)
    assert done.state.best is not None
    assert (done.state.best.round, done.state.round) == (4, 8)
    assert ran(rounds=3, fraction=0.1).state.best is None


@pytest.mark.parametrize("plan", [{"keeps_best": True}, {"patience": 2}])
def test_clients_that_choose_and_clients_that_report_are_needed(plan: dict[str, Any]) -> None:
    asked = Plan(rounds=2, fraction=1.0, chosen_by="clients", **plan)
    field = "rounds.keep: got 'best'" if "keeps_best" in plan else "rounds.patience: got 2"
    for found, why in ((answered(), "nobody tests"), (answered("A", "B", "C"), "none chooses"), (answered("E"), "all")):
        assert_refused(partial(check_tested, federation(), asked, found), field, why)
    check_tested(federation(), asked, answered("A", "E"))
