"""What simulated clients are to hide: w·Δ, some parameters at a time; and who of them has dropped out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.messages import Floats, Task

Absent = Callable[[str, int], frozenset[str]]
"""From a stage (share, mask, open) and a round to the clients that have dropped out by then; for tests and trials."""


class WeightedSteps:
    """What the simulated clients write down: w·Δ in words, some parameters at a time; each row is one client's own."""

    def __init__(self, task: Task, names: Sequence[str], models: torch.Tensor) -> None:
        self._row = {name: row for row, name in enumerate(names)}
        self._start, self._models = task.parameters.to(models.device), models
        self.federation, self.round, self.cohort = task.federation, task.round, len(names)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self._start.numel()

    def of(self, clients: Sequence[str], weights: Floats, begin: int, end: int) -> NDArray[np.float64]:
        """Return w·Δ of these clients for a span of parameters: [clients, parameters]."""
        rows = [self._row[name] for name in clients]
        step = self._models[:, begin:end][rows].to(torch.float64) - self._start[begin:end].to(torch.float64)
        return step.cpu().numpy() * weights[:, None]
