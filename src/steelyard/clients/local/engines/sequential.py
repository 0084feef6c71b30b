"""One client after another through autograd: the reference, and the fallback for modules that nothing else takes."""

from __future__ import annotations

import copy
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steelyard.clients.local.device_data.cohort import Cohort, Workshop
from steelyard.clients.local.engines.precision import arithmetic
from steelyard.clients.local.engines.stacked import by_work
from steelyard.clients.local.engines.worker_threads import Team, threads_for
from steelyard.learning.training import chance_of, train_client


class LoopEngine:
    """Trains clients in turn; use it where a model does not stack, or to check another engine."""

    name = "loop"

    def __init__(self, shop: Workshop) -> None:
        self.shop = shop
        self.module = copy.deepcopy(shop.module).to(shop.device)

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        losses = np.zeros(len(cohort))
        small = threads_for(self.shop.device, self.shop.layout.size)
        with small, arithmetic(self.shop.precision, self.shop.device, autocast=True):
            for job in range(len(cohort)):
                task = cohort.tasks[cohort.task[job]]
                chance = chance_of(task.seed, task.round, cohort.name(job))
                losses[job] = train_job(self.shop, self.module, cohort, job, out, chance)
        return losses


class ThreadsEngine:
    """The loop shared out to threads with one operator thread each; for modules of any kind that draw nothing."""

    name = "threads"

    def __init__(self, shop: Workshop) -> None:
        self.shop = shop
        self.team = Team(shop.threads)
        self.modules: SimpleQueue[nn.Module] = SimpleQueue()
        for _ in range(shop.threads):
            # Convolutions and pooling of the CPU want channels last; dense layers do not care.
            module = copy.deepcopy(shop.module)
            self.modules.put(module.to(memory_format=torch.channels_last))  # pyright: ignore[reportCallIssue]

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        losses = np.zeros(len(cohort))

        def work(job: np.int64) -> None:
            module = self.modules.get()
            try:
                with torch.enable_grad(), arithmetic(self.shop.precision, self.shop.device, autocast=True):
                    losses[job] = train_job(self.shop, module, cohort, int(job), out, None)
            finally:
                self.modules.put(module)

        self.team.run(work, list(by_work(cohort, self.shop.training)))
        return losses


def train_job(
    shop: Workshop, module: nn.Module, cohort: Cohort, job: int, out: torch.Tensor, chance: int | None
) -> float:
    """Train one job of a cohort with the reference loop and write its model into its row."""
    features, labels = cohort.samples(job)
    model, loss = train_client(
        module,
        shop.layout,
        cohort.starts[cohort.origin[job]].to(shop.device),
        features,
        labels,
        cohort.order(job, shop.training),
        shop.training,
        cohort.loss_of(job),
        chance,
    )
    out[job].copy_(model)
    return loss
