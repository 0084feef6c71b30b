"""Stacks of clients: of a built-in network with steps derived by hand, of any module that `torch.func` can map."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from steelyard.clients.local.cohort import Cohort, CurrentStep, Schedule, longest_first, schedule
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.hardware import WorkerThreads, arithmetic
from steelyard.clients.local.layers import MaskedBatchNorm, stackable
from steelyard.clients.local.steps import Fresh, StackedSteps, output_gradient, writer
from steelyard.learning import losses
from steelyard.learning.descent import StackDescent
from steelyard.learning.dropout import NamedDropout
from steelyard.messages.updates import LossState

STACK_BYTES = 24 << 20
"""Models of one stack on the CPU: large enough to hide the cost of calls, small enough to stay near the core."""


def shares(jobs: NDArray[np.int64], most: int, threads: int) -> list[NDArray[np.int64]]:
    """Cut jobs into stacks of like size, none larger than `most`, as many for each thread."""
    rounds = -(-len(jobs) // (most * threads))
    return [part for part in np.array_split(jobs, rounds * threads) if len(part)]


class StackedEngine:
    """Trains stacks of clients on the CPU, each stack on one thread; use it for many small clients."""

    name = "stacked"

    def __init__(self, setup: TrainingSetup, steps: StackedSteps, chunk: int | None = None) -> None:
        self.setup = setup
        self.steps = steps
        self.chunk = chunk or setup.chunk or max(1, STACK_BYTES // (4 * setup.layout.size))
        self.workers = WorkerThreads(setup.threads)

    def stack_size(self, cohort: Cohort) -> int | None:
        """Return how many clients stand in one stack at most."""
        return self.chunk

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        losses = np.zeros(len(cohort))
        ordered = longest_first(cohort, self.setup.training)
        parts = shares(ordered, self.chunk, self.setup.threads)

        def work(jobs: NDArray[np.int64]) -> None:
            losses[jobs] = self._stack(cohort.take(jobs), jobs, out)

        with arithmetic(self.setup.precision, self.setup.device), torch.no_grad():
            self.workers.run(work, parts)
        return losses

    def _stack(self, cohort: Cohort, jobs: NDArray[np.int64], out: torch.Tensor) -> NDArray[np.float64]:
        together = bool(np.all(np.diff(jobs) == 1))
        models = out[jobs[0] : jobs[-1] + 1] if together else out.new_empty((len(jobs), out.shape[1]))
        common = cohort.starts[cohort.origin[0]] if len(np.unique(cohort.origin)) == 1 else None
        plan = schedule(cohort, self.setup.training)
        if common is None:
            models.copy_(cohort.start(self.setup.device))
        elif not self._fresh(plan, cohort):
            models.copy_(common.expand_as(models))
        native = self.steps.native(models)
        losses = self._steps(cohort, plan, native, None if common is None else self.steps.native(common[None])[0])
        if native is not models:
            models.copy_(self.steps.restore(native))
        if not together:
            out[torch.from_numpy(jobs)] = models
        return losses.numpy()

    def _fresh(self, plan: Schedule, cohort: Cohort) -> bool:
        """Whether the first step writes every number of every model, so that there is nothing to copy before it."""
        shared = cohort.descent.plain and self.steps.first_is_shared
        return shared and plan.steps > 0 and plan.active[0] == plan.rows.shape[1]

    def _steps(self, cohort: Cohort, plan: Schedule, native: torch.Tensor, common: torch.Tensor | None) -> torch.Tensor:
        gradient, descent, steps = output_gradient(cohort.loss), cohort.descent, self.steps
        losses = torch.zeros(len(native), dtype=torch.float64)
        gradients = None if descent.plain else torch.zeros_like(native)
        keys = None if cohort.dataset.augment is None else cohort.keys(native.device)
        optimiser = StackDescent(descent, native)
        optimiser.begin(native, None if cohort.corrections is None else steps.native(cohort.corrections))
        for number in range(plan.steps):
            busy = int(plan.active[number])
            current = CurrentStep(cohort.dataset, plan, number, losses, busy, keys)
            views = steps.views(native[:busy])
            shared = steps.views(common) if number == 0 and common is not None else None
            write = writer(views, None if gradients is None else steps.views(gradients[:busy]), descent.rate)
            if shared is not None and self._fresh(plan, cohort):
                write = Fresh(views, shared, descent.rate)
            current.add(steps.step(views, current, gradient, write, shared))
            if gradients is not None:
                optimiser.apply(native[:busy], gradients[:busy], number)
        return losses


Named = dict[str, torch.Tensor]


class MappedGradient:
    """The gradient of a stack of clients, by name, for a module whose layers are `stackable`."""

    def __init__(self, module: nn.Module, trained: frozenset[str], loss: LossState) -> None:
        self.module, self.trained, self.each = module, trained, losses.per_sample(loss)
        layers = list(module.named_modules())
        self.norms = [(_inside(name), layer) for name, layer in layers if isinstance(layer, MaskedBatchNorm)]
        self.dropouts = [(_inside(name) + "chance", layer) for name, layer in layers if isinstance(layer, NamedDropout)]
        self._mapped = vmap(grad_and_value(self._total, has_aux=True))

    def __call__(self, named: Named, current: CurrentStep) -> tuple[Named, torch.Tensor]:
        """Return what the step makes of (stacked) parameters and buffers, and each sample's loss.

        Parameters get their gradients, buffers their new values.
        """
        return self.of(named, current.features, current.labels, current.weights, current.valid, current.chance)

    def of(self, named: Named, *samples: torch.Tensor) -> tuple[Named, torch.Tensor]:
        """Return the same for features, labels, weights, which samples are no padding, and streams of chance."""
        free = {name: value for name, value in named.items() if name in self.trained}
        held = {name: value for name, value in named.items() if name not in self.trained}
        slopes, (_, (each, fresh)) = self._mapped(free, held, *samples)
        return {**held, **fresh, **slopes}, each

    def _total(
        self,
        free: Named,
        held: Named,
        features: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        valid: torch.Tensor,
        chance: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, Named]]:
        given = {**free, **held, **{name: chance for name, _ in self.dropouts}}
        given |= {f"{name}valid": valid for name, _ in self.norms}
        for _, layer in self.dropouts:
            layer.begin()
        # Fused attention takes the clients of a stack one by one.
        with sdpa_kernel(SDPBackend.MATH):
            outputs = functional_call(self.module, given, (features,))
        each = self.each(outputs.float(), labels)
        fresh: Named = {}
        for name, norm in self.norms:
            assert norm.fresh is not None  # set when it was called
            # A client that is done keeps what it has.
            for kind, value in zip(("running_mean", "running_var"), norm.fresh, strict=True):
                fresh[name + kind] = torch.where(valid.any(), value, held[name + kind])
            norm.fresh = None
        return torch.where(weights > 0, each * weights, torch.zeros_like(each)).sum(), (each, fresh)


def _inside(name: str) -> str:
    return f"{name}." if name else ""


class VmapEngine:
    """Trains stacks of clients through vmap and grad; use it for a module of your own."""

    name = "vmap"

    def __init__(self, setup: TrainingSetup, chunk: int | None = None) -> None:
        self.setup = setup
        self.module = stackable(setup.module, products=False).to(setup.device)
        self.chunk = chunk or setup.chunk or self._fitting()

    def stack_size(self, cohort: Cohort) -> int | None:
        """Return how many clients stand in one stack."""
        return self.chunk

    def _fitting(self) -> int:
        """As many clients as half the memory holds: models, gradients, and activations guessed from the model."""
        per_client = 4 * 8 * self.setup.layout.size
        return max(1, min(1000, self.setup.memory // 2 // max(per_client, 1)))

    def train(self, cohort: Cohort, out: torch.Tensor) -> NDArray[np.float64]:
        """Write each job's trained model into a row of `out`; return the mean losses of the last epoch."""
        mean_losses = np.zeros(len(cohort))
        ordered = longest_first(cohort, self.setup.training, joined=self.setup.batch_norm)
        with arithmetic(self.setup.precision, self.setup.device, autocast=True):
            for begin in range(0, len(ordered), self.chunk):
                jobs = ordered[begin : begin + self.chunk]
                mean_losses[jobs] = self._stack(cohort.take(jobs), jobs, out)
        return mean_losses

    def _stack(self, cohort: Cohort, jobs: NDArray[np.int64], out: torch.Tensor) -> NDArray[np.float64]:
        device, layout = self.setup.device, self.setup.layout
        plan = schedule(cohort, self.setup.training, joined=self.setup.batch_norm)
        models = cohort.start(device)
        trained = models[:, : layout.trained]
        optimiser = StackDescent(cohort.descent, trained)
        optimiser.begin(trained, None if cohort.corrections is None else cohort.corrections[:, : layout.trained])
        keys = cohort.keys(device)
        mean_losses = torch.zeros(len(jobs), dtype=torch.float64, device=device)
        gradient = MappedGradient(self.module, layout.trained_names, cohort.loss)
        for number in range(plan.steps):
            busy = int(plan.active[number])
            current = CurrentStep(cohort.dataset, plan, number, mean_losses, busy, keys)
            views = layout.views(models[:busy])
            found, each = gradient(views, current)
            flat = torch.cat([found[slot.name].reshape(busy, -1) for slot in layout.trained_slots], dim=1)
            optimiser.apply(trained[:busy], flat, number)
            for slot in layout.buffer_slots:
                views[slot.name].copy_(found[slot.name])
            current.add(each)
        out[torch.from_numpy(jobs).to(out.device)] = models.to(out.device)
        return mean_losses.cpu().numpy()
