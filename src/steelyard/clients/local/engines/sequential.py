"""One client after another through autograd: the reference, and the fallback for modules that nothing else takes."""

from __future__ import annotations

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steelyard.clients.local.device_data.cohort import Cohort
from steelyard.clients.local.engines.engine import TrainingSetup, Unstacked
from steelyard.clients.local.engines.precision import arithmetic
from steelyard.clients.local.engines.worker_threads import threads_for
from steelyard.learning.training import chance_of, train_client


class SequentialEngine(Unstacked):
    """Trains clients in turn; use it where a model does not stack, or to check another engine."""

    name = "loop"

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup
        self.module = copy.deepcopy(setup.module).to(setup.device)

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        losses = np.zeros(len(cohort))
        small = threads_for(self.setup.device, self.setup.layout.size)
        with small, arithmetic(self.setup.precision, self.setup.device, autocast=True):
            for job in range(len(cohort)):
                task = cohort.tasks[cohort.task[job]]
                chance = chance_of(task.seed, task.round, cohort.name(job))
                losses[job] = train_job(self.setup, self.module, cohort, job, out, chance)
        return losses


def train_job(
    setup: TrainingSetup, module: nn.Module, cohort: Cohort, job: int, out: torch.Tensor, chance: int | None
) -> float:
    """Train one job of a cohort with the reference loop and write its model into its row."""
    features, labels = cohort.samples(job)
    task = cohort.tasks[cohort.task[job]]
    model, loss = train_client(
        module,
        setup.layout,
        cohort.starts[cohort.origin[job]].to(setup.device),
        features,
        labels,
        cohort.order(job, setup.training),
        setup.training,
        cohort.loss_of(job),
        chance,
        chance_of(task.seed, task.round, cohort.name(job)),
        cohort.descent,
        None if cohort.corrections is None else cohort.corrections[job].to(setup.device),
    )
    out[job].copy_(model)
    return loss
