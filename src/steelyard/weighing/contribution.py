"""Criteria that the server measures on the updates themselves: agreement with the others, and what each adds.

Nobody can inflate them by what it says; `agreement` needs no data of the server, `gain` and Shapley values need its
test set.
"""

from __future__ import annotations

import numpy as np

from steelyard.base.randomness import generator
from steelyard.messages.updates import Floats
from steelyard.weighing.criteria import CohortView, server_criterion
from steelyard.weighing.shapley import Coalitions, Values, shapley_values


@server_criterion("AG", description="agreement: mean cosine of the client's update with the others', at least 0")
def agreement(view: CohortView) -> Floats:
    """max(0, mean_{b≠a} cos(Θ_a − Θ, Θ_b − Θ)): whose update points where those of the others point.

    An update of length 0 agrees with nobody; a client alone in its cohort gets 1.
    """
    gram = view.gram
    count = len(gram)
    if count < 2:
        return np.ones(count)
    norms = np.sqrt(np.diag(gram))
    scale = np.outer(norms, norms)
    cosines = np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)
    np.fill_diagonal(cosines, 0.0)
    return np.maximum(cosines.sum(axis=1) / (count - 1), 0.0)


@server_criterion(
    "AS", description="agreement with the sum of the others' updates: its cosine, at least 0", maximum=1.0
)
def agreement_with_sum(view: CohortView) -> Floats:
    """max(0, cos(Θ_a − Θ, Σ_{b≠a} (Θ_b − Θ))): long updates of others count more than in AG; 0 for one alone."""
    return np.clip(cosines_with_sum(view.gram), 0.0, 1.0)


def cosines_with_sum(gram: Floats) -> Floats:
    """Return the cosine of each update with the sum of the others; 0 for one alone, and for one of length 0."""
    own = np.diag(gram)
    along = gram.sum(axis=1) - own
    lengths = np.sqrt(own * np.maximum(gram.sum() - 2 * gram.sum(axis=1) + own, 0.0))
    return np.divide(along, lengths, out=np.zeros_like(own), where=lengths > 1e-24)


@server_criterion(
    "GA",
    description="gain: how much the server's loss grows when the client is left out, at least 0",
    needs_test_set=True,
    uses_claims=True,
)
def gain(view: CohortView) -> Floats:
    """max(0, L(Θ without a) − L(Θ)), with Θ the size-weighted mean of the cohort: leave-one-out, n + 1 tests."""
    count = len(view.samples)
    if count < 2:
        return np.ones(count)
    losses = view.test(coalition_weights(view, np.vstack([np.ones(count), 1.0 - np.eye(count)]) > 0)).losses
    return np.maximum(np.nan_to_num(losses[1:] - losses[0], nan=0.0, posinf=0.0, neginf=0.0), 0.0)


@server_criterion(
    "SV",
    description="Shapley value: how much the client lowers the server's loss, over all coalitions, at least 0",
    needs_test_set=True,
    uses_claims=True,
)
def shapley_value(view: CohortView) -> Floats:
    """max(0, φ_a), with a coalition worth the fall of the server's loss at its size-weighted mean (`contributions`)."""
    return np.maximum(contributions(view).values, 0.0)


def contributions(view: CohortView) -> Values:
    """Return the Shapley values of a cohort in units of the server's loss; more than twelve clients are sampled."""

    def worth(coalitions: Coalitions) -> Floats:
        losses = view.test(coalition_weights(view, coalitions)).losses
        # A model that explodes is worth nothing more than the largest loss among the others.
        finite = np.isfinite(losses)
        worst = float(losses[finite].max()) if finite.any() else 0.0
        return -np.where(finite, losses, worst)

    return shapley_values(len(view.samples), worth, lambda: generator(view.seed, view.round, purpose="shapley"))


def coalition_weights(view: CohortView, coalitions: Coalitions) -> Floats:
    """Return the weights [coalitions, clients] of each coalition's mean by size; nobody has none."""
    kept = coalitions * view.samples
    # Where only clients without samples are in it, they count alike.
    kept = np.where(kept.any(axis=1, keepdims=True), kept, coalitions)
    totals = kept.sum(axis=1, keepdims=True)
    return np.divide(kept, totals, out=np.zeros(kept.shape), where=totals > 0)
