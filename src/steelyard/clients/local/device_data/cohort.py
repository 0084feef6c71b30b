"""The jobs of a round, from one task or from many, in the form in which engines take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.device_data.dataset import DeviceDataset, DevicePopulation, Ints
from steelyard.data.dataset import HONEST, Behaviour
from steelyard.learning.descent import Descent
from steelyard.learning.settings import TrainingSettings
from steelyard.learning.training import chance_of, orders
from steelyard.messages.updates import LossState, Task


@dataclass(frozen=True, eq=False)
class Cohort:
    """Clients to be trained together: they share the data set and the form of the loss, not the starting model."""

    tasks: tuple[Task, ...]
    populations: tuple[DevicePopulation, ...]
    """The population of each task's seed, as it trains this round."""
    loss: LossState
    """Form of the loss; the class weights are per task."""
    descent: Descent
    """How every job takes a step."""
    task: Ints
    """For each job, the position of its task."""
    client: Ints
    """For each job, the position of its client in the task's population."""
    starts: tuple[torch.Tensor, ...]
    """Distinct starting models."""
    origin: Ints
    """For each job, which starting model it trains from."""
    corrections: torch.Tensor | None = None
    """[jobs, parameters]: each job's correction, where the descent is corrected."""

    def __len__(self) -> int:
        return len(self.task)

    @property
    def dataset(self) -> DeviceDataset:
        return self.populations[0].dataset

    @property
    def sizes(self) -> Ints:
        """Number of training samples of each job."""
        found = np.zeros(len(self), dtype=np.int64)
        for number, population in enumerate(self.populations):
            mine = self.task == number
            found[mine] = population.sizes[self.client[mine]]
        return found

    def name(self, job: int) -> str:
        return self.populations[self.task[job]].names[self.client[job]]

    def behaviour(self, job: int) -> Behaviour:
        """Return how the client of a job departs from the protocol."""
        behaviours = self.populations[self.task[job]].behaviours
        return behaviours.get(self.name(job), HONEST) if behaviours else HONEST

    def jobs(self, number: int) -> tuple[slice, list[str]]:
        """Return where the jobs of a task stand, and the names of their clients; jobs of one task stand together."""
        begin, end = np.searchsorted(self.task, (number, number + 1)).tolist()
        return slice(begin, end), [self.name(job) for job in range(begin, end)]

    def begin_at(self, models: torch.Tensor) -> Cohort:
        """Return the same jobs, each beginning at its row of models [jobs, parameters]."""
        return replace(self, starts=tuple(models.unbind()), origin=np.arange(len(self)))

    def take(self, jobs: Sequence[int] | Ints) -> Cohort:
        """Return some of the jobs, in the order asked for."""
        picked = np.asarray(jobs, dtype=np.int64)
        corrections = self.corrections
        if corrections is not None:
            corrections = corrections[torch.from_numpy(picked).to(corrections.device)]
        mine = {"task": self.task[picked], "client": self.client[picked], "origin": self.origin[picked]}
        return replace(self, **mine, corrections=corrections)

    def samples(self, job: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features and labels of one job."""
        population = self.populations[self.task[job]]
        begin = int(population.begins[self.client[job]])
        end = begin + int(population.sizes[self.client[job]])
        return population.dataset.gather(population.rows[begin:end]), population.labels[begin:end]

    def order(self, job: int, training: TrainingSettings) -> NDArray[np.int64]:
        """Return the order in which one job visits its samples: [epochs, size]."""
        task = self.tasks[self.task[job]]
        size = int(self.populations[self.task[job]].sizes[self.client[job]])
        return orders(task.seed, task.round, [self.name(job)], size, training)[0]

    def loss_of(self, job: int) -> LossState:
        """Return the loss of one job with its class weights."""
        return replace(self.loss, class_weights=self.tasks[self.task[job]].loss.class_weights)

    def class_weights(self) -> torch.Tensor | None:
        """Return κ of every job, [jobs, classes], or None where every class of every job counts 1."""
        given = [task.loss.class_weights for task in self.tasks]
        if all(weights is None for weights in given):
            return None
        width = max(len(weights) for weights in given if weights is not None)
        table = torch.tensor([weights or (1.0,) * width for weights in given], dtype=torch.float32)
        return table[torch.from_numpy(self.task)].to(self.dataset.device)

    def keys(self, device: torch.device) -> torch.Tensor:
        """Return the key of the stream from which each job's dropout by name draws, [jobs]."""
        tasks = [self.tasks[number] for number in self.task]
        found = [chance_of(task.seed, task.round, self.name(job)) for job, task in enumerate(tasks)]
        return torch.tensor(found, dtype=torch.int64, device=device)

    def start(self, device: torch.device) -> torch.Tensor:
        """Return the starting model of every job, stacked: [jobs, parameters]."""
        return self.spread(self.distinct(device)).contiguous()

    def distinct(self, device: torch.device) -> torch.Tensor:
        """Return the starting models that these jobs have among them, each once; `spread` gives every job its own."""
        return torch.stack([self.starts[origin].to(device) for origin in np.unique(self.origin)])

    def spread(self, distinct: torch.Tensor) -> torch.Tensor:
        """Return the row of every job: a view where all begin alike."""
        if len(distinct) == 1:
            return distinct.expand(len(self), -1)
        places = np.unique(self.origin, return_inverse=True)[1]
        return distinct[torch.from_numpy(places).to(distinct.device)]
