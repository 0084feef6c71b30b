"""Rounds in which other priority orders are tested beside the current one: what is asked, kept and recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from tests.rounds.scripted import Clients, Recorder, Server, federation, state

from steelyard.messages import Evaluations, Question
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Plan
from steelyard.weighing.adjusting import AdjustSettings, strategy_of
from steelyard.weighing.priorities import Decision, OrderState


def test_several_candidates_are_told_apart_and_the_kept_one_is_asked_again() -> None:
    """Each candidate scores ⅛ less than the one before; metrics come for the first of a question only."""
    clients, kept = Clients(scores=lambda round: (0.5, 0.5) if round else (0.0, 0.0)), Recorder()
    clients.metrics = True
    greedy = replace(federation(criteria=("DS", "LD", "MD")), strategy=Second())
    begun = replace(state(0), orders=OrderState((0, 1, 2), 0.9))
    states = run_rounds([greedy], {"f": begun}, clients, Server(), Plan(rounds=1, fraction=0.3), kept)
    (record,) = kept.records
    assert [len(question.models) for question in clients.questions] == [1, 3, 1]
    assert {(asked.federation, asked.seed, asked.round) for asked in clients.questions} == {("f", 3, 1)}
    assert record.order == (1, 0, 2)
    assert states["f"].parameters.tolist() == clients.questions[2].models[0].tolist()
    assert states["f"].parameters.tolist() == clients.questions[1].models[1].tolist()
    assert record.weighing is not None
    assert record.weighing.weights.tolist() == pytest.approx(
        states["f"].parameters[states["f"].parameters > 0].tolist()
    )
    assert record.tests == 2
    assert record.tried == (((0, 1, 2), 0.5), ((0, 2, 1), 0.5), ((1, 0, 2), 0.375))


@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_answer_that_is_missing_is_not_passed_over(call: int) -> None:
    """The combined model, the further candidates, and the one that was kept are asked for in calls of their own."""
    clients = Clients(scores=lambda _: (0.5, 0.5))
    clients.metrics, clients.forgets = True, call
    ordered = replace(federation(criteria=("DS", "LD", "MD")), strategy=Second())
    states = {"f": replace(state(0), orders=OrderState((0, 1, 2), 0.9))}
    with pytest.raises(ValueError, match="shorter"):
        run_rounds([ordered], states, clients, Server(), Plan(rounds=1, fraction=0.3), Recorder())
    clients.calls = 0
    with pytest.raises(ValueError, match="shorter"):
        run_rounds([replace(ordered)], {}, clients, Server(), Plan(rounds=1, fraction=0.3), Recorder())


def test_a_candidate_without_an_answer_is_not_passed_over() -> None:
    class Lazy(Clients):
        def _tested(self, question: Question) -> Evaluations:
            return super()._tested(replace(question, models=question.models[:2]))

    ordered = replace(federation(criteria=("DS", "LD", "MD")), strategy=Second())
    states = {"f": replace(state(0), orders=OrderState((0, 1, 2), 0.9))}
    clients = Lazy(scores=lambda _: (0.5, 0.5))
    with pytest.raises(ValueError, match="shorter"):
        run_rounds([ordered], states, clients, Server(), Plan(rounds=1, fraction=0.3), Recorder())


def test_a_model_that_is_kept_for_want_of_worth_tries_no_orders() -> None:
    clients, kept = Clients(), Recorder()
    clients.worthless = True
    greedy = strategy_of(AdjustSettings(strategy="greedy"))
    ordered = replace(federation(criteria=("DS", "LD"), when_zero="keep"), strategy=greedy)
    states = {"f": replace(state(0), orders=OrderState((0, 1), 0.9))}
    run_rounds([ordered], states, clients, Server(), Plan(rounds=1, fraction=0.3), kept)
    (record,) = kept.records
    assert record.kept_old
    assert record.weighing is not None
    assert record.updates is not None
    assert (record.order, record.tests, len(clients.questions)) == ((0, 1), 0, 1)


def test_a_rule_without_an_order_tries_none() -> None:
    clients = Clients()
    mean = replace(federation(criteria=("DS", "LD"), score="mean"), strategy=Second())
    with pytest.raises(AssertionError):  # it may decide, on the one order there is, and finds no other
        run_rounds([mean], {"f": state(0)}, clients, Server(), Plan(rounds=1, fraction=0.3), Recorder())
    assert len(clients.questions) == 1


def test_what_is_recorded_of_the_kept_candidate_is_its_own() -> None:
    clients, kept = Clients(scores=lambda _: (0.5, 0.25)), Recorder()
    ordered = replace(federation(criteria=("DS", "LD", "MD")), strategy=Other(2))
    states = {"f": replace(state(0), orders=OrderState((0, 1, 2), 0.9))}
    run_rounds([ordered], states, clients, Server(), Plan(rounds=1, fraction=0.3), kept)
    answer = kept.records[0].evaluations
    assert answer is not None
    assert answer.scores.tolist() == [[0.375, 0.125]]  # the second candidate has ⅛ less than the first
    assert answer.losses.tolist() == [[0.625, 0.875]]
    assert len(clients.questions) == 2  # without metrics or samples there is nothing to ask again


def test_the_first_candidate_has_its_metrics_already() -> None:
    clients, kept = Clients(scores=lambda _: (0.5, 0.25)), Recorder()
    clients.metrics = True
    ordered = replace(federation(criteria=("DS", "LD", "MD")), strategy=Other(1))
    states = {"f": replace(state(0), orders=OrderState((0, 1, 2), 0.9))}
    done = run_rounds([ordered], states, clients, Server(), Plan(rounds=1, fraction=0.3), kept)
    assert len(clients.questions) == 2
    answer = kept.records[0].evaluations
    assert answer is not None
    assert (answer.scores.tolist(), answer.losses.tolist()) == ([[0.5, 0.25]], [[0.5, 0.75]])
    assert answer.metrics["recall"].tolist() == [float(done["f"].parameters.argmax())] * 2


@dataclass
class Other:
    """Tests two further orders and keeps one of them."""

    chosen: int

    def others(self, state: OrderState, accuracy: float, seed: int, round: int) -> Sequence[tuple[int, ...]]:
        return [(0, 2, 1), (1, 0, 2)]

    def decide(self, state: OrderState, tried: Sequence[tuple[int, ...]], accuracies: Sequence[float]) -> Decision:
        return Decision(self.chosen, 2, OrderState(tried[self.chosen], accuracies[self.chosen], 2))


class Second:
    """Tests three further orders and keeps the second of them, at the price of two tests."""

    def others(self, state: OrderState, accuracy: float, seed: int, round: int) -> Sequence[tuple[int, ...]]:
        assert (accuracy, seed, round) == (0.5, 3, 1)
        return [(0, 2, 1), (1, 0, 2), (1, 2, 0)]

    def decide(self, state: OrderState, tried: Sequence[tuple[int, ...]], accuracies: Sequence[float]) -> Decision:
        assert list(tried) == [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0)]
        assert list(accuracies) == [0.5, 0.5, 0.375, 0.25]
        return Decision(2, 2, OrderState(tried[2], accuracies[2], 2))
