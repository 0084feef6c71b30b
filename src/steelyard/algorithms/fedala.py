"""FedALA: each client takes from the common model what helps it, number by number (Zhang et al. 2023, Algorithm 1).

    client: θ̂ᵢ = θᵢ + (Θ − θᵢ) ⊙ Wᵢ in the head, Θ in the body;  θᵢ is what its last training ended with
            Wᵢ ← Wᵢ − η ∇Fᵢ(θ̂ᵢ) ⊙ (Θ − θᵢ), between 0 and 1, on batches of a share of its rows
            then it trains from θ̂ᵢ, as [training] says, and sends what comes of it
    server: Θ ← Σ wᵢθᵢ

Each client's own aggregation of two models, with one weight a parameter. Wᵢ begins at 1. The first time that a client
learns it, passes go on until the losses of the last ten differ little (`threshold`), later there is one pass. A client
that has never trained has no θᵢ to mix in and begins at Θ. It tests θ̂ᵢ with the Wᵢ that it has.
https://doi.org/10.1609/aaai.v37i9.26330
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveFloat

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import OWN, Algorithm, Floats, LocalSteps, Vectors

if TYPE_CHECKING:
    import torch

WEIGHTS, LEARNT = "weights", "learnt"
RECENT, MOST_PASSES = 10, 100
"""Passes whose losses are compared, and after how many the first learning ends in any case."""


@algorithm("fedala")
class FedAla(Algorithm):
    """A parameter-wise mixture of the global model and the client's own; use it where labels differ a lot."""

    personal: ClassVar[bool] = True
    by_hand: ClassVar[bool] = True
    keeps: ClassVar[tuple[str, ...]] = (OWN, WEIGHTS, LEARNT)

    share: float = Field(default=0.8, gt=0, le=1)
    """s: the share of its rows on which a client learns its weights."""
    weight_rate: PositiveFloat = 1.0
    """η: the step size of the weights."""
    threshold: PositiveFloat = 0.1
    """Standard deviation of the last ten passes' losses below which the first learning ends."""

    def fresh(self, name: str, received: torch.Tensor) -> torch.Tensor:
        if name == LEARNT:
            return received.new_zeros((len(received), 1))
        return received * 0 + 1 if name == WEIGHTS else super().fresh(name, received)

    def begin(self, parameters: torch.Tensor, kept: Vectors, private: torch.Tensor) -> torch.Tensor:
        return parameters

    def own_models(self, parameters: torch.Tensor, kept: Vectors, private: torch.Tensor) -> torch.Tensor:
        return kept[OWN] + (parameters - kept[OWN]) * kept[WEIGHTS]

    def visited(self, once: Floats, sizes: Floats) -> Floats:
        return self.share * sizes + once  # The first learning, of some passes more, is left out.

    def train(self, local: LocalSteps) -> tuple[torch.Tensor, Vectors]:
        head = local.part("head")
        mixed = local.kept[OWN].where(head, local.start)  # θᵢ in the head, Θ in the body
        places = head.nonzero()[:, 0]
        own, change = mixed[:, places], (local.start - mixed)[:, places]
        weights, learnt = local.kept[WEIGHTS].clone(), local.kept[LEARNT]
        learning = differs = (change != 0).any(dim=1, keepdim=True)  # Who has never trained has Θ alone.
        found, losses = weights[:, places], [local.start.new_zeros(len(mixed))]
        while learning.any():
            last = losses[-1]
            for batch in local.batches(1, self.share, "head"):
                mixed[:, places] = own + change * found
                stepped = found - self.weight_rate * batch.gradient(mixed)[:, places] * change
                found = stepped.clamp(0, 1).where(learning, found)
                last = batch.losses.where(batch.taken, last)
            losses.append(last)
            settled = _spread(losses) < self.threshold if len(losses) > RECENT + 1 else learning & False
            learning = learning & (learnt == 0) & ~settled & (len(losses) <= MOST_PASSES)
        mixed[:, places], weights[:, places] = own + change * found, found
        models = local.trained(mixed)
        return models, {OWN: models, WEIGHTS: weights, LEARNT: learnt.where(~differs, 1.0)}


def _spread(losses: list[torch.Tensor]) -> torch.Tensor:
    """Return the standard deviation of the last passes' losses, [clients, 1]."""
    recent = losses[-RECENT:]
    mean = sum(recent[1:], recent[0]) / RECENT
    squares = [(each - mean) ** 2 for each in recent]
    return (sum(squares[1:], squares[0]) / RECENT)[:, None] ** 0.5
