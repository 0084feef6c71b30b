"""FedFomo: every client weighs all others by what their models would do for it (Zhang et al. 2021, equations 3 to 5).

    client: trains on from its own model; θᵢ is what it ends with, and θᵢ⁻ what it ended with in its last round
    for client i:  wᵢⱼ ∝ max(0, (Lᵢ(θᵢ⁻) − Lᵢ(θⱼ)) / ‖θⱼ − θᵢ⁻‖), summing to 1 over j
            Lᵢ is its loss on rows of its own that it does not train on (`validation`)
            it goes on from, and tests, θᵢ⁻ + Σⱼ wᵢⱼ(θⱼ − θᵢ⁻)

A weight matrix in place of a vector: W [clients, clients] with one row for each client that receives, and the new
models are W @ U. A row of 0, where no model is better than the client's last, leaves it at θᵢ⁻. Here every client
weighs the whole cohort, itself included (the paper may send each a part of it). The server's own model is Σ wᵢθᵢ by
the weighing rule; clients do not use it. θᵢ⁻ is at first the first model.
https://openreview.net/forum?id=ehJqJQk9cw
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import LAST, OWN, Algorithm, Listening, Vectors

if TYPE_CHECKING:
    import torch


@algorithm("fedfomo")
class FedFomo(Algorithm):
    """A mixture of others' models for each client; use it where clients fall into groups that nobody has named."""

    personal: ClassVar[bool] = True
    listens: ClassVar[bool] = True
    keeps: ClassVar[tuple[str, ...]] = (OWN, LAST)

    validation: float = Field(default=0.2, gt=0, lt=1)
    """Share of each client's training rows on which it tests others' models, and on which it does not train."""

    @property
    def held_back(self) -> float:
        return self.validation

    def begin(self, parameters: torch.Tensor, kept: Vectors, private: torch.Tensor) -> torch.Tensor:
        return kept[OWN]

    def listen(self, heard: Listening) -> torch.Tensor:
        better = heard.last_losses[:, None] - heard.losses  # Lᵢ(θᵢ⁻) − Lᵢ(θⱼ)
        # A model that is θᵢ⁻ itself is no better than it: 0 over 0 is 0.
        gain = (better / heard.distances.clamp_min(1e-12)).nan_to_num(0.0, 0.0, 0.0).clamp_min(0)
        return gain / gain.sum(dim=1, keepdim=True).clamp_min(1e-30)
