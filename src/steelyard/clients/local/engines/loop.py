"""The reference: single clients through autograd, one after another or shared out to threads."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from steelyard.clients.local.cohort import Cohort, Schedule, longest_first
from steelyard.clients.local.engines.engine import Engine, Jobs, Slopes, TrainingSetup
from steelyard.clients.local.hardware import SMALL, WorkerThreads, shortened
from steelyard.learning.training import ClientLoop


class LoopEngine(Engine):
    """Trains clients in turn; use it where a model does not stack, or to check another engine.

    With `threads` it shares them out to so many, with one operator thread each: for modules that draw nothing.
    """

    def __init__(self, setup: TrainingSetup, threads: int = 0) -> None:
        super().__init__(setup)
        self.name = "threads" if threads else "loop"
        small = setup.device.type == "cpu" and setup.layout.size < SMALL
        self.workers = WorkerThreads(max(threads, 1)) if threads or small else None
        self._seeds = not threads  # torch's generator is one for all threads
        self._loops: SimpleQueue[ClientLoop] = SimpleQueue()
        for _ in range(max(threads, 1)):
            module = copy.deepcopy(setup.module).to(setup.device)
            self._loops.put(channels_last(setup) if threads else ClientLoop(module, setup.layout))

    @contextmanager
    def _loop(self) -> Generator[ClientLoop]:
        loop = self._loops.get()
        try:
            with torch.enable_grad(), shortened(self.setup.precision, self.setup.device):
                yield loop
        finally:
            self._loops.put(loop)

    def cut(self, cohort: Cohort) -> list[Jobs]:
        return list(longest_first(cohort)[:, None])

    def stack(self, cohort: Cohort, jobs: Jobs, out: torch.Tensor, whole: int) -> torch.Tensor:
        with self._loop() as loop:
            found = [
                train_job(loop, cohort, job, out[row], cohort.chance(job) if self._seeds else None)
                for job, row in enumerate(jobs)
            ]
        return torch.tensor(found, dtype=torch.float64, device=cohort.dataset.device)

    def slopes(self, cohort: Cohort, plan: Schedule, whole: int) -> Slopes:
        dataset, valid = cohort.dataset, plan.valid.sum(2).tolist()

        def slopes(number: int, models: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found, losses = torch.empty_like(models), models.new_zeros(len(models))
            found[plan.active[number] :] = 0
            with self._loop() as loop:
                for job in range(plan.active[number]):
                    place, key = (number, job, slice(valid[number][job])), cohort.chance(job)
                    samples = dataset.gather(plan.rows[place]), plan.labels[place], cohort.loss_of(job)
                    draws = key if self._seeds else None, key, number, dataset.augment, cohort.part
                    losses[job] = loop.gradient(models[job], *samples, *draws, into=found[job])
            return found, losses

        return slopes


def channels_last(setup: TrainingSetup) -> ClientLoop:
    """Return a loop with the module as convolutions and pooling of the CPU want it; dense layers do not care."""
    module = copy.deepcopy(setup.module).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return ClientLoop(module, setup.layout)


def train_job(loop: ClientLoop, cohort: Cohort, job: int, into: torch.Tensor, chance: int | None) -> float:
    """Train one job of a cohort with the reference loop, and write its model into a vector."""
    device = cohort.dataset.device
    _, loss = loop.train(
        cohort.starts[cohort.origin[job]].to(device),
        *cohort.samples(job),
        cohort.order(job),
        cohort.training,
        cohort.loss_of(job),
        chance,
        cohort.chance(job),
        cohort.descent,
        None if cohort.corrections is None else cohort.corrections[job].to(device),
        cohort.dataset.augment,
        into,
        cohort.part,
    )
    return loss
