"""What an engine is and what it is made for; the reference: single clients through autograd, in turn or in threads."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steelyard.clients.local.cohort import Cohort, longest_first
from steelyard.clients.local.hardware import WorkerThreads, arithmetic, shortened, threads_for
from steelyard.clients.local.settings import Precision
from steelyard.learning.parameters import Layout
from steelyard.learning.settings import TrainingSettings
from steelyard.learning.training import ClientLoop, chance_of, normalises_batches
from steelyard.messages.payloads import DenseModels
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

    @cached_property
    def batch_norm(self) -> bool:
        """Whether the model normalises over the samples of a batch."""
        return normalises_batches(self.module)


class Trainer(Protocol):
    """Whatever trains a cohort."""

    def train(self, cohort: Cohort, out: torch.Tensor) -> Floats:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        ...


class Leader(Trainer, Protocol):
    """Shares cohorts out to other processes."""

    def trained(self, cohort: Cohort) -> tuple[list[DenseModels], Floats]:
        """Return the models of each task, wherever they lie, and the losses of all jobs."""
        ...

    def close(self) -> None:
        """Let the others go."""
        ...


class Engine(Trainer, Protocol):
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


class Unstacked:
    """The part of an engine that trains clients singly: it has no stacks."""

    chunk: int | None = None

    def stack_size(self, cohort: Cohort) -> int | None:
        """Return None: there are no stacks."""
        return None


class SequentialEngine(Unstacked):
    """Trains clients in turn; use it where a model does not stack, or to check another engine."""

    name = "loop"

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup
        self.loop = ClientLoop(copy.deepcopy(setup.module).to(setup.device), setup.layout)

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        losses = np.zeros(len(cohort))
        small = threads_for(self.setup.device, self.setup.layout.size)
        with small, arithmetic(self.setup.precision, self.setup.device, autocast=True):
            for job in range(len(cohort)):
                task = cohort.tasks[cohort.task[job]]
                chance = chance_of(task.seed, task.round, cohort.name(job))
                losses[job] = train_job(self.setup, self.loop, cohort, job, out, chance)
        return losses


class ThreadsEngine(Unstacked):
    """The loop shared out to threads with one operator thread each; for modules of any kind that draw nothing."""

    name = "threads"

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup
        self.workers = WorkerThreads(setup.threads)
        self.loops: SimpleQueue[ClientLoop] = SimpleQueue()
        for _ in range(setup.threads):
            self.loops.put(channels_last(setup))

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        losses = np.zeros(len(cohort))

        def work(job: np.int64) -> None:
            loop = self.loops.get()
            try:
                with torch.enable_grad(), shortened(self.setup.precision, self.setup.device):
                    losses[job] = train_job(self.setup, loop, cohort, int(job), out, None)
            finally:
                self.loops.put(loop)

        with arithmetic(self.setup.precision, self.setup.device):
            self.workers.run(work, list(longest_first(cohort, self.setup.training)))
        return losses


def channels_last(setup: TrainingSetup) -> ClientLoop:
    """Return a loop with the module as convolutions and pooling of the CPU want it; dense layers do not care."""
    module = copy.deepcopy(setup.module).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return ClientLoop(module, setup.layout)


def train_job(
    setup: TrainingSetup, loop: ClientLoop, cohort: Cohort, job: int, out: torch.Tensor, chance: int | None
) -> float:
    """Train one job of a cohort with the reference loop and write its model into its row."""
    task = cohort.tasks[cohort.task[job]]
    _, loss = loop.train(
        cohort.starts[cohort.origin[job]].to(setup.device),
        *cohort.samples(job),
        cohort.order(job, setup.training),
        setup.training,
        cohort.loss_of(job),
        chance,
        chance_of(task.seed, task.round, cohort.name(job)),
        cohort.descent,
        None if cohort.corrections is None else cohort.corrections[job].to(setup.device),
        cohort.dataset.augment,
        out[job],
    )
    return loss
