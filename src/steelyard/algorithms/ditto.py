"""Ditto: beside the federation's model each client trains one of its own, held near it (Li et al. 2021, Algorithm 1).

    client: θᵢ as in FedAvg, which it sends
            vᵢ ← vᵢ − η (∇Fᵢ(vᵢ) + λ(vᵢ − Θ)) in as many steps, with Θ as received;  it keeps and tests vᵢ
    server: Θ ← Σ wᵢθᵢ

λ(v − Θ) is a pull to where the client begins, λ(v − v₀), and the correction λ(v₀ − Θ), the same in every step. Both
trainings visit the samples in the same order. vᵢ begins as the first Θ that the client receives.
https://proceedings.mlr.press/v139/li21h.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import OWN, Algorithm, Floats, LocalTraining, SecondTraining, Vectors

if TYPE_CHECKING:
    import torch


@algorithm("ditto")
class Ditto(Algorithm):
    """A model of its own for each client, held near the common one; use it where clients differ or some are hostile."""

    personal: ClassVar[bool] = True
    keeps: ClassVar[tuple[str, ...]] = (OWN,)

    strength: float = Field(default=1.0, ge=0)
    """λ: how strongly a client's own model is held near the common one; 0 leaves it alone."""

    def begin(self, parameters: torch.Tensor, kept: Vectors, private: torch.Tensor) -> torch.Tensor:
        return parameters

    def own_models(self, parameters: torch.Tensor, kept: Vectors, private: torch.Tensor) -> torch.Tensor:
        return kept[OWN]

    def visited(self, once: Floats, sizes: Floats) -> Floats:
        return 2 * once

    def again(self, local: LocalTraining) -> SecondTraining:
        own = local.kept[OWN]
        return SecondTraining(own, self.strength, self.strength * (own - local.start))

    def after_training(self, local: LocalTraining) -> tuple[Vectors, Vectors]:
        assert local.second is not None
        return {OWN: local.second}, {}
