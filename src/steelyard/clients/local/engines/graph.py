"""Stacks of clients on a GPU, one captured graph of kernels per shape: a step is one launch.

A step reads its samples through a counter on the device, so the same graph serves every step of every round. Clients
that have fewer steps than others drop out from the back of the stack; graphs of a few sizes are kept for that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.device_data.cohort import Cohort, Workshop
from steelyard.clients.local.device_data.current_step import Moment
from steelyard.clients.local.device_data.dataset import Shelf
from steelyard.clients.local.device_data.schedule import Schedule, schedule, step_counts
from steelyard.clients.local.engines.precision import arithmetic
from steelyard.clients.local.engines.stacked import by_work
from steelyard.clients.local.engines.vmap import mapped_gradient
from steelyard.clients.local.steps.dense import Architecture, Collected, InPlace
from steelyard.clients.local.steps.gradients import Sgd, output_gradient
from steelyard.learning.training import batch_limit
from steelyard.messages import LossState

SHARES = tuple(sixteenths / 16 for sixteenths in range(16, 0, -1))
"""Sizes of the stack for which graphs are captured, as shares of the whole, each when it is first needed. A stack of
unequal clients (benchmark B) does 2 % more work than it must; with ¾, ½, ¼ and ⅛ alone it was 10 %."""


class Stepper(Protocol):
    """One training step of a stack, in whatever way, on buffers that stay where they are."""

    sgd: Sgd
    size: int

    def native(self, flat: torch.Tensor) -> torch.Tensor: ...

    def restore(self, native: torch.Tensor) -> torch.Tensor: ...

    def sample_floats(self, samples: int) -> int: ...

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, moment: Moment, loss: LossState) -> None:
        """Do the step in place (`into` is None) or write the gradients; add the samples' losses up in the moment."""
        ...


class ByHand:
    """Steps of a built-in network."""

    def __init__(self, steps: Architecture, sgd: Sgd) -> None:
        self.steps, self.sgd, self.size = steps, sgd, steps.size
        self.native, self.restore, self.sample_floats = steps.native, steps.restore, steps.sample_floats

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, moment: Moment, loss: LossState) -> None:
        views = self.steps.views(models)
        write = InPlace(views, self.sgd.rate) if into is None else Collected(self.steps.views(into))
        batch = (moment.features, moment.labels, moment.weights)
        moment.add(self.steps.step(views, *batch, output_gradient(loss), write))


class ByMap:
    """Steps of any module through vmap."""

    def __init__(self, shop: Workshop, sgd: Sgd) -> None:
        self.layout, self.sgd, self.size = shop.layout, sgd, shop.layout.size
        self.module = copy.deepcopy(shop.module).to(shop.device).train()

    def native(self, flat: torch.Tensor) -> torch.Tensor:
        return flat

    def restore(self, native: torch.Tensor) -> torch.Tensor:
        return native

    def sample_floats(self, samples: int) -> int:
        # Unknown network: as much as the built-in convolutional one needs per parameter of a small model.
        return max(100_000, self.layout.size // 4)

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, moment: Moment, loss: LossState) -> None:
        batch = (moment.features, moment.labels, moment.weights)
        slopes, each = mapped_gradient(self.module, loss)(self.layout.views(models), *batch)
        target = models if into is None else into
        for slot in self.layout.slots:
            if slot.offset >= self.layout.trained:
                continue
            place = target.narrow(1, slot.offset, slot.size)
            if into is None:
                place.sub_(slopes[slot.name].reshape(len(models), -1), alpha=self.sgd.rate)
            else:
                place.copy_(slopes[slot.name].reshape(len(models), -1))
        moment.add(each)


@dataclass(eq=False)
class Station:
    """The buffers of a stack and the graphs captured over them."""

    stepper: Stepper
    shelf: Shelf
    loss: LossState
    models: torch.Tensor
    tables: Schedule
    rates: torch.Tensor
    """[steps, clients]: the step size, 0 once a client is done."""
    counter: torch.Tensor
    lost: torch.Tensor
    gradients: torch.Tensor | None = None
    velocity: torch.Tensor | None = None
    start: torch.Tensor | None = None
    graphs: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])
    pool: Any = None

    @classmethod
    def empty(
        cls, stepper: Stepper, shelf: Shelf, loss: LossState, shape: tuple[int, int, int], size: int, kind: torch.dtype
    ) -> Station:
        """Make room for [steps, clients, batch]."""
        steps, clients, batch = shape
        device, sgd = shelf.device, stepper.sgd

        def room(*lengths: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(lengths, dtype=dtype, device=device)

        tables = Schedule(
            room(steps, clients, batch, dtype=torch.int64),
            room(steps, clients, batch, dtype=kind),
            room(steps, clients, batch),
            room(steps, clients, batch),
            np.zeros(0, dtype=np.int64),
        )
        return cls(
            stepper,
            shelf,
            loss,
            room(clients, size),
            tables,
            room(steps, clients),
            room(1, dtype=torch.int64),
            room(clients, dtype=torch.float64),
            None if sgd.plain else room(clients, size),
            room(clients, size) if sgd.momentum else None,
            room(clients, size) if sgd.proximal else None,
        )

    def fits(self, steps: int, clients: int, batch: int) -> bool:
        have = self.tables.rows.shape
        return steps <= have[0] and clients <= have[1] and batch <= have[2]

    def fill(self, plan: Schedule, models: torch.Tensor, counts: NDArray[np.int64]) -> None:
        """Put a round's work into the buffers."""
        steps, clients, batch = plan.rows.shape
        for table, given in zip(
            (self.tables.rows, self.tables.labels, self.tables.weights, self.tables.report),
            (plan.rows, plan.labels, plan.weights, plan.report),
            strict=True,
        ):
            table.zero_()
            table[:steps, :clients, :batch] = given
        working = counts[None, :] > np.arange(steps)[:, None]
        self.rates.zero_()
        self.rates[:steps, :clients] = torch.from_numpy(working * self.stepper.sgd.rate).to(self.rates)
        self.models[:clients] = models
        if self.start is not None:
            self.start[:clients] = models
        if self.velocity is not None:
            self.velocity.zero_()
        self.counter.zero_()
        self.lost.zero_()

    def step(self, busy: int) -> None:
        """Do one step of the first `busy` clients; this is what a graph captures."""
        moment = Moment(self.shelf, self.tables, self.counter, self.lost, busy)
        models = self.models[:busy]
        into = None if self.gradients is None else self.gradients[:busy]
        self.stepper.gradients(models, into, moment, self.loss)
        if into is not None:
            self.stepper.sgd.apply(
                models,
                into,
                None if self.velocity is None else self.velocity[:busy],
                None if self.start is None else self.start[:busy],
                moment.now(self.rates),
            )
        self.counter += 1

    def capture(self, busy: int) -> Callable[[], None]:
        """Return what does one step: a captured graph on a GPU, the plain call elsewhere."""
        if self.shelf.device.type != "cuda":
            return lambda: self.step(busy)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.counter.zero_()
                self.step(busy)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.step(busy)
        self.pool = self.pool or graph.pool()
        return graph.replay

    def ready(self, busy: int) -> Callable[[], None]:
        """Return the graph of the smallest captured size that holds so many clients."""
        whole = len(self.models)
        size = min(size for size in (ceil(share * whole) for share in SHARES) if size >= busy)
        if size not in self.graphs:
            self.graphs[size] = self.capture(size)
        return self.graphs[size]


class GraphEngine:
    """Trains stacks of clients with captured graphs; use it on a GPU."""

    def __init__(self, shop: Workshop, stepper: Stepper, name: str, chunk: int | None = None) -> None:
        self.shop, self.stepper, self.name = shop, stepper, name
        self.chunk = chunk or shop.chunk
        self._stations: dict[object, Station] = {}

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        lost = np.zeros(len(cohort))
        ordered = by_work(cohort, self.shop.training)
        chunk = self._even(len(ordered), self.chunk or self.fitting(cohort))
        with arithmetic(self.shop.precision, self.shop.device), torch.no_grad():
            for begin in range(0, len(ordered), chunk):
                jobs = ordered[begin : begin + chunk]
                lost[jobs] = self._stack(cohort.take(jobs), jobs, out, chunk)
        return lost

    @staticmethod
    def _even(count: int, most: int) -> int:
        """Stacks of like size, so that one set of graphs serves all."""
        return ceil(count / ceil(count / most))

    def fitting(self, cohort: Cohort) -> int:
        """Return how many clients fit into six tenths of the memory."""
        batch = batch_limit(self.shop.training, int(cohort.sizes.max()))
        half = 2 if self.shop.precision == "bfloat16" else 1
        copies = 2 + (not self.stepper.sgd.plain) + 2 * bool(self.stepper.sgd.momentum)
        per_client = 4 * (copies * self.shop.layout.size + batch * self.stepper.sample_floats(batch) // half)
        return max(1, int(0.6 * self.shop.memory / per_client))

    def _stack(self, cohort: Cohort, jobs: NDArray[np.int64], out: torch.Tensor, chunk: int) -> NDArray[np.float64]:
        plan = schedule(cohort, self.shop.training)
        station = self._station(cohort, plan, chunk)
        models = self.stepper.native(cohort.start(self.shop.device))
        counts = step_counts(cohort.sizes, self.shop.training)
        steps = [station.ready(int(busy)) for busy in plan.active]  # capturing overwrites the buffers: it comes first
        station.fill(plan, models, counts)
        for step in steps:
            step()
        out[torch.from_numpy(jobs).to(out.device)] = self.stepper.restore(station.models[: len(jobs)]).to(out.device)
        return station.lost[: len(jobs)].cpu().numpy()

    def _station(self, cohort: Cohort, plan: Schedule, chunk: int) -> Station:
        steps, _, batch = plan.rows.shape
        key = (id(cohort.shelf), cohort.loss, chunk)
        station = self._stations.get(key)
        if station is None or not station.fits(steps, chunk, batch):
            # Some room to grow: clients of another round may be a little larger. A loss whose shape adapts makes new
            # graphs every round, so only the latest are kept.
            others = [(known, kept) for known, kept in self._stations.items() if known != key]
            self._stations = dict(others[-2:])
            whole = self.shop.training.batch_size
            wide = batch if batch == whole else batch + (batch // 8 if len(np.unique(cohort.sizes)) > 1 else 0)
            room = (steps + steps // 4, chunk, wide)
            station = Station.empty(self.stepper, cohort.shelf, cohort.loss, room, self.stepper.size, plan.labels.dtype)
            self._stations[key] = station
        return station
