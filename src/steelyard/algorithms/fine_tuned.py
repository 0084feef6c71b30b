"""FedAvg with fine-tuning: the federation is FedAvg's, and each client trains its model on before it uses it.

    client: tests θᵢ, which one round of local training makes of Θ (as [training] says)
    server: Θ ← Σ wᵢθᵢ

θᵢ is what the client would send in the next round, so a client that takes part does no extra work. In the survey of
Cheng, Chadha and Duchi 2021 ("Fine-tuning is fine in federated learning") this simple way rivals the others.
https://arxiv.org/abs/2108.07313
"""

from __future__ import annotations

from typing import ClassVar

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import Algorithm


@algorithm("fine-tuned")
class FineTuned(Algorithm):
    """FedAvg, then local steps before each client's test; use it as the second baseline of personal models."""

    personal: ClassVar[bool] = True
    tunes: ClassVar[bool] = True
