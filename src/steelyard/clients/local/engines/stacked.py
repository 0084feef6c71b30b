"""Stacks of clients, step by step: those of a built-in network derived by hand, those of any other through vmap."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.cohort import Cohort, CurrentStep, Schedule, longest_first, schedule
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.steps import StackStep
from steelyard.clients.local.hardware import WorkerThreads, arithmetic
from steelyard.learning.descent import Descent, StackDescent

STACK_BYTES = 24 << 20
"""Models of one stack on the CPU: large enough to hide the cost of calls, small enough to stay near the core."""
MakeStep = Callable[[Descent], StackStep]


def shares(jobs: NDArray[np.int64], most: int, threads: int) -> list[NDArray[np.int64]]:
    """Cut jobs into stacks of like size, none larger than `most`, as many for each thread."""
    rounds = -(-len(jobs) // (most * threads))
    return [part for part in np.array_split(jobs, rounds * threads) if len(part)]


def near_the_core(setup: TrainingSetup) -> int:
    """Return how many clients of a built-in network a thread takes at a time on the CPU."""
    return max(1, STACK_BYTES // (4 * setup.layout.size))


def in_half_the_memory(setup: TrainingSetup) -> int:
    """Return how many clients half the memory holds: models, gradients, and activations guessed from the model."""
    return max(1, min(1000, setup.memory // 2 // max(4 * 8 * setup.layout.size, 1)))


class StackedEngine:
    """Trains stacks of clients step by step; use it for many small clients, or a module of your own.

    `threads`: each stack is on one thread; without, stacks follow each other on all of torch's.
    """

    def __init__(
        self, setup: TrainingSetup, make_step: MakeStep, name: str, chunk: int, threads: int | None = None
    ) -> None:
        self.setup, self.make_step, self.name, self.chunk = setup, make_step, name, chunk
        self.workers = None if threads is None else WorkerThreads(threads)
        self._steppers: dict[Descent, StackStep] = {}

    def stack_size(self, cohort: Cohort) -> int | None:
        """Return how many clients stand in one stack at most."""
        return self.chunk

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        losses, form = np.zeros(len(cohort)), cohort.descent.form
        if form not in self._steppers:
            self._steppers[form] = self.make_step(form)
        stepper = self._steppers[form]
        ordered = longest_first(cohort, self.setup.training, joined=self.setup.batch_norm)

        def work(jobs: NDArray[np.int64]) -> None:
            losses[jobs] = self._stack(stepper, cohort.take(jobs), jobs, out)

        with arithmetic(self.setup.precision, self.setup.device), torch.no_grad():
            if self.workers is not None:
                self.workers.run(work, shares(ordered, self.chunk, self.workers.threads))
            else:
                for begin in range(0, len(ordered), self.chunk):
                    work(ordered[begin : begin + self.chunk])
        return losses

    def _stack(
        self, stepper: StackStep, cohort: Cohort, jobs: NDArray[np.int64], out: torch.Tensor
    ) -> NDArray[np.float64]:
        device = self.setup.device
        together = out.device.type == device.type and bool(np.all(np.diff(jobs) == 1))
        size = (len(jobs), out.shape[1])
        models = out[jobs[0] : jobs[-1] + 1] if together else torch.empty(size, dtype=out.dtype, device=device)
        plan = schedule(cohort, self.setup.training, joined=self.setup.batch_norm)
        common = cohort.starts[cohort.origin[0]].to(device) if len(np.unique(cohort.origin)) == 1 else None
        written = cohort.descent.plain and stepper.first_is_shared and plan.steps > 0 and plan.active[0] == len(jobs)
        if common is None:
            models.copy_(cohort.start(device))
        elif not written:  # else the first step writes every number of every model
            models.copy_(common.expand_as(models))
        native = stepper.native(models)
        losses = self._steps(stepper, cohort, plan, native, None if common is None else stepper.native(common[None])[0])
        if native is not models:
            models.copy_(stepper.restore(native))
        if not together:
            out[torch.from_numpy(jobs).to(out.device)] = models.to(out.device)
        return losses.cpu().numpy()

    def _steps(
        self, stepper: StackStep, cohort: Cohort, plan: Schedule, native: torch.Tensor, common: torch.Tensor | None
    ) -> torch.Tensor:
        descent, models = cohort.descent, native[:, : stepper.trained]
        losses = torch.zeros(len(native), dtype=torch.float64, device=native.device)
        gradients = None if descent.plain else torch.zeros_like(models)
        draws = stepper.draws or cohort.dataset.augment is not None
        keys = cohort.keys(native.device) if draws else None
        optimiser = StackDescent(descent, models)
        corrections = None if cohort.corrections is None else stepper.native(cohort.corrections.to(native.device))
        optimiser.begin(models, None if corrections is None else corrections[:, : stepper.trained])
        for number in range(plan.steps):
            busy = int(plan.active[number])
            current = CurrentStep(cohort.dataset, plan, number, losses, busy, keys, None if number else common)
            into = None if gradients is None else gradients[:busy]
            stepper.gradients(native[:busy], into, current, cohort.loss)
            if into is not None:
                optimiser.apply(models[:busy], into, number)
        return losses
