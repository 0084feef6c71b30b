"""FedBN: batch norms stay at the clients (Li et al. 2021, Algorithm 1).

    client: begins at Θ with the weights, biases and running means of its own batch norms in it;  it sends all but these
    server: Θ ← Σ wᵢθᵢ, batch norms left out

A client tests Θ with its own batch norms; one that has never trained has the first model's, which know no data.
https://openreview.net/forum?id=6YEQUn0QICG
"""

from __future__ import annotations

from typing import ClassVar

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import OWN, Algorithm, Part


@algorithm("fedbn")
class FedBN(Algorithm):
    """Batch norms of its own for each client; use it where clients' features differ, such as scanners or cameras."""

    personal: ClassVar[bool] = True
    private: ClassVar[Part] = "norms"
    keeps: ClassVar[tuple[str, ...]] = (OWN,)
