"""ShapFed-WA: weights by class-wise agreement in the last layer (Tastan et al. 2024).

    vᵢ = mean over classes c of cos(Δᵢ[c], Σⱼ wⱼ Δⱼ[c]),   Δ[c]: the row of the last layer that class c has, bias too
    v ← μ v + (1 − μ) vᵢ;   w = v / Σ v

The first weights are equal. A mean below 0 counts as 0: the authors' code would weigh such a client negatively. Their
broadcast of partly personal models is not done: a task here has one model for its whole cohort.
https://arxiv.org/abs/2406.00569
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from steelyard.weighing.policy import (
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

VALUES, WEIGHTS = "shapfed/values", "shapfed/weights"


@policy("shapfed")
class ShapFed(Policy):
    """Agreement class by class; use it where clients hold different classes and the whole update hides it."""

    criteria = ("EQ",)
    needs = Needs(models=True, task="classes", layers=True)

    mu: float = Field(default=0.9, ge=0, lt=1)
    """μ: how much of a value stays from round to round."""

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        weights = by_client(view.memory, WEIGHTS, view, 1.0 / len(view.clients))
        now = np.mean([cosines(gram, weights) for gram in view.class_grams], axis=0)
        values = self.mu * by_client(view.memory, VALUES, view, now) + (1 - self.mu) * now
        remember(view, VALUES, values)
        found = np.maximum(values, 0.0)
        remember(view, WEIGHTS, to_weights(found)[0])
        return found
