"""q-FedAvg: a step that lifts clients with high losses, as long as losses say (Li et al. 2020, Algorithm 2).

    Θ ← Θ + Σ wᵢ(θᵢ − Θ),   wᵢ = L·Fᵢ^q / Σⱼ hⱼ,   hⱼ = q·Fⱼ^(q−1)·‖L(θⱼ − Θ)‖² + L·Fⱼ^q

Fᵢ is the loss of the received model on client i's rows, L = 1/η with the clients' learning rate η. With q = 0 every
client counts alike. The weights do not sum to 1: a cohort that moves far steps shorter.
https://openreview.net/forum?id=ByexElSYDr
"""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat

from steelyard.base.errors import UserError
from steelyard.weighing.policy import AppliesTo, CohortView, Floats, Measures, Policy, policy

LEAST = 1e-10
"""What the authors' code adds to every loss, so that its powers are numbers."""


@policy("q-fedavg")
class QFedAvg(Policy):
    """Fair steps; use it where accuracy over clients shall be more even, at some cost of its mean."""

    criteria = ("LB", "UL")

    q: NonNegativeFloat = 1.0
    """q: how much fairness counts; the paper's best lie between 0.001 and 5, by data set."""
    rate: PositiveFloat | None = None
    """η: the clients' learning rate, 1/L; default: the experiment's."""

    @property
    def applies_to(self) -> AppliesTo:
        return "updates"

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        rate = self.rate or view.rate
        if not rate:
            raise UserError("weighing.policy: q-fedavg does not know the clients' learning rate; allowed: rate = 0.1")
        lipschitz = 1.0 / rate
        losses = measures["LB"] + LEAST
        gradients = (lipschitz * measures["UL"]) ** 2
        steps = self.q * losses ** (self.q - 1) * gradients + lipschitz * losses**self.q
        return lipschitz * losses**self.q / steps.sum()
