"""Stacks of clients of any module that `torch.func` can map: one gradient of all clients at once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.func import functional_call, grad_and_value, vmap

from steelyard.clients.local.device_data.cohort import Cohort
from steelyard.clients.local.device_data.schedule import CurrentStep, longest_first, schedule
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.execution import arithmetic
from steelyard.learning import losses
from steelyard.learning.descent import StackDescent
from steelyard.learning.dropout import NamedDropout
from steelyard.messages import LossState

Gradient = Callable[[dict[str, torch.Tensor], CurrentStep], tuple[dict[str, torch.Tensor], torch.Tensor]]


class VmapEngine:
    """Trains stacks of clients through vmap and grad; use it for a module of your own."""

    name = "vmap"

    def __init__(self, setup: TrainingSetup, chunk: int | None = None) -> None:
        self.setup = setup
        self.module = copy.deepcopy(setup.module).to(setup.device).train()
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
        ordered = longest_first(cohort, self.setup.training)
        with arithmetic(self.setup.precision, self.setup.device, autocast=True):
            for begin in range(0, len(ordered), self.chunk):
                jobs = ordered[begin : begin + self.chunk]
                mean_losses[jobs] = self._stack(cohort.take(jobs), jobs, out)
        return mean_losses

    def _stack(self, cohort: Cohort, jobs: NDArray[np.int64], out: torch.Tensor) -> NDArray[np.float64]:
        device, layout = self.setup.device, self.setup.layout
        plan = schedule(cohort, self.setup.training)
        models = cohort.start(device)
        trained = models[:, : layout.trained]
        optimiser = StackDescent(cohort.descent, trained)
        optimiser.begin(trained, None if cohort.corrections is None else cohort.corrections[:, : layout.trained])
        keys = cohort.keys(device)
        # Weight decay would move what is frozen: it is put back after every step.
        kept = [models[:, begin:end].clone() for begin, end in layout.frozen]
        mean_losses = torch.zeros(len(jobs), dtype=torch.float64, device=device)
        gradient = mapped_gradient(self.module, cohort.loss)
        for number in range(plan.steps):
            busy = int(plan.active[number])
            current = CurrentStep(cohort.dataset, plan, number, mean_losses, busy, keys)
            slopes, each = gradient(layout.views(models[:busy]), current)
            flat = torch.cat([slopes[slot.name].reshape(busy, -1) for slot in layout.trained_slots], dim=1)
            optimiser.apply(trained[:busy], flat, number)
            for (begin, end), held in zip(layout.frozen, kept, strict=True):
                models[:busy, begin:end] = held[:busy]
            current.add(each)
        out[torch.from_numpy(jobs).to(out.device)] = models.to(out.device)
        return mean_losses.cpu().numpy()


def mapped_gradient(module: torch.nn.Module, loss: LossState) -> Gradient:
    """Return (stacked parameters by name, step) → (gradients by name, each sample's loss)."""
    each_of = losses.per_sample(loss)
    draws = isinstance(module, NamedDropout)

    def total(
        named: dict[str, torch.Tensor],
        features: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        chance: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held = {**named, "chance": chance} if draws else named
        each = each_of(functional_call(module, held, (features,)).float(), labels)
        return torch.where(weights > 0, each * weights, torch.zeros_like(each)).sum(), each

    with_value = vmap(grad_and_value(total, has_aux=True))

    def gradient(named: dict[str, torch.Tensor], current: CurrentStep) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        slopes, (_, each) = with_value(named, current.features, current.labels, current.weights, current.chance)
        return slopes, each

    return gradient
