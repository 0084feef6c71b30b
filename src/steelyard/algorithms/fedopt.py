"""FedAdagrad, FedYogi and FedAdam: adaptive steps at the server (Reddi et al. 2021, Algorithm 2).

    m ← β₁m + (1 − β₁)Δ,   Δ = Σ wᵢθᵢ − Θ
    FedAdagrad: v ← v + Δ²
    FedYogi:    v ← v − (1 − β₂) Δ² sign(v − Δ²)
    FedAdam:    v ← β₂v + (1 − β₂)Δ²
    Θ ← Θ + η m/(√v + τ)

v begins at τ², as the paper asks (v₋₁ ≥ τ²). β₁ = 0.9 (0 for FedAdagrad), β₂ = 0.99 and τ = 0.001 are the paper's; η is
tuned there for every task, mostly between 0.01 and 1.
https://openreview.net/forum?id=LkFG3lB13U5
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveFloat

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import Algorithm, ServerStep, Vectors

if TYPE_CHECKING:
    import torch

MEAN = "mean"
SQUARE = "square"


class AdaptiveServer(Algorithm):
    """The step that the three share; they differ in how v follows Δ²."""

    server_rate: PositiveFloat = 0.1
    """η: the server's learning rate; tune it."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """β₁: how long the mean of the changes remembers."""
    tau: PositiveFloat = 1e-3
    """τ: how adaptive the step is; the smaller, the more."""

    def start(self, parameters: torch.Tensor) -> Vectors:
        return {MEAN: parameters * 0, SQUARE: parameters * 0 + self.tau**2}

    def step(self, server: ServerStep) -> tuple[torch.Tensor, Vectors]:
        change = server.change
        mean = self.beta1 * server.tensors[MEAN] + (1 - self.beta1) * change
        square = self.follow(server.tensors[SQUARE], change.square())
        model = server.parameters + self.server_rate * mean / (square.sqrt() + self.tau)
        return model, {MEAN: mean, SQUARE: square}

    def follow(self, square: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        """Return the next v from v and Δ²."""
        raise NotImplementedError(type(self).__name__)


@algorithm("fedadagrad")
class FedAdagrad(AdaptiveServer):
    """Adagrad at the server; use it where some parameters, such as rare words', hardly ever move."""

    beta1: float = Field(default=0.0, ge=0, lt=1)

    def follow(self, square: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        return square + change


@algorithm("fedyogi")
class FedYogi(AdaptiveServer):
    """Yogi at the server: v falls slowly; use it as FedAdam, where that is unsteady."""

    beta2: float = Field(default=0.99, ge=0, lt=1)
    """β₂: how long the mean of the squares remembers."""

    def follow(self, square: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        return square - (1 - self.beta2) * change * (square - change).sign()


@algorithm("fedadam")
class FedAdam(AdaptiveServer):
    """Adam at the server; use it where parameters move at very different speeds."""

    beta2: float = Field(default=0.99, ge=0, lt=1)
    """β₂: how long the mean of the squares remembers."""

    def follow(self, square: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        return self.beta2 * square + (1 - self.beta2) * change
