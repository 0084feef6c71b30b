"""One client after another through autograd: the reference, and the fallback for modules that nothing else takes."""

from __future__ import annotations

import copy

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.cohort import Cohort, Workshop
from steelyard.clients.local.precision import arithmetic
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
        with arithmetic(self.shop.precision, self.shop.device, autocast=True):
            for job in range(len(cohort)):
                losses[job] = self._one(cohort, job, out)
        return losses

    def _one(self, cohort: Cohort, job: int, out: torch.Tensor) -> float:
        task = cohort.tasks[cohort.task[job]]
        features, labels = cohort.samples(job)
        model, loss = train_client(
            self.module,
            self.shop.layout,
            cohort.starts[cohort.origin[job]].to(self.shop.device),
            features,
            labels,
            cohort.order(job, self.shop.training),
            self.shop.training,
            cohort.loss_of(job),
            chance_of(task.seed, task.round, cohort.name(job)),
        )
        out[job].copy_(model)
        return loss
