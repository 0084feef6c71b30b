"""FedDisco: less weight to clients whose labels are spread otherwise than the task's (Ye et al. 2023).

    wᵢ ∝ max(0, nᵢ − a·dᵢ + b),   nᵢ = |Dᵢ| / Σ|Dⱼ|,   dᵢ = KL(labels of i ‖ even) / Σⱼ KL(labels of j ‖ even)

a and b are those of the authors' code, which divides the discrepancies by their sum as above.
https://arxiv.org/abs/2305.19229
"""

from __future__ import annotations

from pydantic import NonNegativeFloat

from steelyard.weighing.policy import CohortView, Floats, Measures, Policy, policy, to_weights

_ROUNDING = 1e-12


@policy("feddisco")
class FedDisco(Policy):
    """Sizes less label discrepancy; use it where clients hold few of the classes and all of them are tested."""

    criteria = ("DS", "KL")
    of_measures = True

    a: NonNegativeFloat = 0.5
    """a: how much the discrepancy counts."""
    b: float = 0.1
    """b: what every client gets beforehand, so that fewer of them fall to 0."""

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        sizes = to_weights(measures["DS"])[0]
        skew = measures["KL"]
        total = skew.sum()
        # Where labels are even at every client, what is left of a discrepancy is the rounding of a logarithm.
        return (sizes - self.a * (skew / total if total > _ROUNDING else skew) + self.b).clip(0.0)
