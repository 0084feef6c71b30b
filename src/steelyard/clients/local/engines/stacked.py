"""Stacks of clients, by any kind of step: the steps taken one by one, or captured in graphs on a GPU.

What is captured is one launch: it reads its samples through a counter on the device, so the same graph serves every
step of every round. Clients that have fewer steps than others drop out from the back of the stack; graphs of a few
sizes are kept for that.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.local.cohort import Cohort, CurrentStep, Schedule, longest_first, schedule, sent
from steelyard.clients.local.engines.engine import Engine, Jobs, Slopes, TrainingSetup, follow_each_other, put
from steelyard.clients.local.engines.steps import StackStep
from steelyard.clients.local.hardware import WorkerThreads
from steelyard.clients.local.population import DeviceDataset
from steelyard.learning.descent import Descent, StackDescent
from steelyard.learning.training import batch_limit
from steelyard.messages.algorithm import Part
from steelyard.messages.updates import Floats, LossState

MakeStep = Callable[[Descent, Part], StackStep]
STACK_BYTES = 24 << 20
"""Models of one stack on the CPU: large enough to hide the cost of calls, small enough to stay near the core."""


def near_the_core(setup: TrainingSetup) -> int:
    """Return how many clients of a built-in network a thread takes at a time on the CPU."""
    return max(1, STACK_BYTES // (4 * setup.layout.size))


def in_half_the_memory(setup: TrainingSetup) -> int:
    """Return how many clients half the memory holds: models, gradients, and activations guessed from the model."""
    return max(1, min(1000, setup.memory // 2 // max(4 * 8 * setup.layout.size, 1)))


class StackedEngine(Engine):
    """Trains stacks of clients by steps of the kind that `make_step` makes; use it where clients are small and many."""

    def __init__(self, setup: TrainingSetup, make_step: MakeStep, name: str, chunk: int | None = None) -> None:
        super().__init__(setup)
        self.make_step, self.name = make_step, name
        self.chunk = chunk or setup.chunk
        self._steppers: dict[tuple[Descent, Part], StackStep] = {}

    def stepper(self, cohort: Cohort) -> StackStep:
        """Return the step of a cohort's descent and part; made once for each form of them."""
        form = cohort.descent.form, cohort.part
        if form not in self._steppers:
            self._steppers[form] = self.make_step(*form)
        return self._steppers[form]

    def slopes_by(self, cohort: Cohort) -> StackStep:
        """Return the step that takes gradients: of the cohort's part where it keeps the order of the whole model."""
        part, whole = self.stepper(cohort), self.stepper(replace(cohort, part="everything"))
        return part if part.order == whole.order else whole

    def native(self, cohort: Cohort, flat: torch.Tensor) -> torch.Tensor:
        return self.stepper(cohort).native(flat)

    def restore(self, cohort: Cohort, native: torch.Tensor) -> torch.Tensor:
        return self.stepper(cohort).restore(native)

    def train(self, cohort: Cohort, out: torch.Tensor) -> Floats:
        self.stepper(cohort)  # Made here: stacks may be on several threads.
        return super().train(cohort, out)


def _runs(jobs: Jobs, most: int) -> list[Jobs]:
    return [jobs[begin : begin + most] for begin in range(0, len(jobs), most)]


class SteppedEngine(StackedEngine):
    """Takes the steps of a stack one by one."""

    chunk: int

    def __init__(
        self, setup: TrainingSetup, make_step: MakeStep, name: str, chunk: int, threads: int | None = None
    ) -> None:
        super().__init__(setup, make_step, name, chunk)
        self.workers = None if threads is None else WorkerThreads(threads)

    def cut(self, cohort: Cohort) -> list[Jobs]:
        """Cut jobs into stacks of the size asked for; for threads of like size, as many for each of them."""
        jobs = longest_first(cohort)
        if self.workers is None:
            return _runs(jobs, self.chunk)
        threads = self.workers.threads
        rounds = -(-len(jobs) // (self.chunk * threads))
        return [part for part in np.array_split(jobs, rounds * threads) if len(part)]

    def stack(self, cohort: Cohort, jobs: Jobs, out: torch.Tensor, whole: int) -> torch.Tensor:
        stepper, device, descent = self.stepper(cohort), self.setup.device, cohort.descent
        together = out.device.type == device.type and follow_each_other(jobs)
        size = (len(jobs), out.shape[1])
        models = out[jobs[0] : jobs[-1] + 1] if together else torch.empty(size, dtype=out.dtype, device=device)
        plan = schedule(cohort)
        common = cohort.starts[cohort.origin[0]].to(device) if len(np.unique(cohort.origin)) == 1 else None
        written = descent.plain and stepper.first_is_shared and plan.steps > 0 and plan.active[0] == len(jobs)
        if common is None:
            models.copy_(cohort.start(device))
        elif not written:  # else the first step writes every number of every model
            models.copy_(common.expand_as(models))
        native = stepper.native(models)
        shared = None if common is None else stepper.native(common[None])[0]
        losses = torch.zeros(len(native), dtype=torch.float64, device=device)
        gradients = None if descent.plain else torch.zeros_like(native)
        keys = self._keys(cohort, stepper)
        optimiser = StackDescent(descent, native, stepper.moved)
        optimiser.begin(native, None if cohort.corrections is None else stepper.native(cohort.corrections.to(device)))
        for number, busy in enumerate(plan.active.tolist()):
            current = CurrentStep(cohort.dataset, plan, number, losses, busy, keys, None if number else shared)
            into = None if gradients is None else gradients[:busy]
            stepper.gradients(native[:busy], into, current, cohort.loss)
            if into is not None:
                optimiser.apply(native[:busy], into, number)
        if native is not models:
            models.copy_(stepper.restore(native))
        if not together:
            put(models, jobs, out)
        return losses

    def _keys(self, cohort: Cohort, stepper: StackStep) -> torch.Tensor | None:
        draws = stepper.draws or cohort.dataset.augment is not None
        return cohort.keys(self.setup.device) if draws else None

    def slopes(self, cohort: Cohort, plan: Schedule, whole: int) -> Slopes:
        stepper, tables = self.slopes_by(cohort), replace(plan, report=plan.weights)
        keys = self._keys(cohort, stepper)

        def slopes(number: int, models: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            busy, found = int(plan.active[number]), torch.zeros_like(models)
            losses = torch.zeros(len(models), dtype=torch.float64, device=models.device)
            current = CurrentStep(cohort.dataset, tables, number, losses, busy, keys)
            held = models.clone() if stepper.trained < stepper.size else models
            stepper.gradients(held[:busy], found[:busy], current, cohort.loss)
            return found if held is models else found.add_(models - held), losses

        return slopes


# Captured: the buffers of a stack and the graphs over them.


Launch = Callable[[], None]
TOGETHER = 8
"""Steps in one graph where so many follow each other: a device waits between graphs for some thousandths of a ms."""
OF_ALGORITHMS = 12
"""Models of each client that an algorithm may hold beside those of the engine while it takes the steps itself."""


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


class StackBuffers:
    """The buffers of a stack and the graphs captured over them.

    `shape` is [steps, clients, batch], `labels` are like those to come. With `slopes` a step leaves its gradients and
    moves nothing.
    """

    def __init__(
        self,
        stepper: StackStep,
        dataset: DeviceDataset,
        loss: LossState,
        shape: tuple[int, int, int],
        labels: torch.Tensor,
        *,
        slopes: bool,
    ) -> None:
        steps, clients, _ = shape

        def zeros(*lengths: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(lengths, dtype=dtype, device=dataset.device)

        self.stepper, self.dataset, self.loss = stepper, dataset, loss
        self.models = zeros(clients, stepper.size)
        self.tables = Schedule(
            zeros(*shape, dtype=torch.int64),
            zeros(*shape, *labels.shape[3:], dtype=labels.dtype),
            zeros(*shape),
            zeros(*shape),
            zeros(*shape, dtype=torch.bool),
            np.zeros(0, dtype=np.int64),
        )
        self.rates = zeros(steps, clients)
        """[steps, clients]: the step size, 0 once a client is done; used where a step is not plain."""
        self.counter = zeros(1, dtype=torch.int64)
        self.losses = zeros(clients, dtype=torch.float64)
        self.keys = zeros(clients, dtype=torch.int64)
        """[clients]: the streams from which dropout by name draws."""
        self.gradients = torch.zeros_like(self.models) if slopes or not stepper.descent.plain else None
        """None where a step is plain, so that gradients go straight into the models."""
        self.optimiser = None if slopes else StackDescent(stepper.descent, self.models, stepper.moved)
        self._graphs: dict[tuple[int, int], Launch] = {}
        """What takes steps, by the number of clients and of steps."""
        self._pool: Any = None

    def fits(self, steps: int, clients: int, batch: int) -> bool:
        have = self.tables.rows.shape
        return steps <= have[0] and clients <= have[1] and batch <= have[2]

    def fill(self, cohort: Cohort, plan: Schedule) -> None:
        """Put a round's samples and streams into the buffers."""
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
            working = cohort.counts[None, :] > np.arange(steps)[:, None]
            self.rates[:steps, clients:].zero_()
            self.rates[:steps, :clients] = sent((working * cohort.descent.rate).astype(np.float32), self.rates.device)
        self.keys[:clients] = cohort.keys(self.keys.device)
        self.counter.zero_()
        self.losses.zero_()

    def step(self, busy: int) -> None:
        """Do one step of the first `busy` clients; this is what a graph captures."""
        current = CurrentStep(self.dataset, self.tables, self.counter, self.losses, busy, self.keys)
        models = self.models[:busy]
        into = None if self.gradients is None else self.gradients[:busy]
        self.stepper.gradients(models, into, current, self.loss)
        if into is not None and self.optimiser is not None:
            self.optimiser.apply(models, into, self.counter, current.now(self.rates))
        self.counter += 1

    def steps(self, busy: int, count: int) -> None:
        """Do some steps of the first `busy` clients, one after another."""
        for _ in range(count):
            self.step(busy)

    def _capture(self, busy: int, count: int) -> Launch:
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
        with _without_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self.steps(busy, count)
        self._pool = self._pool or graph.pool()
        return graph.replay

    def ready(self, active: NDArray[np.int64], together: int) -> list[Launch]:
        """Return what takes all steps, in turn, where so many clients are at work in each.

        A graph serves the smallest captured size that holds them; steps of the same size are launched several at once.
        Capturing overwrites the buffers: it comes before `fill`.
        """
        whole = len(self.models)
        sizes = sorted(ceil(share * whole) for share in self.stepper.shares)
        found: list[Launch] = []
        for size, alike in groupby(sizes[bisect_left(sizes, busy)] for busy in active.tolist()):
            many, single = divmod(len(list(alike)), together)
            found += [self._graph(size, together)] * many if many else []
            found += [self._graph(size, 1)] * single if single else []
        return found

    def _graph(self, size: int, count: int) -> Launch:
        if (size, count) not in self._graphs:
            self._graphs[size, count] = self._capture(size, count)
        return self._graphs[size, count]


class _Kind(NamedTuple):
    """What buffers and their graphs serve."""

    dataset: int
    form: Descent
    part: Part
    slopes: bool
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

    def cut(self, cohort: Cohort) -> list[Jobs]:
        """Cut jobs into stacks that are all of like size."""
        return _runs(longest_first(cohort), even(len(cohort), self.chunk or self.fitting(cohort)))

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
        batch = batch_limit(cohort.training, int(cohort.sizes.max()))
        half = 2 if self.setup.precision == "bfloat16" else 1
        descent, stepper = cohort.descent, self.stepper(cohort)
        copies = 2 + (not descent.plain) + 2 * descent.memories + bool(descent.pull) + descent.corrected
        copies += OF_ALGORITHMS * cohort.algorithm.by_hand
        return 4 * (copies * self.setup.layout.size + batch * stepper.sample_floats(batch) // half)

    def stack(self, cohort: Cohort, jobs: Jobs, out: torch.Tensor, whole: int) -> torch.Tensor:
        plan = schedule(cohort)
        buffers = self._buffers_for(cohort, plan, whole)
        optimiser, stepper = buffers.optimiser, buffers.stepper
        assert optimiser is not None
        # What clients have in common is laid out once and then copied, not the other way round.
        models = cohort.spread(stepper.native(cohort.distinct(self.setup.device)))
        corrections = None if cohort.corrections is None else stepper.native(cohort.corrections.to(models.device))
        steps = buffers.ready(plan.active, TOGETHER)
        buffers.fill(cohort, plan)
        buffers.models[: len(models)] = models
        optimiser.begin(models, corrections)
        del models, corrections  # the buffers hold them now; of large networks a second copy is gigabytes
        for step in steps:
            step()
        put(stepper.restore(buffers.models[: len(jobs)]), jobs, out)
        return buffers.losses[: len(jobs)].clone()  # the next stack has the same buffers

    def slopes(self, cohort: Cohort, plan: Schedule, whole: int) -> Slopes:
        buffers = self._buffers_for(cohort, plan, whole, slopes=True)
        launches, gradients = buffers.ready(plan.active, 1), buffers.gradients
        assert gradients is not None
        buffers.fill(cohort, replace(plan, report=plan.weights))
        count, trained = len(cohort), buffers.stepper.trained

        def slopes(number: int, models: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            buffers.models[:count] = models
            buffers.counter.fill_(number)
            buffers.losses.zero_()
            launches[number]()
            found = gradients[:count].clone()
            found[:, trained:] = models[:, trained:] - buffers.models[:count, trained:]
            found[plan.active[number] :] = 0
            return found, buffers.losses[:count].clone()

        return slopes

    def _buffers_for(self, cohort: Cohort, plan: Schedule, chunk: int, *, slopes: bool = False) -> StackBuffers:
        steps, _, batch = plan.rows.shape
        stepper = self.slopes_by(cohort) if slopes else self.stepper(cohort)
        key = _Kind(id(cohort.dataset), cohort.descent.form, cohort.part, slopes, chunk, cohort.loss)
        buffers, room = self._buffers.get(key, (None, chunk * self._client_bytes(cohort)))
        if buffers is None or not buffers.fits(steps, chunk, batch):
            self._make_room(key, room)
            buffers = None  # what does not fit is let go of before there is more
            # Larger than needed: clients of another round may be a little larger.
            whole = cohort.training.batch_size
            wide = batch if batch == whole else batch + (batch // 8 if len(np.unique(cohort.sizes)) > 1 else 0)
            shape = (steps + steps // 4, chunk, wide)
            buffers = StackBuffers(stepper, cohort.dataset, cohort.loss, shape, plan.labels, slopes=slopes)
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
