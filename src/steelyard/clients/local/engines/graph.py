"""Stacks of clients on a GPU, one captured graph of kernels per shape."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.device_data.cohort import Cohort
from steelyard.clients.local.device_data.schedule import Schedule, longest_first, schedule, step_counts
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.execution import arithmetic
from steelyard.clients.local.engines.graph_buffers import StackBuffers
from steelyard.clients.local.engines.graph_steps import GraphStep
from steelyard.learning.descent import Descent
from steelyard.learning.training import batch_limit


class GraphEngine:
    """Trains stacks of clients with captured graphs; use it on a GPU."""

    def __init__(
        self, setup: TrainingSetup, make_step: Callable[[Descent], GraphStep], name: str, chunk: int | None = None
    ) -> None:
        self.setup, self.make_step, self.name = setup, make_step, name
        self.chunk = chunk or setup.chunk
        self._steppers: dict[Descent, GraphStep] = {}
        self._buffers: dict[object, StackBuffers] = {}

    def stepper(self, cohort: Cohort) -> GraphStep:
        """Return the step of a cohort's descent; made once for each form of it."""
        form = cohort.descent.form
        if form not in self._steppers:
            self._steppers[form] = self.make_step(form)
        return self._steppers[form]

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        losses = np.zeros(len(cohort))
        ordered = longest_first(cohort, self.setup.training, joined=self.setup.batch_norm)
        chunk = self._even(len(ordered), self.chunk or self.fitting(cohort))
        with arithmetic(self.setup.precision, self.setup.device), torch.no_grad():
            for begin in range(0, len(ordered), chunk):
                jobs = ordered[begin : begin + chunk]
                losses[jobs] = self._stack(cohort.take(jobs), jobs, out, chunk)
        return losses

    def stack_size(self, cohort: Cohort) -> int | None:
        """Return how many clients stand in one stack: the number asked for, else as many as fit."""
        return self.chunk or self.fitting(cohort)

    @staticmethod
    def _even(count: int, most: int) -> int:
        """Stacks of like size, so that one set of graphs serves all."""
        return ceil(count / ceil(count / most))

    def fitting(self, cohort: Cohort) -> int:
        """Return how many clients fit into six tenths of the memory."""
        batch = batch_limit(self.setup.training, int(cohort.sizes.max()))
        half = 2 if self.setup.precision == "bfloat16" else 1
        descent, stepper = cohort.descent, self.stepper(cohort)
        copies = 2 + (not descent.plain) + 2 * descent.memories + bool(descent.pull) + descent.corrected
        per_client = 4 * (copies * self.setup.layout.size + batch * stepper.sample_floats(batch) // half)
        return max(1, int(0.6 * self.setup.memory / per_client))

    def _stack(self, cohort: Cohort, jobs: NDArray[np.int64], out: torch.Tensor, chunk: int) -> NDArray[np.float64]:
        plan = schedule(cohort, self.setup.training, joined=self.setup.batch_norm)
        buffers = self._buffers_for(cohort, plan, chunk)
        stepper = buffers.stepper
        models = stepper.native(cohort.start(self.setup.device))
        corrections = None if cohort.corrections is None else stepper.native(cohort.corrections.to(models.device))
        counts = step_counts(cohort.sizes, self.setup.training, joined=self.setup.batch_norm)
        steps = [buffers.ready(int(busy)) for busy in plan.active]  # capturing overwrites the buffers: it comes first
        buffers.fill(plan, models, counts, cohort.keys(self.setup.device), cohort.descent.rate, corrections)
        for step in steps:
            step()
        out[torch.from_numpy(jobs).to(out.device)] = stepper.restore(buffers.models[: len(jobs)]).to(out.device)
        return buffers.losses[: len(jobs)].cpu().numpy()

    def _buffers_for(self, cohort: Cohort, plan: Schedule, chunk: int) -> StackBuffers:
        steps, _, batch = plan.rows.shape
        stepper = self.stepper(cohort)
        key = (id(cohort.dataset), cohort.loss, cohort.descent.form, chunk)
        buffers = self._buffers.get(key)
        if buffers is None or not buffers.fits(steps, chunk, batch):
            # Larger than needed: clients of another round may be a little larger. A loss whose shape adapts makes new
            # graphs every round, so only the latest are kept.
            others = [(known, kept) for known, kept in self._buffers.items() if known != key]
            self._buffers = dict(others[-2:])
            whole = self.setup.training.batch_size
            wide = batch if batch == whole else batch + (batch // 8 if len(np.unique(cohort.sizes)) > 1 else 0)
            shape = (steps + steps // 4, chunk, wide)
            buffers = StackBuffers.empty(stepper, cohort.dataset, cohort.loss, shape, stepper.size, plan.labels)
            self._buffers[key] = buffers
        return buffers
