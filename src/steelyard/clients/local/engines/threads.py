"""Clients shared out to worker threads, each trained through autograd."""

from __future__ import annotations

import copy
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steelyard.clients.local.device_data.cohort import Cohort
from steelyard.clients.local.device_data.schedule import longest_first
from steelyard.clients.local.engines.engine import TrainingSetup, Unstacked
from steelyard.clients.local.engines.precision import arithmetic
from steelyard.clients.local.engines.sequential import train_job
from steelyard.clients.local.engines.worker_threads import WorkerThreads


class ThreadsEngine(Unstacked):
    """The loop shared out to threads with one operator thread each; for modules of any kind that draw nothing."""

    name = "threads"

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup
        self.workers = WorkerThreads(setup.threads)
        self.modules: SimpleQueue[nn.Module] = SimpleQueue()
        for _ in range(setup.threads):
            # Convolutions and pooling of the CPU want channels last; dense layers do not care.
            module = copy.deepcopy(setup.module)
            self.modules.put(module.to(memory_format=torch.channels_last))  # pyright: ignore[reportCallIssue]

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        losses = np.zeros(len(cohort))

        def work(job: np.int64) -> None:
            module = self.modules.get()
            try:
                with torch.enable_grad(), arithmetic(self.setup.precision, self.setup.device, autocast=True):
                    losses[job] = train_job(self.setup, module, cohort, int(job), out, None)
            finally:
                self.modules.put(module)

        self.workers.run(work, list(longest_first(cohort, self.setup.training)))
        return losses
