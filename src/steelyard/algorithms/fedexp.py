"""FedExP: the server goes farther where the clients' changes disagree (Jhunjhunwala et al. 2023, Eq. 8).

    η_g = max(1, Σ wᵢ‖Δᵢ‖² / (2(‖Δ̄‖² + ε)))
    Θ ← Θ + η_g Δ̄,   Δᵢ = θᵢ − Θ,   Δ̄ = Σ wᵢΔᵢ

The paper's weights are equal (Σ‖Δᵢ‖²/2M). It tests the mean of the last two models, since single ones jump; here every
round's own model is tested, as for all algorithms.
https://openreview.net/forum?id=IPrzNbddXV
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import Algorithm, ServerStep, Vectors

if TYPE_CHECKING:
    import torch


@algorithm("fedexp")
class FedExP(Algorithm):
    """A server's step that finds its own length; use it where no time is left to tune a server's learning rate."""

    sees: ClassVar[Literal["sum", "models"]] = "models"

    epsilon: NonNegativeFloat = 1e-3
    """ε: keeps the step short where the clients' changes cancel; the paper tunes it among 0.001, 0.01 and 0.1."""

    def step(self, server: ServerStep) -> tuple[torch.Tensor, Vectors]:
        assert server.models is not None
        norms = (server.models - server.parameters.to(server.models.device)).double().square().sum(dim=1)
        change = server.change
        mean = float(change.double().square().sum())
        spread = float(server.weighted(norms.to(change.dtype)))
        rate = max(1.0, spread / (2 * (mean + self.epsilon))) if mean + self.epsilon > 0 else 1.0
        return server.parameters + rate * change, {}
