"""Local training alone: every client trains a model of its own and hears of no other.

    client: θᵢ goes on from where it ended in the client's last round;  it sends nothing
    server: Θ stays the first model

The baseline of every comparison of personal models: where no federation beats it, clients need none.
"""

from __future__ import annotations

from typing import ClassVar

from steelyard.algorithms.registry import algorithm
from steelyard.messages.algorithm import OWN, Algorithm, Part


@algorithm("local-only")
class LocalOnly(Algorithm):
    """Each client alone; use it as the baseline of personal models. Weights have no effect."""

    personal: ClassVar[bool] = True
    private: ClassVar[Part] = "everything"
    keeps: ClassVar[tuple[str, ...]] = (OWN,)
