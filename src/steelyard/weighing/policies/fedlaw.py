"""FedLAW: the server learns the weights, and how far the whole model shrinks (Li et al. 2023).

    Θ = γ·Σ λᵢθᵢ,   λ = softmax(x), γ = e^g;   (x, g) ← Adam on the server's loss at Θ

x begins at the logarithms of the sizes and g at 0, as in the authors' code ("exp"), with Adam's β = (0.5, 0.999) and a
rate that is halved every 20 steps. The authors pass over the server's rows in batches; here every step sees all rows.
The slopes are ∂L/∂wᵢ = ⟨∇L(Θ), θᵢ⟩ at w = γλ, and the weights sum to γ.
https://arxiv.org/abs/2302.10911
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, PositiveFloat

from steelyard.weighing.policy import (
    Adam,
    AppliesTo,
    CohortView,
    Floats,
    Measures,
    Needs,
    Policy,
    policy,
    softmax,
    to_weights,
)

BETAS = (0.5, 0.999)
HALVED_EVERY = 20


@policy("fedlaw")
class FedLaw(Policy):
    """Learnable weights that may shrink the model; use it where the server has rows that it trusts."""

    needs = Needs(models=True, test_set=True, slopes=True)

    steps: int = Field(default=20, ge=1, le=1000)
    """How many steps the server takes in each round; the authors take 20 passes over its rows."""
    rate: PositiveFloat = 0.01
    """The rate of Adam: 0.01 for CIFAR-10 and 0.005 for others in the authors' code."""

    @property
    def applies_to(self) -> AppliesTo:
        return "models"

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        sizes = to_weights(measures["DS"])[0]
        values = np.append(np.log(np.maximum(sizes, 1e-300)), 0.0)
        adam = Adam(len(values), BETAS)
        for step in range(self.steps):
            shares, scale = softmax(values[:-1]), np.exp(values[-1])
            slopes = view.slopes(scale * shares)
            if not np.isfinite(slopes).all():
                break
            mean = shares @ slopes
            along = np.append(scale * shares * (slopes - mean), scale * mean)
            values = adam.step(values, along, self.rate * 0.5 ** (step // HALVED_EVERY))
        return np.exp(values[-1]) * softmax(values[:-1])
