"""APFL: each client mixes the common model with one of its own (Deng, Kamani and Mahdavi 2020, Algorithm 1).

    client, in each step, on the same batch:
            wᵢ ← wᵢ − η ∇Fᵢ(wᵢ), from Θ;  it sends wᵢ
            vᵢ ← vᵢ − η αᵢ ∇Fᵢ(v̄ᵢ), where v̄ᵢ = αᵢvᵢ + (1 − αᵢ)wᵢ;  it keeps vᵢ
            in the first step of a round αᵢ ← αᵢ − η ⟨vᵢ − wᵢ, ∇Fᵢ(v̄ᵢ)⟩, between 0 and 1
    server: Θ ← Σ wᵢ

αᵢ∇Fᵢ(v̄ᵢ) is the gradient of Fᵢ(v̄ᵢ) in vᵢ. α is followed once a round, as in the authors' code (FedTorch); the models
are mixed number by number, as in the paper (their code mixes what two models answer, which is the same for linear
ones). A client tests αᵢvᵢ + (1 − αᵢ)Θ; vᵢ begins as the first Θ that it receives.
https://arxiv.org/abs/2003.13461
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import OWN, Algorithm, Floats, LocalSteps, Vectors

if TYPE_CHECKING:
    import torch

MIXTURE = "mixture"


@algorithm("apfl")
class Apfl(Algorithm):
    """A learnt mixture of the global model and the client's own; use it where only some clients are like the others."""

    personal: ClassVar[bool] = True
    by_hand: ClassVar[bool] = True
    keeps: ClassVar[tuple[str, ...]] = (OWN, MIXTURE)

    alpha: float = Field(default=0.5, ge=0, le=1)
    """α at first: the share of the client's own model in the mixture."""
    adaptive: bool = True
    """Whether each client follows the slope of its loss in α; otherwise α stays as it is."""

    def fresh(self, name: str, received: torch.Tensor) -> torch.Tensor:
        return received.new_full((len(received), 1), self.alpha) if name == MIXTURE else super().fresh(name, received)

    def begin(self, parameters: torch.Tensor, kept: Vectors, private: torch.Tensor) -> torch.Tensor:
        return parameters

    def own_models(self, parameters: torch.Tensor, kept: Vectors, private: torch.Tensor) -> torch.Tensor:
        return kept[MIXTURE] * kept[OWN] + (1 - kept[MIXTURE]) * parameters

    def visited(self, once: Floats, sizes: Floats) -> Floats:
        return 2 * once

    def train(self, local: LocalSteps) -> tuple[torch.Tensor, Vectors]:
        w, v, alpha = local.start, local.kept[OWN], local.kept[MIXTURE]
        move_w, move_v = local.optimiser(), local.optimiser()
        for number, batch in enumerate(local.batches()):
            slope = batch.gradient(w.lerp(v, alpha))  # ∇Fᵢ(v̄ᵢ) with v̄ᵢ = αᵢvᵢ + (1 − αᵢ)wᵢ
            own = alpha * slope
            if number == 0 and self.adaptive:
                alpha = (alpha - local.rate * ((v - w) * slope).sum(dim=1, keepdim=True)).clamp(0, 1)
            v, w = move_v(v, own), move_w(w, batch.gradient(w))
        return w, {OWN: v, MIXTURE: alpha}
