"""TERM: tilted weights, more to clients with high losses (Li et al. 2021, §4; federated in the authors' code).

    wᵢ = e^(t Fᵢ) / (n Z),   Fᵢ: the loss of the received model on client i's rows
    Z ← s·Z + (1 − s)·mean e^(t Fⱼ), from Z = 0

With s = 0 the weights sum to 1. The authors' code estimates Z over rounds with s = 0.5, so that its first step is twice
as long; losses are counted from the cohort's largest, as there.
https://openreview.net/forum?id=K5YasWXZT3O
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from steelyard.weighing.policy import AppliesTo, CohortView, Floats, Measures, Policy, policy

ESTIMATE = "term/estimate"


@policy("term")
class Term(Policy):
    """Weights tilted by losses; use it for fairness (t > 0), or against outlying clients (t < 0)."""

    criteria = ("LB",)

    t: float = 0.1
    """t: the tilt; the larger, the more the worst-off count. 0.1 is the authors' default."""
    smooth: float = Field(default=0.0, ge=0, lt=1)
    """s: how much of the last estimate of Z stays; 0.5 in the authors' code. Above 0 the weights sum to 1 on average
    only."""

    @property
    def applies_to(self) -> AppliesTo:
        return "updates" if self.smooth else "shares"

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        losses = measures["LB"]
        # The exponents count from the largest product, as in a softmax: with t < 0 that of the smallest loss.
        tilted = np.exp(self.t * (losses - (losses.max() if self.t >= 0 else losses.min())))
        if not self.smooth:
            return tilted
        before = view.memory.get(ESTIMATE, 0.0)
        estimate = self.smooth * before + (1 - self.smooth) * float(tilted.mean())
        view.remember(ESTIMATE, estimate)
        return tilted / (estimate * len(tilted))
