"""FedProx: a term in the local loss holds clients near the global model (Li et al. 2020, Eq. 2).

    client: minimise  Fᵢ(θ) + μ/2 ‖θ − Θ‖²

https://proceedings.mlsys.org/paper_files/paper/2020/hash/1f5fe83998a09396ebe6477d9475ba0c-Abstract.html
"""

from __future__ import annotations

from pydantic import NonNegativeFloat

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import Algorithm


@algorithm("fedprox")
class FedProx(Algorithm):
    """FedAvg with a proximal term; use it where clients differ much or take very different numbers of steps."""

    mu: NonNegativeFloat = 0.01
    """μ: how strongly a client is held near the global model. The paper tunes it among 0.001, 0.01, 0.1 and 1."""

    @property
    def pull(self) -> float:
        return self.mu
