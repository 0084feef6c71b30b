"""SCAFFOLD: control variates take the drift out of local steps (Karimireddy et al. 2020, Algorithm 1, option II).

    client: θ ← θ − η (g + c − cᵢ) in each of its τᵢ steps
            cᵢ⁺ = cᵢ − c + (Θ − θᵢ)/(τᵢη);  it sends Δcᵢ = cᵢ⁺ − cᵢ beside its model
    server: Θ ← Θ + η_g Σ wᵢ(θᵢ − Θ);  c ← c + (cohort/all) Σ wᵢΔcᵢ

Momentum: cᵢ is a mean of whole steps, and with momentum m a step is about 1/(1 − m) gradients long. So the correction
is added to the step, after the momentum, where both have the same scale. Inside the momentum buffer it would be
multiplied by 1/(1 − m) once more in every round, and training explodes (tests/algorithms/test_papers.py shows both;
benchmarks/results/scaffold.md has CIFAR-10 with few clients a round, where c without its share explodes as well).

Weights: the paper's are equal, and c the mean of all cᵢ. Under a weighing rule the corrections of a cohort cancel,
Σ wᵢ(c − cᵢ) = 0, only if c is weighed as the models are; with equal weights this is the paper's step.
https://proceedings.mlr.press/v119/karimireddy20a.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveFloat

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import Algorithm, LocalTraining, ServerStep, Vectors

if TYPE_CHECKING:
    import torch

CONTROL = "control"
CHANGE = "control_change"


@algorithm("scaffold")
class Scaffold(Algorithm):
    """Client drift corrected by control variates; use it where clients' data differ and most take part often."""

    corrects: ClassVar[Literal["nothing", "gradient", "step"]] = "step"
    keeps: ClassVar[tuple[str, ...]] = (CONTROL,)
    sends: ClassVar[tuple[str, ...]] = (CHANGE,)
    receives: ClassVar[tuple[str, ...]] = (CONTROL,)
    sees: ClassVar[Literal["sum", "models"]] = "models"

    server_rate: PositiveFloat = 1.0
    """η_g: how far the server goes along the mean change; 1 in the paper's experiments."""

    def correction(self, received: Vectors, kept: Vectors) -> torch.Tensor:
        return received[CONTROL] - kept[CONTROL]  # c − cᵢ

    def after_training(self, local: LocalTraining) -> tuple[Vectors, Vectors]:
        mean_step = (local.start - local.models) / (local.steps * local.rate)  # (Θ − θᵢ)/(τᵢη)
        control = local.kept[CONTROL] - local.received[CONTROL] + mean_step
        return {CONTROL: control}, {CHANGE: control - local.kept[CONTROL]}

    def start(self, parameters: torch.Tensor) -> Vectors:
        return {CONTROL: parameters * 0}

    def step(self, server: ServerStep) -> tuple[torch.Tensor, Vectors]:
        assert server.sent is not None
        control = server.tensors[CONTROL] + server.share * server.weighted(server.sent[CHANGE])
        return server.parameters + self.server_rate * server.change, {CONTROL: control}
