"""Testing a round's models on the clients, and those of other orders where a strategy wants them.

Nodes may answer no tests at all: then what looks at the clients' accuracy is refused, or rests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from steelyard.base.errors import UserError
from steelyard.clients.protocol import Clients
from steelyard.messages.updates import Evaluations, Question
from steelyard.rounds.state import Draft, Federation, Plan
from steelyard.weighing.order import Order, chooses
from steelyard.weighing.policy import Policy


def check_tested(federation: Federation, plan: Plan, first: Evaluations) -> None:
    """Refuse an early stop and orders that adapt where not one client tested the first model; call it before round 1.

    Afterwards clients may come and go: a round that nobody tests changes no order and stops nothing.
    """
    adjust = federation.rule.settings.adjust
    if first.samples.any():
        if adjust is not None and adjust.report == "apart":
            _check_both_sides(first, "weighing.adjust.report: got 'apart'", "'same'")
        if plan.chosen_by == "clients":
            _check_both_sides(first, f"{plan.choosing}, and the server has no rows", "rows at the server")
        return
    why = f" ({first.failures[0].client}: {first.failures[0].reason})" if first.failures else ""
    if plan.stop_at is not None:
        raise UserError(
            f"rounds.stop_at_target: got true, and no client tests the model{why}; allowed: false, or clients that test"
        )
    if plan.chosen_by == "clients":
        raise UserError(f"{plan.choosing}, and nobody tests the model{why}; allowed: 'last' without patience, or tests")
    if adjust is not None:
        raise UserError(
            f"weighing.adjust: '{federation.rule_name}' compares accuracies, and no client tests the model{why}; "
            "allowed: a fixed order, or clients that test"
        )


def _check_both_sides(first: Evaluations, field: str, allowed: str) -> None:
    """Refuse to choose and report apart where no name falls on one of the sides: nobody would choose, or report."""
    testing = [client for client, rows in zip(first.clients, first.samples, strict=True) if rows]
    if len({chooses(client) for client in testing}) < 2:
        side = "all choose and none reports" if chooses(testing[0]) else "none chooses"
        raise UserError(
            f"{field}, and of {len(testing)} clients that test {side}, by their names; allowed: {allowed}, or more "
            "clients"
        )


def choosing(federation: Federation, answer: Evaluations) -> Evaluations:
    """Return the answers that may choose an order: all, or with adjust.report = apart those of about half."""
    adjust = federation.rule.settings.adjust
    return answer if adjust is None or adjust.report == "same" else choosers(answer)


def choosers(answer: Evaluations) -> Evaluations:
    """Return the answers of those clients that choose where choosing and reporting are apart."""
    return answer.without([client for client in answer.clients if not chooses(client)])


def question(draft: Draft, models: torch.Tensor, plan: Plan, round: int, *, detailed: bool) -> Question:
    """Ask for a test of models [candidates, parameters], or of what the clients' own algorithm makes of them."""
    federation = draft.federation
    return Question(
        *(federation.name, federation.seed, round, models, detailed, federation.algorithm),
        rate=plan.rate(round),
        measure=plan.measure,
    )


def evaluate(drafts: Sequence[Draft], clients: Clients, plan: Plan, round: int, *, detailed: bool) -> None:
    """Test the combined models on every client; where a strategy wants more orders, test those together too.

    What is found stands in the drafts: the answers, the orders that were tried, and the one that is kept.
    """
    questions = [question(draft, draft.model[None], plan, round, detailed=detailed) for draft in drafts]
    extra: list[tuple[Draft, list[Order], torch.Tensor]] = []
    for draft, answer in zip(drafts, clients.evaluate(questions), strict=True):
        draft.answer = answer
        accuracy = float(choosing(draft.federation, answer).overall(plan.measure)[0])
        draft.tried = ((draft.order, accuracy),)
        others = _other_orders(draft, accuracy, round)
        if others and draft.weighing is not None and draft.combine is not None:
            weights = draft.federation.rule.candidates(draft.weighing.normalised, others, draft.updates.clients)
            extra.append((draft, others, draft.combine.models(weights)))
    more = [question(draft, models, plan, round, detailed=detailed) for draft, _, models in extra]
    answers = clients.evaluate(more) if more else []
    for (draft, others, models), answer in zip(extra, answers, strict=True):
        found = choosing(draft.federation, answer).overall(plan.measure).tolist()
        draft.tried += tuple(zip(others, found, strict=True))
        _decide(draft, models, answer)
    for draft in drafts:
        if draft.orders is None:
            _decide(draft, None, None)
    _ask_again([draft for draft in drafts if draft.partial], clients, plan, round, detailed=detailed)
    _ask_without(drafts, clients, plan, round)


def _ask_without(drafts: Sequence[Draft], clients: Clients, plan: Plan, round: int) -> None:
    """For policies that want it, have each client of a cohort score the model that the others alone would have made."""
    asked: list[tuple[Draft, Policy]] = []
    questions: list[Question] = []
    for draft in drafts:
        policy, weighing = draft.federation.rule.policy, draft.weighing
        if policy is None or not policy.needs.client_tests:
            continue
        if weighing is None or draft.combine is None or len(weighing.weights) < 2:
            continue
        others = weighing.weights * (1.0 - np.eye(len(weighing.weights)))
        totals = others.sum(axis=1, keepdims=True)
        # Where one client has all the weight, those without any make the model without it, all alike.
        alike = (1.0 - np.eye(len(others))) / (len(others) - 1)
        models = draft.combine.models(np.divide(others, totals, out=alike, where=totals > 0))
        asked.append((draft, policy))
        questions.append(question(draft, models, plan, round, detailed=False))
    for (draft, policy), answer in zip(asked, clients.evaluate(questions) if questions else [], strict=True):
        place = {name: column for column, name in enumerate(answer.clients)}
        scores = {
            name: float(answer.scores[row, place[name]])
            for row, name in enumerate(draft.updates.clients)
            if name in place and math.isfinite(answer.scores[row, place[name]])
        }
        draft.memory = {**draft.memory, **policy.after_tests(draft.memory, scores)}


def _ask_again(drafts: Sequence[Draft], clients: Clients, plan: Plan, round: int, *, detailed: bool) -> None:
    """Right or wrong per sample and further metrics come for the first candidate only: get them for the one kept."""
    if not drafts:
        return
    questions = [question(draft, draft.model[None], plan, round, detailed=detailed) for draft in drafts]
    for draft, answer in zip(drafts, clients.evaluate(questions), strict=True):
        draft.answer = answer


def _other_orders(draft: Draft, accuracy: float, round: int) -> list[Order]:
    if not draft.federation.rule.ordered or math.isnan(accuracy):
        return []
    return list(draft.federation.strategy.others(draft.before.orders, accuracy, draft.federation.seed, round))


def _decide(draft: Draft, models: torch.Tensor | None, answer: Evaluations | None) -> None:
    orders, accuracies = [order for order, _ in draft.tried], [accuracy for _, accuracy in draft.tried]
    if math.isnan(accuracies[0]):
        # Nobody tested it, all who do having left: there is nothing to learn from, and the last accuracy stays known.
        return
    accuracies = [-math.inf if math.isnan(accuracy) else accuracy for accuracy in accuracies]
    decision = draft.federation.strategy.decide(draft.before.orders, orders, accuracies)
    draft.orders, draft.tests = decision.state, decision.tests
    # Candidates are tested together; those that the strategy did not need are neither counted nor recorded.
    draft.tried = draft.tried[: max(decision.tests, decision.chosen) + 1]
    if decision.chosen > 0 and models is not None and answer is not None and draft.weighing is not None:
        # The first order was tested before and alone: its answer is not among those of the others.
        other = decision.chosen - 1
        draft.order = orders[decision.chosen]
        draft.model = models[other]
        draft.weighing = draft.federation.rule.weigh(draft.weighing.raw, draft.order, clients=draft.updates.clients)
        if draft.tensors and draft.combine is not None:
            draft.tensors = draft.combine.step(draft.weighing.weights)[1]
        draft.answer = replace(
            answer,
            scores=answer.scores[other : other + 1],
            losses=answer.losses[other : other + 1],
            tallies=None if answer.tallies is None else answer.tallies[other : other + 1],
        )
        draft.partial = other > 0 and (answer.right is not None or bool(answer.metrics))
