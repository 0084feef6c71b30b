"""Single clients through autograd, one after another or shared out to threads: the reference, for any module."""

from __future__ import annotations

import copy
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.cohort import Cohort, longest_first
from steelyard.clients.local.engines.engine import TrainingSetup, Unstacked
from steelyard.clients.local.hardware import WorkerThreads, arithmetic, shortened, threads_for
from steelyard.learning.training import ClientLoop, chance_of


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
