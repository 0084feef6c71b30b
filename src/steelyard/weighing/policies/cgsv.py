"""CGSV: reputations by cosine with the whole, on updates of one length (Xu et al. 2021).

    Θ ← Θ + Σ rᵢ·Γ·Δᵢ/‖Δᵢ‖;   φᵢ = cos(Δᵢ, that step);   r ← α r + (1 − α) φ, at least 0.001, divided by its sum

The first round takes sizes for r. Of the paper's two parts this is the weighing. Its second, that clients of low
reputation receive a sparser model, is not done. The server would send each client another model, and a task here has
one for its whole cohort. Γ is 0.5 for MNIST in the authors' code, 1 or 0.15 for others.
https://proceedings.neurips.cc/paper/2021/hash/8682cc30db9c025ecd3fee433f8ab54c-Abstract.html
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, PositiveFloat

from steelyard.weighing.policy import (
    AppliesTo,
    CohortView,
    Floats,
    Measures,
    Needs,
    Policy,
    by_client,
    cosines,
    policy,
    remember,
    to_weights,
)

REPUTATION = "cgsv/reputation"
LEAST = 1e-3


@policy("cgsv")
class Cgsv(Policy):
    """Reputation by agreement; use it where clients shall be paid for pulling the same way as the others."""

    needs = Needs(models=True, everyone=True)

    alpha: float = Field(default=0.95, ge=0, lt=1)
    """α: how much of a reputation stays from round to round."""
    length: PositiveFloat = 0.5
    """Γ: the length that every update is brought to."""

    @property
    def applies_to(self) -> AppliesTo:
        return "updates"

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        first = REPUTATION not in view.memory
        before = by_client(view.memory, REPUTATION, view, 0.0)
        shares = to_weights(measures["DS"])[0] if first else before
        weights = shares * self.length / (np.sqrt(np.diag(view.gram)) + 1e-7)
        reputation = self.alpha * before + (1 - self.alpha) * cosines(view.gram, weights)
        reputation = np.maximum(reputation, LEAST)
        remember(view, REPUTATION, reputation / reputation.sum())
        return weights
