"""A global model that is not finite, or that exploded, is never kept: the round is weighed without the culprit."""

from __future__ import annotations

import numpy as np
import torch

from steelyard.base.errors import UserError, in_words
from steelyard.messages.updates import Failure, Task, Updates

LARGEST = 1e15
"""No parameter of a model that can still learn is larger."""


class Exploded(UserError):
    """No sound global model came out of a round: the federation ends before it, and the last good model stays.

    The loop goes on with the others; a run that has no other stops with this line.
    """

    def __init__(self, federation: str, round: int, reason: str, allowed: str = "a smaller learning rate") -> None:
        self.reason = reason
        super().__init__(
            f"round {round} of {in_words(federation)}: {reason}; the model before this round is kept "
            f"(allowed: {allowed})"
        )


def is_sound(model: torch.Tensor) -> bool:
    """Whether a global model may be kept: all its numbers are finite and none is absurd."""
    if not model.numel():
        return True
    # Smallest and largest in one go need no memory of the model's size; a comparison with NaN is false.
    smallest, largest = model.aminmax()
    return bool((smallest >= -LARGEST) & (largest <= LARGEST))


def without_culprit(task: Task, updates: Updates, least: int) -> Updates:
    """Return the updates without the one farthest from the model that was sent; the client and why are noted.

    Where fewer than `least` would be left, the model is beyond repair, and that is no lack of clients.
    """
    distances = updates.payload.divergence(task.parameters)
    culprit = int(np.argmax(np.where(np.isfinite(distances), distances, np.inf)))
    if len(updates.clients) <= max(1, least):
        raise Exploded(
            task.federation, task.round, "the global model is no longer finite, whichever client is left out"
        )
    keep = [row for row in range(len(updates.clients)) if row != culprit]
    reason = f"left out: with its update ({distances[culprit]:.3g} away) the global model explodes"
    return updates.select(keep, [Failure(updates.clients[culprit], reason)])
