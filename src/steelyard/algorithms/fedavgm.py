"""FedAvgM: momentum at the server (Hsu et al. 2019, §4.3).

    server: v ← βv + Δ;  Θ ← Θ + η v,   Δ = Σ wᵢθᵢ − Θ

https://arxiv.org/abs/1909.06335
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveFloat

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import Algorithm, ServerStep, Vectors

if TYPE_CHECKING:
    import torch

VELOCITY = "velocity"


@algorithm("fedavgm")
class FedAvgM(Algorithm):
    """FedAvg with momentum at the server; use it where cohorts are small and differ much from round to round."""

    server_rate: PositiveFloat = 1.0
    """η: how far the server goes; 1 in the paper."""
    beta: float = Field(default=0.9, ge=0, lt=1)
    """β: the server's momentum; the paper's best lie between 0.7 and 0.97."""

    def start(self, parameters: torch.Tensor) -> Vectors:
        return {VELOCITY: parameters * 0}

    def step(self, server: ServerStep) -> tuple[torch.Tensor, Vectors]:
        velocity = self.beta * server.tensors[VELOCITY] + server.change
        return server.parameters + self.server_rate * velocity, {VELOCITY: velocity}
