"""One training step of a stack in the form that a graph captures: derived by hand, or through vmap."""

from __future__ import annotations

import copy
from typing import Protocol

import torch

from steelyard.clients.local.device_data.schedule import CurrentStep
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.vmap import mapped_gradient
from steelyard.clients.local.steps.gradients import output_gradient
from steelyard.clients.local.steps.stacked_steps import StackedSteps
from steelyard.clients.local.steps.writers import writer
from steelyard.learning.descent import Descent
from steelyard.messages import LossState


class GraphStep(Protocol):
    """One training step of a stack, in whatever way, on buffers that stay where they are."""

    descent: Descent
    size: int

    def native(self, flat: torch.Tensor) -> torch.Tensor: ...

    def restore(self, native: torch.Tensor) -> torch.Tensor: ...

    def sample_floats(self, samples: int) -> int: ...

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, current: CurrentStep, loss: LossState) -> None:
        """Do the step in place (`into` is None) or write the gradients; add the samples' losses up in `current`."""
        ...


class HandDerivedStep:
    """Steps of a built-in network."""

    def __init__(self, steps: StackedSteps, descent: Descent) -> None:
        self.steps, self.descent, self.size = steps, descent, steps.size
        self.native, self.restore, self.sample_floats = steps.native, steps.restore, steps.sample_floats

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, current: CurrentStep, loss: LossState) -> None:
        views = self.steps.views(models)
        write = writer(views, None if into is None else self.steps.views(into), self.descent.rate)
        current.add(self.steps.step(views, current, output_gradient(loss), write, None))


class MappedStep:
    """Steps of any module through vmap."""

    def __init__(self, setup: TrainingSetup, descent: Descent) -> None:
        self.layout, self.descent, self.size = setup.layout, descent, setup.layout.size
        self.module = copy.deepcopy(setup.module).to(setup.device).train()

    def native(self, flat: torch.Tensor) -> torch.Tensor:
        return flat

    def restore(self, native: torch.Tensor) -> torch.Tensor:
        return native

    def sample_floats(self, samples: int) -> int:
        # Unknown network: as much as the built-in convolutional one needs per parameter of a small model.
        return max(100_000, self.layout.size // 4)

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, current: CurrentStep, loss: LossState) -> None:
        slopes, each = mapped_gradient(self.module, loss)(self.layout.views(models), current)
        write = writer(self.layout.views(models), None if into is None else self.layout.views(into), self.descent.rate)
        for slot in self.layout.trained_slots:
            write.ready(slot.name, slopes[slot.name])
        current.add(each)
