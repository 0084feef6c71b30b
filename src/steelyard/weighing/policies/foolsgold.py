"""FoolsGold: less say for whose updates have pointed the same way as another's over rounds (Fung et al. 2020).

    Hᵢ = Σ over rounds of Δᵢ, last layer alone;   cᵢⱼ = cos(Hᵢ, Hⱼ),   mᵢ = maxⱼ cᵢⱼ, at least 0
    cᵢⱼ ← cᵢⱼ mᵢ/mⱼ where mⱼ > mᵢ;   αᵢ = 1 − maxⱼ cᵢⱼ;   α ← α / max α;   αᵢ ← ln(αᵢ/(1 − αᵢ)) + ½, within [0, 1]

Sybils share an aim and thus a direction; honest clients with different data differ. So it needs no bound on the number
of the hostile, and clients alike are taken for Sybils. One attacker alone is nothing to it. The paper adds the updates
as they are, Θ + Σ αᵢΔᵢ, which suits single steps; here α are shares. Its optional weights of features are left out.
https://www.usenix.org/conference/raid2020/presentation/fung
"""

from __future__ import annotations

import numpy as np

from steelyard.base.tallies import quotient
from steelyard.weighing.policy import CohortView, Floats, Measures, Needs, Policy, policy

HISTORY = "foolsgold/history"
MOST = 0.99
"""What a share of 1 counts as before the logit."""


@policy("foolsgold")
class FoolsGold(Policy):
    """Unlike others over rounds; use it where one attacker may be many clients, and honest ones hold different data."""

    criteria = ("EQ",)
    needs = Needs(models=True, task="classes", layers=True)

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        known: dict[str, list[float]] = view.memory.get(HISTORY, {})
        now = view.last_layer
        summed = np.stack([each + known.get(client, 0.0) for client, each in zip(view.clients, now, strict=True)])
        view.remember(HISTORY, {**known, **dict(zip(view.clients, summed, strict=True))})
        return unlike(summed)


def unlike(histories: Floats) -> Floats:
    """Return α of every client from H [clients, parameters]; all 0 where all point the same way."""
    lengths = np.linalg.norm(histories, axis=1, keepdims=True)
    units = quotient(histories, lengths, 0.0)
    alike = units @ units.T
    np.fill_diagonal(alike, 0.0)
    most = alike.max(axis=1)
    pardoned = np.divide(most[:, None], most[None, :], out=np.ones_like(alike), where=most[None, :] > most[:, None])
    found = np.clip(1.0 - (alike * pardoned).max(axis=1), 0.0, 1.0)
    # Rounding leaves a trace of Sybils that sent the same.
    if found.max() < 1e-9:
        return np.zeros(len(found))
    share = np.clip(found / found.max(), 1e-12, MOST)
    return np.clip(np.log(share / (1.0 - share)) + 0.5, 0.0, 1.0)
