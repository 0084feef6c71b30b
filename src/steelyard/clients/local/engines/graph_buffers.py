"""The buffers of a stack on a GPU and the graphs captured over them: a step is one launch.

A step reads its samples through a counter on the device, so the same graph serves every step of every round. Clients
that have fewer steps than others drop out from the back of the stack; graphs of a few sizes are kept for that.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.device_data.dataset import DeviceDataset
from steelyard.clients.local.device_data.schedule import CurrentStep, Schedule, sent
from steelyard.clients.local.engines.graph_steps import GraphStep
from steelyard.learning.descent import StackDescent
from steelyard.messages.updates import LossState

Launch = Callable[[], None]
TOGETHER = 8
"""Steps in one graph where so many follow each other: a device waits between graphs for some thousandths of a ms."""


@contextmanager
def _without_collection() -> Generator[None]:
    """Collect garbage now and not meanwhile: an old graph that is freed while another is captured would spoil it."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass(eq=False)
class StackBuffers:
    """The buffers of a stack and the graphs captured over them."""

    stepper: GraphStep
    dataset: DeviceDataset
    loss: LossState
    models: torch.Tensor
    tables: Schedule
    rates: torch.Tensor
    """[steps, clients]: the step size, 0 once a client is done; used where a step is not plain."""
    counter: torch.Tensor
    losses: torch.Tensor
    keys: torch.Tensor
    """[clients]: the streams from which dropout by name draws."""
    gradients: torch.Tensor | None
    """None where a step is plain, so that gradients go straight into the models."""
    optimiser: StackDescent
    graphs: dict[tuple[int, int], Launch] = field(default_factory=dict[tuple[int, int], Launch])
    """What takes steps, by the number of clients and of steps."""
    pool: Any = None

    @classmethod
    def empty(
        cls,
        stepper: GraphStep,
        dataset: DeviceDataset,
        loss: LossState,
        shape: tuple[int, int, int],
        size: int,
        labels: torch.Tensor,
    ) -> StackBuffers:
        """Make buffers for [steps, clients, batch], and for labels like these."""
        steps, clients, batch = shape
        device = dataset.device

        def zeros(*lengths: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(lengths, dtype=dtype, device=device)

        tables = Schedule(
            zeros(steps, clients, batch, dtype=torch.int64),
            zeros(steps, clients, batch, *labels.shape[3:], dtype=labels.dtype),
            zeros(steps, clients, batch),
            zeros(steps, clients, batch),
            zeros(steps, clients, batch, dtype=torch.bool),
            np.zeros(0, dtype=np.int64),
        )
        models = zeros(clients, size)
        return cls(
            stepper,
            dataset,
            loss,
            models,
            tables,
            zeros(steps, clients),
            zeros(1, dtype=torch.int64),
            zeros(clients, dtype=torch.float64),
            zeros(clients, dtype=torch.int64),
            None if stepper.descent.plain else zeros(clients, stepper.trained),
            StackDescent(stepper.descent, models[:, : stepper.trained]),
        )

    def fits(self, steps: int, clients: int, batch: int) -> bool:
        have = self.tables.rows.shape
        return steps <= have[0] and clients <= have[1] and batch <= have[2]

    def fill(
        self,
        plan: Schedule,
        models: torch.Tensor,
        counts: NDArray[np.int64],
        keys: torch.Tensor,
        rate: float,
        corrections: torch.Tensor | None = None,
    ) -> None:
        """Put a round's work into the buffers."""
        steps, clients, batch = plan.rows.shape
        for table, given in zip(
            (self.tables.rows, self.tables.labels, self.tables.weights, self.tables.report, self.tables.valid),
            (plan.rows, plan.labels, plan.weights, plan.report, plan.valid),
            strict=True,
        ):
            # Steps beyond are not taken, whatever an earlier round left there; places beyond in these steps are.
            table[:steps, clients:].zero_()
            table[:steps, :clients, batch:].zero_()
            table[:steps, :clients, :batch] = given
        if self.gradients is not None:
            working = counts[None, :] > np.arange(steps)[:, None]
            self.rates[:steps, clients:].zero_()
            self.rates[:steps, :clients] = sent((working * rate).astype(np.float32), self.rates.device)
        self.models[:clients] = models
        trained = slice(0, self.stepper.trained)
        self.optimiser.begin(models[:, trained], None if corrections is None else corrections[:, trained])
        self.keys[:clients] = keys
        self.counter.zero_()
        self.losses.zero_()

    def step(self, busy: int) -> None:
        """Do one step of the first `busy` clients; this is what a graph captures."""
        current = CurrentStep(self.dataset, self.tables, self.counter, self.losses, busy, self.keys)
        models = self.models[:busy]
        into = None if self.gradients is None else self.gradients[:busy]
        self.stepper.gradients(models, into, current, self.loss)
        if into is not None:
            self.optimiser.apply(models[:, : self.stepper.trained], into, self.counter, current.now(self.rates))
        self.counter += 1

    def steps(self, busy: int, count: int) -> None:
        """Do some steps of the first `busy` clients, one after another."""
        for _ in range(count):
            self.step(busy)

    def capture(self, busy: int, count: int) -> Launch:
        """Return what does so many steps: a captured graph on a GPU, plain calls elsewhere."""
        if self.dataset.device.type != "cuda":
            return lambda: self.steps(busy, count)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.counter.zero_()
                self.step(busy)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may copy meanwhile, as digests of the round before do: only this one must not.
        with _without_collection(), torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            self.steps(busy, count)
        self.pool = self.pool or graph.pool()
        return graph.replay

    def ready(self, active: NDArray[np.int64]) -> list[Launch]:
        """Return what takes all steps, in turn, where so many clients are at work in each.

        A graph serves the smallest captured size that holds them; steps of the same size are launched several at once.
        """
        whole = len(self.models)
        sizes = sorted(ceil(share * whole) for share in self.stepper.shares)
        found: list[Launch] = []
        for size, alike in groupby(sizes[bisect_left(sizes, busy)] for busy in active.tolist()):
            many, single = divmod(len(list(alike)), TOGETHER)
            found += [self._graph(size, TOGETHER)] * many if many else []
            found += [self._graph(size, 1)] * single if single else []
        return found

    def _graph(self, size: int, count: int) -> Launch:
        if (size, count) not in self.graphs:
            self.graphs[size, count] = self.capture(size, count)
        return self.graphs[size, count]
