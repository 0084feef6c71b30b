"""FedNova: clients that take more steps do not pull the model their way (Wang et al. 2020, Eq. 8 and Table 1).

    server: Θ ← Θ + τ_eff Σ wᵢ (θᵢ − Θ)/aᵢ,   τ_eff = Σ wᵢ aᵢ
    aᵢ = τᵢ for plain SGD;  aᵢ = (τᵢ − m(1 − m^τᵢ)/(1 − m))/(1 − m) with momentum m

aᵢ counts how many gradients the client's change holds: with momentum a gradient counts in every later step too. Where
all clients take as many steps, it is FedAvg.
https://proceedings.neurips.cc/paper/2020/hash/564127c03caab942e503ee6f810f54fd-Abstract.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import Algorithm, ServerStep, Vectors
from steelyard.messages.updates import Counts, Floats

if TYPE_CHECKING:
    import torch


@algorithm("fednova")
class FedNova(Algorithm):
    """Updates normalised by their number of steps; use it where clients take very different numbers of steps."""

    sees: ClassVar[Literal["sum", "models"]] = "models"
    counts_steps: ClassVar[bool] = True
    optimisers: ClassVar[tuple[str, ...]] = ("sgd",)

    def step(self, server: ServerStep) -> tuple[torch.Tensor, Vectors]:
        assert server.models is not None
        assert server.steps is not None
        counts = gradients_in(server.steps, server.momentum)  # aᵢ
        effective = float(server.weights @ counts)  # τ_eff
        weights = effective * server.weights / counts
        # Σ w′ᵢ(θᵢ − Θ) with w′ᵢ = τ_eff wᵢ/aᵢ, which do not sum to 1.
        return server.weighted(server.models, weights) + (1 - float(weights.sum())) * server.parameters, {}


def gradients_in(steps: Counts, momentum: float) -> Floats:
    """Return aᵢ = ‖aᵢ‖₁: how many gradients stand in the change that so many steps make."""
    taken = np.maximum(steps, 1).astype(np.float64)
    if not momentum:
        return taken
    return (taken - momentum * (1 - momentum**taken) / (1 - momentum)) / (1 - momentum)
