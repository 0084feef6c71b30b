"""Local training that an algorithm does itself, batch by batch, on any engine.

An engine takes whole trainings. One step of it with η = 1, on clients whose rows are one batch, gives gradients:
∇F(θ) = θ − (θ − ∇F(θ)). So every engine serves, and algorithms read like their papers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from steelyard.base.randomness import generator, stream_key
from steelyard.clients.local.cohort import Cohort
from steelyard.clients.local.context import SimulationContext
from steelyard.clients.local.engines.choice import ChosenEngine
from steelyard.clients.local.population import DevicePopulation, Ints
from steelyard.learning import parameters
from steelyard.learning.descent import Descent, StackDescent
from steelyard.learning.training import batch_limit, cut, orders
from steelyard.messages.algorithm import Part, Vectors
from steelyard.messages.updates import Floats

GRADIENT = Descent(rate=1.0, momentum=0.0, decay=0.0)


class HandEngine:
    """Trains cohorts whose algorithm takes the steps itself, with ordinary trainings in between."""

    def __init__(self, context: SimulationContext) -> None:
        self.context = context
        self._single: ChosenEngine | None = None

    def train(self, cohort: Cohort, out: torch.Tensor) -> Floats:
        """Let the algorithm train a cohort and its clients keep what they keep; return their losses."""
        algorithm, device = cohort.tasks[0].algorithm, self.context.device
        received = torch.stack([task.parameters.to(device) for task in cohort.tasks])[torch.from_numpy(cohort.task)]
        numbers = range(len(cohort.tasks))
        of_tasks = [cohort.vectors(number, received[cohort.jobs(number)[0]]) for number in numbers]
        kept = {name: torch.cat([found[name] for found in of_tasks]) for name in algorithm.keeps}
        local = HandSteps(self, cohort, received, kept)
        models, keep = algorithm.train(local)
        for number in numbers:
            cohort.keep(number, {name: rows[cohort.jobs(number)[0]] for name, rows in keep.items()})
        out.copy_(models)
        return local.losses

    def single(self, cohort: Cohort) -> ChosenEngine:
        """Return what takes single steps: the engine of the run, for one batch of everything."""
        if self._single is None:
            setup = self.context.setup
            once = setup.training.model_copy(update={"batch_size": "full", "epochs": 1, "updates": None})
            self._single = ChosenEngine(replace(setup, training=once), self.context.engine.settled(cohort))
        return self._single


class HandSteps:
    """The training of one cohort as an algorithm sees it; implements `LocalSteps`."""

    def __init__(self, engine: HandEngine, cohort: Cohort, received: torch.Tensor, kept: Vectors) -> None:
        self._engine, self._cohort = engine, cohort
        self.start = cohort.start(engine.context.device)
        self.received, self.kept, self.rate = received, kept, cohort.descent.rate
        self.losses: Floats = np.zeros(len(cohort))
        """What each client reports: the mean over its last pass."""
        self._now: HandBatch | None = None
        self._taken = 0

    def part(self, part: Part) -> torch.Tensor:
        return parameters.mask(self._engine.context.setup.module, part, self.start.device)

    def trained(self, start: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(start)
        self.losses = self._engine.context.engine.train(self._cohort.begin_at(start), out)
        return out

    def batches(self, epochs: int | None = None, share: float = 1.0) -> Iterator[HandBatch]:
        passes = [self._passes(job, epochs, share) for job in range(len(self._cohort))]
        limit = self._engine.context.training.updates if epochs is None else None
        rows = [[batch for each in mine for batch in each][:limit] for mine in passes]
        last = [len(mine) - len(whole[-1]) for mine, whole in zip(rows, passes, strict=True)]
        total, samples = np.zeros(len(rows)), np.zeros(len(rows))
        for number in range(max(map(len, rows), default=0)):
            self._now = batch = HandBatch(self._engine, self._cohort, rows, number, self._taken)
            self._taken += 1
            yield batch
            counted = np.array([max(begin, 0) <= number < len(mine) for begin, mine in zip(last, rows, strict=True)])
            sizes = counted * np.array([len(mine[min(number, len(mine) - 1)]) for mine in rows])
            total, samples = total + sizes * batch.losses.double().cpu().numpy(), samples + sizes
        self.losses = total / np.maximum(samples, 1)

    def _passes(self, job: int, epochs: int | None, share: float) -> list[list[Ints]]:
        """Return the batches of each pass of one job: positions among its rows."""
        training, task = self._engine.context.training, self._cohort.tasks[self._cohort.task[job]]
        if epochs is not None:
            training = training.model_copy(update={"epochs": epochs, "updates": None})
        name, size = self._cohort.name(job), int(self._cohort.sizes[job])
        joined = self._engine.context.setup.batch_norm
        mine = np.arange(size)
        if share < 1:
            fewest = min(size, 1 + joined)  # Batch norm learns nothing from one row.
            drawn = generator(task.seed, task.round, name, "share").permutation(size)
            mine = np.sort(drawn[: max(fewest, int(share * size))])
        order = orders(task.seed, task.round, [name], len(mine), training)[0]
        step = batch_limit(training, len(mine))
        return [[mine[batch] for batch in cut(rows, step, joined=joined)] for rows in order]

    def optimiser(self, part: Part = "everything") -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        layout = self._engine.context.setup.layout
        trained, taken = slice(0, layout.trained), 0
        descent = StackDescent(self._cohort.descent, self.start[:, trained])
        fixed = ~self.part(part)
        fixed[layout.trained :] = False

        def move(models: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
            nonlocal taken
            assert self._now is not None, "an optimiser moves within a batch"
            moved = models - gradients  # Running means have no step size.
            moved[:, trained] = models[:, trained]
            rates = self.rate * self._now.taken.to(moved.dtype)
            descent.apply(moved[:, trained], gradients[:, trained].clone(), taken, rates)
            taken += 1
            return moved.where(~fixed, models)

        return move


class HandBatch:
    """One batch of every client that has one; implements `Batch`."""

    def __init__(self, engine: HandEngine, cohort: Cohort, rows: list[list[Ints]], number: int, taken: int) -> None:
        self._engine, device = engine, engine.context.device
        here = np.array([number < len(mine) for mine in rows], dtype=np.bool_)
        self.taken = torch.from_numpy(here).to(device)
        # On a GPU all stay, each with some batch of its own: stacks of one shape need one graph of kernels.
        jobs = np.arange(len(rows)) if device.type == "cuda" else np.flatnonzero(here)
        self._jobs = torch.from_numpy(jobs).to(device)
        batches = {job: rows[job][min(number, len(rows[job]) - 1)] for job in jobs.tolist()}
        tasks = tuple(
            # Layers that draw must draw anew in every step.
            replace(task, seed=stream_key(task.seed, task.round, "", f"step {taken}"))
            for task in cohort.tasks
        )
        of_task = [
            {int(cohort.client[job]): batches[job] for job in batches if cohort.task[job] == n}
            for n in range(len(tasks))
        ]
        populations = tuple(map(_of_batches, cohort.populations, of_task))
        self._cohort = replace(cohort.take(jobs), tasks=tasks, populations=populations, descent=GRADIENT)
        self.losses = torch.zeros(len(rows), device=device)

    def gradient(self, models: torch.Tensor) -> torch.Tensor:
        start = models[self._jobs]
        out = torch.empty_like(start)
        found = self._engine.single(self._cohort).train(self._cohort.begin_at(start), out)
        gradients, losses = torch.zeros_like(models), torch.zeros_like(self.losses)
        gradients[self._jobs] = start - out
        losses[self._jobs] = torch.from_numpy(found).to(losses)
        self.losses = losses * self.taken
        return gradients.where(self.taken[:, None], 0.0)


def _of_batches(population: DevicePopulation, batches: dict[int, Ints]) -> DevicePopulation:
    """Return a population whose clients, by position, have the rows of one batch each."""
    found = copy.copy(population)
    found.sizes, found.begins = np.zeros_like(population.sizes), np.zeros_like(population.begins)
    flat: list[Ints] = []
    for position, batch in batches.items():
        found.sizes[position], found.begins[position] = len(batch), sum(map(len, flat))
        flat.append(population.begins[position] + batch)
    chosen = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *flat])).to(population.rows.device)
    found.rows, found.labels = population.rows[chosen], population.labels[chosen]
    return found
