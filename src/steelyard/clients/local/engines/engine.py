"""What an engine is, and what it is made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from steelyard.clients.local.cohort import Cohort
from steelyard.clients.local.settings import Precision
from steelyard.learning.parameters import Layout
from steelyard.learning.settings import TrainingSettings
from steelyard.learning.training import normalises_batches
from steelyard.messages.updates import Floats


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """What stays the same from round to round: the model, how it is trained, and on what."""

    module: nn.Module
    layout: Layout
    training: TrainingSettings
    classes: int
    device: torch.device
    precision: Precision
    threads: int
    memory: int
    """Bytes that an engine may plan for."""
    chunk: int | None = None
    """Clients in one stack, where the user says so."""
    rounds: int = 0
    """How many rounds there will be at most; 0 where nobody knows."""

    @property
    def batch_norm(self) -> bool:
        """Whether the model normalises over the samples of a batch."""
        return normalises_batches(self.module)


class Engine(Protocol):
    """Trains all jobs of a cohort; every engine gives what the sequential one gives, within float tolerance."""

    @property
    def name(self) -> str:
        """The name in the table of engines."""
        ...

    @property
    def chunk(self) -> int | None:
        """Clients in one stack; None where the engine stacks none, or finds the number for each cohort."""
        ...

    def stack_size(self, cohort: Cohort) -> int | None:
        """Return how many clients of this cohort stand in one stack; None where the engine stacks none."""
        ...

    def train(self, cohort: Cohort, out: torch.Tensor) -> Floats:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        ...


class Unstacked:
    """The part of an engine that trains clients singly: it has no stacks."""

    chunk: int | None = None

    def stack_size(self, cohort: Cohort) -> int | None:
        """Return None: there are no stacks."""
        return None
