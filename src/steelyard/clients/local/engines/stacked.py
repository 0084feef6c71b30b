"""Clients of a built-in network in stacks, with steps derived by hand: batched products, no autograd."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.device_data.cohort import Cohort
from steelyard.clients.local.device_data.schedule import CurrentStep, Schedule, longest_first, schedule
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.execution import WorkerThreads, arithmetic
from steelyard.clients.local.steps.gradients import output_gradient
from steelyard.clients.local.steps.stacked_steps import StackedSteps
from steelyard.clients.local.steps.writers import Fresh, writer
from steelyard.learning.descent import StackDescent

STACK_BYTES = 24 << 20
"""Models of one stack on the CPU: large enough to hide the cost of calls, small enough to stay near the core."""


def shares(jobs: NDArray[np.int64], most: int, threads: int) -> list[NDArray[np.int64]]:
    """Cut jobs into stacks of like size, none larger than `most`, as many for each thread."""
    rounds = -(-len(jobs) // (most * threads))
    return [part for part in np.array_split(jobs, rounds * threads) if len(part)]


class StackedEngine:
    """Trains stacks of clients on the CPU, each stack on one thread; use it for many small clients."""

    name = "stacked"

    def __init__(self, setup: TrainingSetup, steps: StackedSteps, chunk: int | None = None) -> None:
        self.setup = setup
        self.steps = steps
        self.chunk = chunk or setup.chunk or max(1, STACK_BYTES // (4 * setup.layout.size))
        self.workers = WorkerThreads(setup.threads)

    def stack_size(self, cohort: Cohort) -> int | None:
        """Return how many clients stand in one stack at most."""
        return self.chunk

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        losses = np.zeros(len(cohort))
        ordered = longest_first(cohort, self.setup.training)
        parts = shares(ordered, self.chunk, self.setup.threads)

        def work(jobs: NDArray[np.int64]) -> None:
            losses[jobs] = self._stack(cohort.take(jobs), jobs, out)

        with arithmetic(self.setup.precision, self.setup.device), torch.no_grad():
            self.workers.run(work, parts)
        return losses

    def _stack(self, cohort: Cohort, jobs: NDArray[np.int64], out: torch.Tensor) -> NDArray[np.float64]:
        together = bool(np.all(np.diff(jobs) == 1))
        models = out[jobs[0] : jobs[-1] + 1] if together else out.new_empty((len(jobs), out.shape[1]))
        common = cohort.starts[cohort.origin[0]] if len(np.unique(cohort.origin)) == 1 else None
        plan = schedule(cohort, self.setup.training)
        if common is None:
            models.copy_(cohort.start(self.setup.device))
        elif not self._fresh(plan, cohort):
            models.copy_(common.expand_as(models))
        native = self.steps.native(models)
        losses = self._steps(cohort, plan, native, None if common is None else self.steps.native(common[None])[0])
        if native is not models:
            models.copy_(self.steps.restore(native))
        if not together:
            out[torch.from_numpy(jobs)] = models
        return losses.numpy()

    def _fresh(self, plan: Schedule, cohort: Cohort) -> bool:
        """Whether the first step writes every number of every model, so that there is nothing to copy before it."""
        shared = cohort.descent.plain and self.steps.first_is_shared
        return shared and plan.steps > 0 and plan.active[0] == plan.rows.shape[1]

    def _steps(self, cohort: Cohort, plan: Schedule, native: torch.Tensor, common: torch.Tensor | None) -> torch.Tensor:
        gradient, descent, steps = output_gradient(cohort.loss), cohort.descent, self.steps
        losses = torch.zeros(len(native), dtype=torch.float64)
        gradients = None if descent.plain else torch.zeros_like(native)
        draws = steps.draws or cohort.dataset.augment is not None
        keys = cohort.keys(native.device) if draws else None
        optimiser = StackDescent(descent, native)
        optimiser.begin(native, None if cohort.corrections is None else steps.native(cohort.corrections))
        for number in range(plan.steps):
            busy = int(plan.active[number])
            current = CurrentStep(cohort.dataset, plan, number, losses, busy, keys)
            views = steps.views(native[:busy])
            shared = steps.views(common) if number == 0 and common is not None else None
            write = writer(views, None if gradients is None else steps.views(gradients[:busy]), descent.rate)
            if shared is not None and self._fresh(plan, cohort):
                write = Fresh(views, shared, descent.rate)
            current.add(steps.step(views, current, gradient, write, shared))
            if gradients is not None:
                optimiser.apply(native[:busy], gradients[:busy], number)
        return losses
