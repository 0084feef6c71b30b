"""What each client of a round added to the new model, from its update alone: nobody trains again.

A coalition's model is the rule's own: its weights, scaled so that those of the coalition sum to what all had, through
the same combining and the same step of the server. A coalition without weight leaves the model as it was, so a client
whom the rule gives no weight adds nothing. The worth of a coalition is how much better its model is than the received
one. Values are also kept for groups of test rows, so that an interval over rows needs no single row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from steelyard.base.errors import UserError
from steelyard.base.measures import Z
from steelyard.base.randomness import generator
from steelyard.base.tallies import quotient
from steelyard.clients.protocol import Clients, Server
from steelyard.messages.payloads import blocks
from steelyard.messages.updates import Counts, Floats, Question, RowTests
from steelyard.rounds.plan import AGREEMENT, ContributionSettings, Measure, RoundValues
from steelyard.rounds.state import Combine, Draft
from steelyard.weighing.cohort import MOST_TESTED
from steelyard.weighing.policy import cosines
from steelyard.weighing.shapley import Coalitions, shapley_values

GROUPS = 64
"""Test rows are put into so many groups, by their place in the test set."""

Tested = tuple[Floats, Counts]
"""How good models are on each group of test rows, more being better [models, groups], and the rows of each group."""
Test = Callable[[torch.Tensor], Tested]


def value_round(
    draft: Draft, clients: Clients, server: Server, settings: ContributionSettings, round: int
) -> tuple[RoundValues, ...]:
    """Return what each client of a finished draft added; nothing where nobody was weighed.

    With Shapley values come those of leaving one out: their coalitions are tested anyway.
    """
    weighing, combine, names = draft.weighing, draft.combine, draft.updates.clients
    if weighing is None or combine is None or draft.kept_old:
        return ()
    if settings.method == "classes":
        return (_by_classes(draft, server, weighing.weights),)
    test = tester(settings.measure, draft.federation.name, draft.federation.seed, round, clients, server)
    sizes: list[Counts] = []

    def worth(coalitions: Coalitions) -> Floats:
        good, counts = _in_parts(test, combine, draft.before.parameters, _shares(weighing.weights, coalitions))
        sizes.append(counts)
        return overall_first(good, counts)

    count = len(names)
    few = np.vstack([np.zeros((1, count)), np.ones((1, count)), 1 - np.eye(count)]) > 0
    one_less = worth(few)
    before, after = float(one_less[0, 0]), float(one_less[1, 0])
    sign = -1.0 if settings.measure.endswith("loss") else 1.0
    level = (sign * before, sign * after)
    left_out = RoundValues(
        settings.measure, "leave-one-out", names, one_less[1] - one_less[2:], np.zeros(count), sizes[0], *level
    )
    if settings.method == "leave-one-out":
        return (left_out,)
    chance = generator(draft.federation.seed, round, purpose="shapley")
    found = shapley_values(count, worth, lambda: chance)
    error = (found.high - found.low)[:, 0] / (2 * Z)
    return (RoundValues(settings.measure, "shapley", names, found.values, error, sizes[0], *level), left_out)


def _shares(weights: Floats, coalitions: Coalitions) -> Floats:
    """Return the rule's weights within each coalition, scaled to the sum that all have: [coalitions, clients]."""
    kept = coalitions * weights
    totals = kept.sum(axis=1, keepdims=True)
    return quotient(kept * weights.sum(), totals, 0.0)


def _in_parts(test: Test, combine: Combine, received: torch.Tensor, weights: Floats) -> Tested:
    """Test the model of each row of weights, some models at a time; a row without weight is the received model."""
    parts: list[Tested] = []
    for block in blocks(len(weights), received.numel(), MOST_TESTED):
        rows = weights[block]
        some = rows.any(axis=1)
        models = received.expand(len(rows), -1).clone()
        if some.any():
            models[torch.from_numpy(np.flatnonzero(some))] = combine.models(rows[some]).to(models.device, models.dtype)
        parts.append(test(models))
    good, sizes = np.concatenate([good for good, _ in parts]), parts[0][1]
    # A model that explodes is worth no less than the worst of the others.
    finite = np.isfinite(good)
    worst = np.min(np.where(finite, good, np.inf), axis=0)
    return np.where(finite, good, np.where(np.isfinite(worst), worst, 0.0)), sizes


def overall_first(good: Floats, sizes: Counts) -> Floats:
    """Return [models, 1 + groups]: the mean over all rows before those of the groups."""
    return np.concatenate([(good @ sizes / sizes.sum())[:, None], good], axis=1)


def tester(measure: Measure, federation: str, seed: int, round: int, clients: Clients, server: Server) -> Test:
    """Return what tests models by a measure, on the server's rows or on all clients'; more is always better."""
    if measure in ("local-loss", "local-accuracy"):

        def on_clients(models: torch.Tensor) -> Tested:
            (answer,) = clients.evaluate([Question(federation, seed, round, models)])
            if not answer.samples.any():
                raise UserError(f"contributions.measure: got '{measure}', and no client tests models; {_ALLOWED}")
            return (-answer.losses if measure == "local-loss" else answer.scores), answer.samples

        return on_clients

    def on_server(models: torch.Tensor) -> Tested:
        tests = server.row_tests(seed, models)
        if tests is None:
            raise UserError(
                f"contributions.measure: got '{measure}', and the server has no rows to test on; {_ALLOWED}"
            )
        return _grouped(tests, measure)

    return on_server


_ALLOWED = "allowed: loss or accuracy where the server holds rows, local-loss or local-accuracy where clients test"


def _grouped(tests: RowTests, measure: Measure) -> Tested:
    if measure == "accuracy" and tests.right is None:
        raise UserError("contributions.measure: got 'accuracy' for data without classes; allowed: loss, local-loss")
    each = -tests.losses if tests.right is None or measure == "loss" else tests.right.astype(np.float64)
    rows = each.shape[1]
    group = np.arange(rows) % min(GROUPS, rows)
    sizes = np.bincount(group)
    means = np.stack([each[:, group == number].mean(axis=1) for number in range(len(sizes))], axis=1)
    return means, sizes.astype(np.int64)


def _by_classes(draft: Draft, server: Server, weights: Floats) -> RoundValues:
    """Return the cosine of each client's update with the rule's, by class in the last layer, as ShapFed has it."""
    models, layer = draft.updates.payload.dense, server.output_layer(draft.federation.seed)
    if layer is None or models is None:
        raise UserError(
            "contributions.method: got 'classes', and the server knows no last layer here; allowed: shapley, "
            "leave-one-out"
        )
    grams = models.grams_of(draft.before.parameters, layer)
    classes = np.stack([cosines(gram, weights) for gram in grams], axis=1)
    sizes = np.ones(classes.shape[1], dtype=np.int64)
    none = np.zeros(len(classes))
    return RoundValues(
        AGREEMENT, "classes", draft.updates.clients, overall_first(classes, sizes), none, sizes, 0.0, 0.0
    )
