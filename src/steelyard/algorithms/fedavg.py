"""FedAvg: the server takes the weighted sum of the clients' models (McMahan et al. 2017, Algorithm 1).

    Θ ← Σᵢ wᵢ θᵢ

By dataset size alone it is the paper's; with another weighing rule it is the same step with other weights.
https://proceedings.mlr.press/v54/mcmahan17a.html
"""

from __future__ import annotations

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import Algorithm


@algorithm("fedavg")
class FedAvg(Algorithm):
    """The weighted sum of the clients' models; use it as the baseline with which all others are compared."""
