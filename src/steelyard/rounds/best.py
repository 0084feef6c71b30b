"""The best round of a federation: chosen on rows that do not report, and how long nothing better may come."""

from __future__ import annotations

import math

from steelyard.base.measures import TASKS, measure_of
from steelyard.clients.protocol import Server
from steelyard.messages.payloads import ServerTest
from steelyard.rounds.state import Best, Draft, Plan
from steelyard.rounds.testing import choosers


def after_round(draft: Draft, server: Server, plan: Plan) -> tuple[Best | None, bool]:
    """Return the best round so far, and whether none better came for too long; only tested rounds count."""
    best, round = draft.before.best, draft.before.round + 1
    score = _score(draft, server, plan)
    if math.isnan(score):
        return best, False
    # Of equals the earlier round stays.
    if best is None or score > best.score:
        model = draft.model if plan.keeps_best else draft.model[:0]
        return Best(round, score, model), False
    return best, plan.patience is not None and round - best.round >= plan.patience


def _score(draft: Draft, server: Server, plan: Plan) -> float:
    """Return the score of a round's model on the rows that choose, more is better; NaN where it has none."""
    if plan.chosen_by is None or draft.answer is None:
        return math.nan
    if plan.chosen_by == "server":
        test = server.test(draft.federation.seed, draft.model[None], plan.measure)
        return _server_score(test) if plan.measure is None else float(test.errors[plan.measure.name][0])
    return float(choosers(draft.answer).overall(plan.measure)[0])


def _server_score(test: ServerTest) -> float:
    figures = {name: float(values[0]) for name, values in test.errors.items()} or {"accuracy": float(test.accuracy[0])}
    main = next(task.figure for task in TASKS.values() if task.figure in figures)
    return -figures[main] if measure_of(main).less_is_better else figures[main]
