"""Tasks become cohorts: what trains in one stack, where each client starts, what its algorithm adds to its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from steelyard.clients.local.client_state import KeptModels, KeptVectors
from steelyard.clients.local.cohort import Cohort
from steelyard.clients.local.context import SimulationContext
from steelyard.clients.local.personal import OwnModels
from steelyard.clients.local.population import DevicePopulation
from steelyard.learning.descent import Descent
from steelyard.messages.updates import Failure, LossState, Task


class CohortBuilder:
    """Builds the cohorts of a simulation from what its clients kept in earlier rounds."""

    def __init__(self, context: SimulationContext, models: KeptModels, vectors: KeptVectors, own: OwnModels) -> None:
        self._context, self._models, self._vectors, self._own = context, models, vectors, own

    def groups(self, tasks: Sequence[Task]) -> list[list[int]]:
        """Indices of the tasks that can be trained in one stack: one data set, one form of the loss, one descent."""
        groups: dict[object, list[int]] = {}
        for index, task in enumerate(tasks):
            loss, dataset = self._context.loss(task.loss), self._context.population(task.seed).dataset
            key = (id(dataset), loss.name, loss.shape, loss.scale, self._descent(task))
            if task.algorithm.by_hand:
                key = (*key, task.algorithm)
            groups.setdefault(key, []).append(index)
        return list(groups.values())

    def gather(self, tasks: Sequence[Task]) -> tuple[Cohort, list[list[Failure]]]:
        """Return the cohort of tasks that train in one stack, and by task who cannot train, with the reason."""
        populations = self._at_work(tasks)
        failures: list[list[Failure]] = [[] for _ in tasks]
        starts: list[torch.Tensor] = [task.parameters for task in tasks]
        jobs: list[tuple[int, int, int]] = []
        for number, (task, population) in enumerate(zip(tasks, populations, strict=True)):
            self._models.receive(task, population.behaviours)
            for name in sorted(task.clients):
                position = population.position.get(name)
                why = "not registered" if position is None else self._context.too_few(int(population.sizes[position]))
                if position is None or why is not None:
                    failures[number].append(Failure(name, why or ""))
                    continue
                start = self._models.start(task, name, population.behaviours)
                jobs.append((number, position, number if start is task.parameters else len(starts)))
                if start is not task.parameters:
                    starts.append(start)
        table = np.array(jobs, dtype=np.int64).reshape(-1, 3)
        loss, descent = self._context.loss(tasks[0].loss), self._descent(tasks[0])
        form = LossState(loss.name, None, loss.shape, loss.scale)
        cohort = Cohort(tuple(tasks), populations, form, descent, table[:, 0], table[:, 1], tuple(starts), table[:, 2])
        cohort = self._own.begin(cohort)
        return replace(cohort, corrections=self._corrections(cohort)) if descent.corrected else cohort, failures

    def _descent(self, task: Task) -> Descent:
        """How the clients of a task take their steps in this round."""
        algorithm, training = task.algorithm, self._context.training
        descent = Descent.of(training, algorithm.pull, algorithm.corrects)
        return replace(descent, rate=descent.rate * task.rate, scheduled=training.schedule is not None)

    def _corrections(self, cohort: Cohort) -> torch.Tensor:
        """What each job's algorithm adds to its gradients or steps, [jobs, parameters]."""
        parts: list[torch.Tensor] = []
        for number, task in enumerate(cohort.tasks):
            _, clients = cohort.jobs(number)
            received = task.parameters.to(self._context.device).expand(len(clients), -1)
            kept = self._vectors.of(task.federation, task.algorithm, clients, received)
            parts.append(task.algorithm.correction(self.received(task), kept))
        return torch.cat(parts)

    def received(self, task: Task) -> dict[str, torch.Tensor]:
        """Return the vectors that come with a task, on the device."""
        return {name: vector.to(self._context.device) for name, vector in task.vectors.items()}

    def _at_work(self, tasks: Sequence[Task]) -> tuple[DevicePopulation, ...]:
        """The population of each task as it trains this round; tasks of one seed and round share it."""
        found: dict[tuple[int, int, float], DevicePopulation] = {}
        keys = [(task.seed, task.round, task.algorithm.held_back) for task in tasks]
        for seed, round, share in keys:
            if (seed, round, share) not in found:
                training = self._own.holding_back(seed, share)
                found[seed, round, share] = training.at_work(seed, round)
        return tuple(found[key] for key in keys)
