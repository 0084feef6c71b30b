"""What an engine is and what it is made for; how it lets an algorithm take the steps of a stack of clients itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steelyard.clients.local.cohort import Cohort, Schedule, schedule, sent
from steelyard.clients.local.hardware import WorkerThreads, arithmetic
from steelyard.clients.local.population import DevicePopulation
from steelyard.clients.local.settings import Precision
from steelyard.learning import parameters
from steelyard.learning.descent import StackDescent
from steelyard.learning.parameters import Layout
from steelyard.learning.settings import TrainingSettings
from steelyard.learning.training import normalises_batches
from steelyard.messages.algorithm import Part, Vectors
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


Jobs = NDArray[np.int64]
Slopes = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(step, models [clients, numbers]) → (gradients of the step's batches, mean losses [clients]), 0 for a client without
such a batch. In place of running means stands how far the batch moves them down."""


class Engine(ABC):
    """Trains all jobs of a cohort; every engine gives what the sequential one gives, within float tolerance.

    It cuts jobs into stacks, of one or of many, and trains one stack after another or each on a thread.
    """

    name: str
    """The name in the table of engines."""
    chunk: int | None = None
    """Clients in one stack; None where the engine stacks none, or finds the number for each cohort."""
    workers: WorkerThreads | None = None
    """With threads each stack is on one of them; without, stacks follow each other on all of torch's."""

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup

    def stack_size(self, cohort: Cohort) -> int | None:
        """Return how many clients of this cohort stand in one stack at most; None where the engine stacks none."""
        return self.chunk

    @abstractmethod
    def cut(self, cohort: Cohort) -> list[Jobs]:
        """Cut a cohort's jobs into stacks, jobs with more steps first; no other has more than the first."""

    @abstractmethod
    def stack(self, cohort: Cohort, jobs: Jobs, out: torch.Tensor, whole: int) -> torch.Tensor:
        """Train one stack into its rows of `out`; return the losses. A whole stack has so many jobs."""

    @abstractmethod
    def slopes(self, cohort: Cohort, plan: Schedule, whole: int) -> Slopes:
        """Return what takes the gradients of a stack's steps, for an algorithm that does the rest itself."""

    def native(self, cohort: Cohort, flat: torch.Tensor) -> torch.Tensor:
        """Return models in the order of numbers that the steps of a stack want."""
        return flat

    def restore(self, cohort: Cohort, native: torch.Tensor) -> torch.Tensor:
        """Return models in the order of the module again."""
        return native

    def train(self, cohort: Cohort, out: torch.Tensor) -> Floats:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        stacks = self.cut(cohort)
        train = self._by_hand if cohort.algorithm.by_hand else self.stack
        found: dict[int, torch.Tensor] = {}

        def work(number: int) -> None:
            jobs = stacks[number]
            found[number] = train(cohort.take(jobs), jobs, out, len(stacks[0]))

        with arithmetic(self.setup.precision, self.setup.device), torch.no_grad():
            if self.workers is not None:
                self.workers.run(work, range(len(stacks)))
            else:
                for number in range(len(stacks)):
                    work(number)
        # Fetched once: the host lays out the next stack while a device trains this one.
        losses = np.zeros(len(cohort))
        losses[np.concatenate(stacks)] = torch.cat([found[number] for number in range(len(stacks))]).cpu().numpy()
        return losses

    def _by_hand(self, cohort: Cohort, jobs: Jobs, out: torch.Tensor, whole: int) -> torch.Tensor:
        """Let the algorithm train one stack, and its clients keep what they keep."""
        local = HandSteps(self, cohort, whole)
        models, keep = cohort.algorithm.train(local)
        cohort.keep({name: local.turned(self.restore, rows) for name, rows in keep.items()})
        put(self.restore(cohort, models), jobs, out)
        return local.losses


def put(trained: torch.Tensor, jobs: Jobs, out: torch.Tensor) -> None:
    """Write a stack's models into the rows of their jobs."""
    if follow_each_other(jobs):
        out[jobs[0] : jobs[-1] + 1].copy_(trained)
    else:
        out[sent(jobs, out.device)] = trained.to(out.device)


def follow_each_other(jobs: Jobs) -> bool:
    """Whether jobs are rows without a gap."""
    return bool(np.all(np.diff(jobs) == 1))


class HandSteps:
    """The training of one stack as an algorithm sees it; implements `LocalSteps`.

    Numbers of models stand in the order that the engine's steps want, so that nothing is moved between two batches.
    """

    def __init__(self, engine: Engine, cohort: Cohort, whole: int) -> None:
        self._engine, self._cohort, self._whole, self._trainings = engine, cohort, whole, 0
        self._now: HandBatch | None = None
        device, layout = engine.setup.device, engine.setup.layout
        tasks = torch.stack([task.parameters.to(device) for task in cohort.tasks])

        def of_jobs(models: torch.Tensor) -> torch.Tensor:
            one = len(models) == 1
            return models.expand(len(cohort), -1) if one else models[torch.from_numpy(cohort.task).to(device)]

        self.received = of_jobs(engine.native(cohort, tasks))
        self.start = engine.native(cohort, cohort.start(device))
        self.kept: Vectors = {
            name: self.turned(engine.native, rows) for name, rows in cohort.vectors(of_jobs(tasks)).items()
        }
        self.rate = cohort.descent.rate
        self.losses = torch.zeros(len(cohort), dtype=torch.float64, device=device)
        """What each client reports: the mean over its last pass."""
        self._width = self.start.shape[1]
        self._trained = layout.trained if layout.trained < layout.size else self._width

    def turned(self, way: Callable[[Cohort, torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """Return what clients keep in the other order of numbers; numbers that are no model stay."""
        return way(self._cohort, rows) if rows.shape[1] > 1 else rows

    def part(self, part: Part) -> torch.Tensor:
        mask = parameters.mask(self._engine.setup.module, part, self.start.device)
        return self._engine.native(self._cohort, mask.float()[None])[0] > 0

    def trained(self, start: torch.Tensor, part: Part = "everything", epochs: int | None = None) -> torch.Tensor:
        flat = self._engine.restore(self._cohort, start)
        cohort, out = self._next(epochs, part).begin_at(flat), torch.empty_like(flat)
        self.losses = self._engine.stack(cohort, np.arange(len(cohort)), out, self._whole)
        return self._engine.native(self._cohort, out)

    def _next(self, epochs: int | None, part: Part) -> Cohort:
        """Return the cohort for one more training of this round, of so many epochs."""
        training = self._cohort.training
        if epochs is not None:
            training = training.model_copy(update={"epochs": epochs, "updates": None})
        self._trainings += 1
        return replace(self._cohort, training=training, part=part, before=self._trainings - 1)

    def batches(self, epochs: int | None = None, share: float = 1.0, part: Part = "everything") -> Iterator[HandBatch]:
        cohort = self._next(epochs, part)
        if share < 1:
            cohort = replace(
                cohort, populations=tuple(self._parts(number, share) for number in range(len(cohort.tasks)))
            )
        plan = schedule(cohort)
        slopes, total = self._engine.slopes(cohort, plan, self._whole), torch.zeros_like(self.losses)
        # The share that a batch has in the mean over the last pass: κ is in both, and in no sum where it is 0.
        counted = (plan.report.sum(2) / plan.weights.sum(2)).nan_to_num()
        for number, busy in enumerate(plan.active.tolist()):
            self._now = batch = HandBatch(slopes, number, torch.arange(len(cohort), device=total.device) < busy)
            yield batch
            total = total + batch.losses * counted[number]
        self.losses = total

    def _parts(self, number: int, share: float) -> DevicePopulation:
        """Return the population of a task with a share of the rows of each client."""
        task, mine = self._cohort.tasks[number], self._cohort.of_task(number)
        fewest = 1 + self._cohort.joined  # Batch norm learns nothing from one row.
        sizes = {mine.name(job): max(fewest, int(share * size)) for job, size in enumerate(mine.sizes)}
        return self._cohort.populations[number].parts(sizes, task.seed, task.round, "share")

    def optimiser(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        descent, trained, taken = self._cohort.descent, slice(self._trained), 0
        optimiser, corrections = StackDescent(descent, self.start, (trained,)), self._cohort.corrections
        optimiser.begin(
            self.start, None if corrections is None else self._engine.native(self._cohort, corrections.to(self.start))
        )

        def move(models: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
            nonlocal taken
            assert self._now is not None, "an optimiser moves within a batch"
            if descent.plain:
                moved = models.sub(gradients, alpha=self.rate)
            else:
                moved = models.clone()
                optimiser.apply(moved, gradients.clone(), taken, self.rate * self._now.taken.to(moved.dtype))
            rest = slice(self._trained, None)
            moved[:, rest] = models[:, rest] - gradients[:, rest]  # Running means have no step size.
            taken += 1
            return moved

        return move


class HandBatch:
    """One batch of every client that has one; implements `Batch`."""

    def __init__(self, slopes: Slopes, number: int, taken: torch.Tensor) -> None:
        self._slopes, self._number, self.taken = slopes, number, taken
        self.losses = torch.zeros(len(taken), device=taken.device)

    def gradient(self, models: torch.Tensor) -> torch.Tensor:
        found, self.losses = self._slopes(self._number, models)
        return found
