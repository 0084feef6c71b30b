"""FedSCS: stable cosine similarity with the others (Haque and Markopoulos 2025; NVFlare's pull request 5240).

    ρᵢ = max(0, cos(Δᵢ, Σ_{j≠i} Δⱼ))
    sᵢ ← (t−1)/t·sᵢ + ρᵢ/t, from 1;   νᵢ = |sᵢ − sᵢ before| / sᵢ before;   wᵢ ∝ sᵢ/(1 + νᵢ)

A client that was not in the last round begins at 1 again, as in the authors' code.
https://github.com/NVIDIA/NVFlare/pull/5240
"""

from __future__ import annotations

import numpy as np

from steelyard.weighing.policy import CohortView, Floats, Measures, Policy, by_name, policy

SCORES, ROUNDS = "fedscs/scores", "fedscs/rounds"
EPSILON = 1e-12


@policy("fedscs")
class FedScs(Policy):
    """Steady agreement with the others; use it where a few clients are unreliable and the server has no rows."""

    criteria = ("AS",)

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        rounds = view.memory.get(ROUNDS, 0) + 1
        kept = view.memory.get(SCORES, {})
        before = np.array([kept.get(client, 1.0) for client in view.clients])
        scores = (rounds - 1) / rounds * before + measures["AS"] / rounds
        volatility = np.abs((scores - before) / (before + EPSILON))
        view.remember(ROUNDS, rounds)
        view.remember(SCORES, by_name(view.clients, scores))
        return scores / (1 + volatility)
