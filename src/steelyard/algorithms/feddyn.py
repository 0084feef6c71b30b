"""FedDyn: each client's loss is bent so that local optima agree with the global one (Acar et al. 2021, Algorithm 1).

    client: minimise  Fᵢ(θ) − ⟨hᵢ, θ⟩ + α/2 ‖θ − Θ‖²;  hᵢ ← hᵢ − α(θᵢ − Θ)
    server: h ← h − α (cohort/all) Σ wᵢ(θᵢ − Θ);  Θ ← Σ wᵢθᵢ − h/α

The paper's weights are equal. hᵢ is the gradient of the client's own loss at its last model; it stays at the client.
https://openreview.net/forum?id=B7v4QMR6Z9w
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveFloat

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import Algorithm, LocalTraining, ServerStep, Vectors

if TYPE_CHECKING:
    import torch

GRADIENT = "gradient"
SUM = "sum_of_changes"


@algorithm("feddyn")
class FedDyn(Algorithm):
    """Dynamic regularisation; use it where clients' data differ and a second vector must not be sent."""

    corrects: ClassVar[Literal["nothing", "gradient", "step"]] = "gradient"
    keeps: ClassVar[tuple[str, ...]] = (GRADIENT,)

    alpha: PositiveFloat = 0.01
    """α: how strongly clients are held near the global model; the paper uses 0.1, 0.01 and 0.001."""

    @property
    def pull(self) -> float:
        return self.alpha

    def correction(self, received: Vectors, kept: Vectors) -> torch.Tensor:
        return -kept[GRADIENT]  # −hᵢ

    def after_training(self, local: LocalTraining) -> tuple[Vectors, Vectors]:
        return {GRADIENT: local.kept[GRADIENT] - self.alpha * (local.models - local.start)}, {}

    def start(self, parameters: torch.Tensor) -> Vectors:
        return {SUM: parameters * 0}

    def step(self, server: ServerStep) -> tuple[torch.Tensor, Vectors]:
        state = server.tensors[SUM] - self.alpha * server.share * server.change  # h
        return server.average - state / self.alpha, {SUM: state}
