"""FedAWA: weights that bring the sum near to all clients' vectors (Shi et al. 2025).

    p = softmax(T);   T ← Adam on  Σ pᵢ(1 − cos(Θ, θᵢ)) + Σ pᵢ‖Δᵢ − Σ pⱼΔⱼ‖,   Δᵢ = θᵢ − Θ

T begins at the sizes (not their logarithms) and stays from round to round; the weights are those before the last step
of a round, Adam's β = (0.5, 0.999) and its rate 0.001: all as in the authors' code. No data is needed: everything
follows from the inner products of the updates.
https://arxiv.org/abs/2503.15842
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, PositiveFloat

from steelyard.base.tallies import quotient
from steelyard.weighing.policy import (
    Adam,
    CohortView,
    Floats,
    Measures,
    Needs,
    Policy,
    by_client,
    policy,
    remember,
    softmax,
    to_weights,
)

VALUES = "fedawa/values"
BETAS = (0.5, 0.999)


@policy("fedawa")
class FedAwa(Policy):
    """Weights from the clients' vectors alone; use it where clients drift apart and the server has no rows."""

    needs = Needs(models=True)

    steps: int = Field(default=1, ge=1, le=1000)
    """How many steps the server takes in each round."""
    rate: PositiveFloat = 0.001
    """The rate of Adam."""

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        sizes = to_weights(measures["DS"])[0]
        values = by_client(view.memory, VALUES, view, sizes)
        apart = _apart(view)
        adam, shares = Adam(len(values), BETAS), softmax(values)
        for _ in range(self.steps):
            shares = softmax(values)
            slopes = apart + _spread_slopes(view.gram, shares)
            values = adam.step(values, shares * (slopes - shares @ slopes), self.rate)
        remember(view, VALUES, values)
        return shares


def _apart(view: CohortView) -> Floats:
    """Return −cos(Θ, θᵢ) of every client; the 1 before it changes no slope along shares that sum to 1."""
    start, along = view.along_start
    lengths = np.sqrt(np.maximum(start + 2 * along + np.diag(view.gram), 0.0) * start)
    return -quotient(start + along, lengths, 0.0)


def _spread_slopes(gram: Floats, shares: Floats) -> Floats:
    """Return the slopes of Σ pᵢ‖Δᵢ − Σ pⱼΔⱼ‖ along p, from the inner products of the updates."""
    to_mean = gram @ shares
    squares = np.diag(gram) - 2 * to_mean + shares @ to_mean
    distances = np.sqrt(np.maximum(squares, 0.0))
    # ∂‖Δᵢ − m‖/∂pⱼ = −⟨Δⱼ, Δᵢ − m⟩/‖Δᵢ − m‖; an update that is the mean itself has no slope.
    per = quotient(shares, distances, 0.0)
    return distances - (gram @ per - to_mean * per.sum())
