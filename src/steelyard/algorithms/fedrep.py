"""FedRep: a common body, and a head of its own for each client (Collins et al. 2021, Algorithm 1).

    client: hᵢ ← τ epochs of steps on the head, with the body φ as received
            φᵢ ← one training (as [training] says) of the body, with hᵢ as it is now
            it sends φᵢ and keeps hᵢ
    server: φ ← Σ wᵢφᵢ

The head is the last layer. A client tests φ with its own head; one that has never trained has the first model's head.
https://proceedings.mlr.press/v139/collins21a.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import OWN, Algorithm, Floats, LocalSteps, Part, Vectors

if TYPE_CHECKING:
    import torch


@algorithm("fedrep")
class FedRep(Algorithm):
    """A common body with private heads; use it where clients' labels differ and what tells them apart is common."""

    personal: ClassVar[bool] = True
    by_hand: ClassVar[bool] = True
    private: ClassVar[Part] = "head"
    keeps: ClassVar[tuple[str, ...]] = (OWN,)

    head_epochs: int = Field(default=10, ge=1, le=100_000)
    """τ: passes over the local data for the head in each round; 10 in the paper's experiments."""

    def visited(self, once: Floats, sizes: Floats) -> Floats:
        return self.head_epochs * sizes + once

    def train(self, local: LocalSteps) -> tuple[torch.Tensor, Vectors]:
        models = local.trained(local.start, "head", self.head_epochs)
        return local.trained(models, "body"), {}
