"""Criteria that the server measures on the updates themselves: agreement with the others, and what each adds.

Nobody can inflate them by what it says; `agreement` needs no data of the server, `gain` needs its test set.
"""

from __future__ import annotations

import numpy as np

from steelyard.messages import Floats
from steelyard.weighing.criteria import CohortView, server_criterion


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
    "GA",
    description="gain: how much the server's loss grows when the client is left out, at least 0",
    needs_test_set=True,
    uses_claims=True,
)
def gain(view: CohortView) -> Floats:
    """max(0, L(Θ without a) − L(Θ)), with Θ the size-weighted mean of the cohort: leave-one-out, n + 1 tests."""
    sizes = np.asarray(view.samples, dtype=np.float64)
    count = len(sizes)
    if count < 2:
        return np.ones(count)
    kept = np.vstack([np.ones(count), 1.0 - np.eye(count)]) * sizes
    totals = kept.sum(axis=1, keepdims=True)
    # Where only clients without samples are left, they count alike.
    weights = np.where(totals > 0, kept / np.where(totals > 0, totals, 1.0), 1.0 / count)
    losses = view.test(weights).losses
    return np.maximum(np.nan_to_num(losses[1:] - losses[0], nan=0.0, posinf=0.0, neginf=0.0), 0.0)
