"""Which engine trains a cohort."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.cohort import Cohort, Workshop
from steelyard.clients.local.loop import LoopEngine
from steelyard.errors import UserError


class Engine(Protocol):
    """Trains all jobs of a cohort; every engine gives what the loop gives, within float tolerance."""

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        ...


class Engines:
    """Keeps the engine that a run uses."""

    def __init__(self, shop: Workshop, wanted: str) -> None:
        if wanted not in ("auto", "loop"):
            raise UserError(f"compute.engine: got '{wanted}'; allowed: auto, loop")
        self.engine: Engine = LoopEngine(shop)

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Train a cohort with the engine of this run."""
        return self.engine.train(cohort, out)

    def describe(self) -> Mapping[str, str]:
        """Return what was chosen and why."""
        return {"engine_choice": "loop", "engine_reason": "only engine"}
