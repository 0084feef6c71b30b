"""Stacks of clients, by any kind of step: the steps taken one by one, or captured in graphs on a GPU.

What is captured is one launch: it reads its samples through a counter on the device, so the same graph serves every
step of every round. Clients that have fewer steps than others drop out from the back of the stack; graphs of a few
sizes are kept for that.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.cohort import Cohort, CurrentStep, Schedule, longest_first, schedule, sent, step_counts
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.steps import StackStep
from steelyard.clients.local.hardware import WorkerThreads, arithmetic
from steelyard.clients.local.population import DeviceDataset
from steelyard.learning.descent import Descent, StackDescent
from steelyard.learning.training import batch_limit
from steelyard.messages.updates import LossState

MakeStep = Callable[[Descent], StackStep]
Jobs = NDArray[np.int64]
STACK_BYTES = 24 << 20
"""Models of one stack on the CPU: large enough to hide the cost of calls, small enough to stay near the core."""


def near_the_core(setup: TrainingSetup) -> int:
    """Return how many clients of a built-in network a thread takes at a time on the CPU."""
    return max(1, STACK_BYTES // (4 * setup.layout.size))


def in_half_the_memory(setup: TrainingSetup) -> int:
    """Return how many clients half the memory holds: models, gradients, and activations guessed from the model."""
    return max(1, min(1000, setup.memory // 2 // max(4 * 8 * setup.layout.size, 1)))


class StackedEngine(ABC):
    """Trains stacks of clients by steps of the kind that `make_step` makes; use it where clients are small and many."""

    workers: WorkerThreads | None = None
    """With threads each stack is on one of them; without, stacks follow each other on all of torch's."""

    def __init__(self, setup: TrainingSetup, make_step: MakeStep, name: str, chunk: int | None = None) -> None:
        self.setup, self.make_step, self.name = setup, make_step, name
        self.chunk = chunk or setup.chunk
        self._steppers: dict[Descent, StackStep] = {}

    def stepper(self, cohort: Cohort) -> StackStep:
        """Return the step of a cohort's descent; made once for each form of it."""
        form = cohort.descent.form
        if form not in self._steppers:
            self._steppers[form] = self.make_step(form)
        return self._steppers[form]

    def stack_size(self, cohort: Cohort) -> int | None:
        """Return how many clients stand in one stack at most."""
        return self.chunk

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        self.stepper(cohort)  # Made here: stacks may be on several threads.
        stacks = self.cut(longest_first(cohort, self.setup.training, joined=self.setup.batch_norm), cohort)
        found: dict[int, torch.Tensor] = {}

        def work(number: int) -> None:
            jobs = stacks[number]
            found[number] = self.stack(cohort.take(jobs), jobs, out, len(stacks[0]))

        with arithmetic(self.setup.precision, self.setup.device), torch.no_grad():
            if self.workers is not None:
                self.workers.run(work, range(len(stacks)))
            else:
                for number in range(len(stacks)):
                    work(number)
        # Fetched once: the host lays out the next stack while a device trains this one.
        losses = np.zeros(len(cohort))
        losses[np.concatenate(stacks)] = torch.cat([found[number] for number in range(len(stacks))]).cpu().numpy()
        return losses

    @abstractmethod
    def cut(self, jobs: Jobs, cohort: Cohort) -> list[Jobs]:
        """Cut a cohort's jobs into stacks; no other has more than the first."""

    @abstractmethod
    def stack(self, cohort: Cohort, jobs: Jobs, out: torch.Tensor, whole: int) -> torch.Tensor:
        """Train one stack into its rows of `out`; return the losses. A whole stack has so many jobs."""


def _runs(jobs: Jobs, most: int) -> list[Jobs]:
    return [jobs[begin : begin + most] for begin in range(0, len(jobs), most)]


def _put(trained: torch.Tensor, jobs: Jobs, out: torch.Tensor) -> None:
    """Write a stack's models into the rows of their jobs."""
    if _follow_each_other(jobs):
        out[jobs[0] : jobs[-1] + 1].copy_(trained)
    else:
        out[sent(jobs, out.device)] = trained.to(out.device)


def _follow_each_other(jobs: Jobs) -> bool:
    return bool(np.all(np.diff(jobs) == 1))


class SteppedEngine(StackedEngine):
    """Takes the steps of a stack one by one."""

    chunk: int

    def __init__(
        self, setup: TrainingSetup, make_step: MakeStep, name: str, chunk: int, threads: int | None = None
    ) -> None:
        super().__init__(setup, make_step, name, chunk)
        self.workers = None if threads is None else WorkerThreads(threads)

    def cut(self, jobs: Jobs, cohort: Cohort) -> list[Jobs]:
        """Cut jobs into stacks of the size asked for; for threads of like size, as many for each of them."""
        if self.workers is None:
            return _runs(jobs, self.chunk)
        threads = self.workers.threads
        rounds = -(-len(jobs) // (self.chunk * threads))
        return [part for part in np.array_split(jobs, rounds * threads) if len(part)]

    def stack(self, cohort: Cohort, jobs: Jobs, out: torch.Tensor, whole: int) -> torch.Tensor:
        stepper, device = self.stepper(cohort), self.setup.device
        together = out.device.type == device.type and _follow_each_other(jobs)
        size = (len(jobs), out.shape[1])
        models = out[jobs[0] : jobs[-1] + 1] if together else torch.empty(size, dtype=out.dtype, device=device)
        plan = schedule(cohort, self.setup.training, joined=self.setup.batch_norm)
        common = cohort.starts[cohort.origin[0]].to(device) if len(np.unique(cohort.origin)) == 1 else None
        written = cohort.descent.plain and stepper.first_is_shared and plan.steps > 0 and plan.active[0] == len(jobs)
        if common is None:
            models.copy_(cohort.start(device))
        elif not written:  # else the first step writes every number of every model
            models.copy_(common.expand_as(models))
        native = stepper.native(models)
        losses = self._steps(stepper, cohort, plan, native, None if common is None else stepper.native(common[None])[0])
        if native is not models:
            models.copy_(stepper.restore(native))
        if not together:
            _put(models, jobs, out)
        return losses

    def _steps(
        self, stepper: StackStep, cohort: Cohort, plan: Schedule, native: torch.Tensor, common: torch.Tensor | None
    ) -> torch.Tensor:
        descent, models = cohort.descent, native[:, : stepper.trained]
        losses = torch.zeros(len(native), dtype=torch.float64, device=native.device)
        gradients = None if descent.plain else torch.zeros_like(models)
        draws = stepper.draws or cohort.dataset.augment is not None
        keys = cohort.keys(native.device) if draws else None
        optimiser = StackDescent(descent, models)
        corrections = None if cohort.corrections is None else stepper.native(cohort.corrections.to(native.device))
        optimiser.begin(models, None if corrections is None else corrections[:, : stepper.trained])
        for number in range(plan.steps):
            busy = int(plan.active[number])
            current = CurrentStep(cohort.dataset, plan, number, losses, busy, keys, None if number else common)
            into = None if gradients is None else gradients[:busy]
            stepper.gradients(native[:busy], into, current, cohort.loss)
            if into is not None:
                optimiser.apply(models[:busy], into, number)
        return losses


# Captured: the buffers of a stack and the graphs over them.


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

    stepper: StackStep
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
        stepper: StackStep,
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


class _Kind(NamedTuple):
    """What buffers and their graphs serve."""

    dataset: int
    form: Descent
    chunk: int
    loss: LossState


def even(count: int, most: int) -> int:
    """Return the size of stacks that hold so many jobs: all of like size, so that one set of graphs serves all."""
    return ceil(count / ceil(count / most))


class GraphEngine(StackedEngine):
    """Captures the steps of a stack in graphs; use it on a GPU."""

    def __init__(self, setup: TrainingSetup, make_step: MakeStep, name: str, chunk: int | None = None) -> None:
        super().__init__(setup, make_step, name, chunk)
        self._buffers: dict[_Kind, tuple[StackBuffers, int]] = {}
        """By what they serve, with their bytes; the latest last."""

    def cut(self, jobs: Jobs, cohort: Cohort) -> list[Jobs]:
        """Cut jobs into stacks that are all of like size."""
        return _runs(jobs, even(len(jobs), self.chunk or self.fitting(cohort)))

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

    def stack(self, cohort: Cohort, jobs: Jobs, out: torch.Tensor, whole: int) -> torch.Tensor:
        plan = schedule(cohort, self.setup.training, joined=self.setup.batch_norm)
        buffers = self._buffers_for(cohort, plan, whole)
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
        _put(stepper.restore(buffers.models[: len(jobs)]), jobs, out)
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
