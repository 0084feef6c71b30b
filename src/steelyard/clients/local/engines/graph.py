"""Stacks of clients on a GPU, one captured graph of kernels per shape."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.device_data.cohort import Cohort
from steelyard.clients.local.device_data.schedule import Schedule, longest_first, schedule, sent, step_counts
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.execution import arithmetic
from steelyard.clients.local.engines.graph_buffers import StackBuffers
from steelyard.clients.local.engines.graph_steps import GraphStep
from steelyard.learning.descent import Descent
from steelyard.learning.training import batch_limit
from steelyard.messages.updates import LossState


class _Kind(NamedTuple):
    """What buffers and their graphs serve."""

    dataset: int
    form: Descent
    chunk: int
    loss: LossState


def even(count: int, most: int) -> int:
    """Return the size of stacks that hold so many jobs: all of like size, so that one set of graphs serves all."""
    return ceil(count / ceil(count / most))


class GraphEngine:
    """Trains stacks of clients with captured graphs; use it on a GPU."""

    def __init__(
        self, setup: TrainingSetup, make_step: Callable[[Descent], GraphStep], name: str, chunk: int | None = None
    ) -> None:
        self.setup, self.make_step, self.name = setup, make_step, name
        self.chunk = chunk or setup.chunk
        self._steppers: dict[Descent, GraphStep] = {}
        self._buffers: dict[_Kind, tuple[StackBuffers, int]] = {}
        """By what they serve, with their bytes; the latest last."""

    def stepper(self, cohort: Cohort) -> GraphStep:
        """Return the step of a cohort's descent; made once for each form of it."""
        form = cohort.descent.form
        if form not in self._steppers:
            self._steppers[form] = self.make_step(form)
        return self._steppers[form]

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        ordered = longest_first(cohort, self.setup.training, joined=self.setup.batch_norm)
        chunk = even(len(ordered), self.chunk or self.fitting(cohort))
        with arithmetic(self.setup.precision, self.setup.device), torch.no_grad():
            stacks = [ordered[begin : begin + chunk] for begin in range(0, len(ordered), chunk)]
            found = [self._stack(cohort.take(jobs), jobs, out, chunk) for jobs in stacks]
        # Fetched once: the host lays out the next stack while the device trains this one.
        losses = np.zeros(len(cohort))
        losses[ordered] = torch.cat(found).cpu().numpy()
        return losses

    def stack_size(self, cohort: Cohort) -> int | None:
        """Return how many clients stand in one stack: the number asked for, else as many as fit."""
        return self.chunk or self.fitting(cohort)

    def fitting(self, cohort: Cohort) -> int:
        """Return how many clients fit into the memory for stacks."""
        return max(1, self._memory // self._client_bytes(cohort))

    @property
    def _memory(self) -> int:
        return int(0.6 * self.setup.memory)

    def _client_bytes(self, cohort: Cohort) -> int:
        batch = batch_limit(self.setup.training, int(cohort.sizes.max()))
        half = 2 if self.setup.precision == "bfloat16" else 1
        descent, stepper = cohort.descent, self.stepper(cohort)
        copies = 2 + (not descent.plain) + 2 * descent.memories + bool(descent.pull) + descent.corrected
        return 4 * (copies * self.setup.layout.size + batch * stepper.sample_floats(batch) // half)

    def _stack(self, cohort: Cohort, jobs: NDArray[np.int64], out: torch.Tensor, chunk: int) -> torch.Tensor:
        """Train one stack into its rows of `out`; return the losses, on the device."""
        plan = schedule(cohort, self.setup.training, joined=self.setup.batch_norm)
        buffers = self._buffers_for(cohort, plan, chunk)
        stepper = buffers.stepper
        # What clients have in common is laid out once and then copied, not the other way round.
        models = cohort.spread(stepper.native(cohort.distinct(self.setup.device)))
        corrections = None if cohort.corrections is None else stepper.native(cohort.corrections.to(models.device))
        counts = step_counts(cohort.sizes, self.setup.training, joined=self.setup.batch_norm)
        steps = buffers.ready(plan.active)  # capturing overwrites the buffers: it comes first
        buffers.fill(plan, models, counts, cohort.keys(self.setup.device), cohort.descent.rate, corrections)
        del models, corrections  # the buffers hold them now; of large networks a second copy is gigabytes
        for step in steps:
            step()
        trained = stepper.restore(buffers.models[: len(jobs)])
        if np.array_equal(jobs, np.arange(jobs[0], jobs[0] + len(jobs))):
            out[jobs[0] : jobs[0] + len(jobs)].copy_(trained)
        else:
            out[sent(jobs, out.device)] = trained.to(out.device)
        return buffers.losses[: len(jobs)].clone()  # the next stack has the same buffers

    def _buffers_for(self, cohort: Cohort, plan: Schedule, chunk: int) -> StackBuffers:
        steps, _, batch = plan.rows.shape
        stepper = self.stepper(cohort)
        key = _Kind(id(cohort.dataset), cohort.descent.form, chunk, cohort.loss)
        buffers, room = self._buffers.get(key, (None, chunk * self._client_bytes(cohort)))
        if buffers is None or not buffers.fits(steps, chunk, batch):
            self._make_room(key, room)
            buffers = None  # what does not fit is let go of before there is more
            # Larger than needed: clients of another round may be a little larger.
            whole = self.setup.training.batch_size
            wide = batch if batch == whole else batch + (batch // 8 if len(np.unique(cohort.sizes)) > 1 else 0)
            shape = (steps + steps // 4, chunk, wide)
            buffers = StackBuffers.empty(stepper, cohort.dataset, cohort.loss, shape, stepper.size, plan.labels)
            self._buffers[key] = buffers, room
        return buffers

    def _make_room(self, key: _Kind, room: int) -> None:
        """Let go of buffers until such ones fit beside the others; two others are kept in any case.

        Algorithms side by side come back to theirs in every round. A loss whose shape adapts makes new ones in each, so
        that of those which differ in the loss alone only the latest two stay.
        """
        others = [known for known in self._buffers if known != key]
        kept: list[_Kind] = []
        for known in reversed(others):
            alike = sum(known._replace(loss=other.loss) == other for other in kept)
            size = self._buffers[known][1]
            if alike < 2 and (len(kept) < 2 or room + size <= self._memory):
                kept.append(known)
                room += size
        self._buffers = {known: self._buffers[known] for known in reversed(kept)}
