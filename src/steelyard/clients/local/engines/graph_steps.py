"""One training step of a stack in the form that a graph captures: derived by hand, or through vmap."""

from __future__ import annotations

from typing import Protocol

import torch

from steelyard.clients.local.device_data.schedule import CurrentStep
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.vmap import MappedGradient
from steelyard.clients.local.layers.replacing import stackable, stacked_layout
from steelyard.clients.local.steps.gradients import output_gradient
from steelyard.clients.local.steps.stacked_steps import SHARES, StackedSteps
from steelyard.clients.local.steps.writers import writer
from steelyard.learning.descent import Descent
from steelyard.messages import LossState


class GraphStep(Protocol):
    """One training step of a stack, in whatever way, on buffers that stay where they are."""

    shares: tuple[float, ...]
    descent: Descent
    size: int
    trained: int
    """How many numbers at the front are parameters; the rest are buffers, which no descent moves."""

    def native(self, flat: torch.Tensor) -> torch.Tensor: ...

    def restore(self, native: torch.Tensor) -> torch.Tensor: ...

    def sample_floats(self, samples: int) -> int: ...

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, current: CurrentStep, loss: LossState) -> None:
        """Do the step in place (`into` is None) or write the gradients; add the samples' losses up in `current`."""
        ...


class HandDerivedStep:
    """Steps of a built-in network."""

    shares = SHARES

    def __init__(self, steps: StackedSteps, descent: Descent) -> None:
        self.steps, self.descent, self.size, self.trained = steps, descent, steps.size, steps.size
        self.native, self.restore, self.sample_floats = steps.native, steps.restore, steps.sample_floats

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, current: CurrentStep, loss: LossState) -> None:
        views = self.steps.views(models)
        write = writer(views, None if into is None else self.steps.views(into), self.descent.rate)
        current.add(self.steps.step(views, current, output_gradient(loss), write, None))


class MappedStep:
    """Steps of any module through vmap."""

    shares = SHARES

    def __init__(self, setup: TrainingSetup, descent: Descent) -> None:
        self.setup, self.descent = setup, descent
        self.size, self.trained = setup.layout.size, setup.layout.trained
        self.module = stackable(setup.module, products=True).to(setup.device)
        self.layout, self._order = stacked_layout(setup.layout, self.module)
        self._back = self._order.argsort()

    def native(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[:, self._order.to(flat.device)]

    def restore(self, native: torch.Tensor) -> torch.Tensor:
        return native[:, self._back.to(native.device)]

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the block in which a module computes in the precision that was asked for."""
        return torch.autocast(device.type, torch.bfloat16, self.setup.precision == "bfloat16", cache_enabled=False)

    def sample_floats(self, samples: int) -> int:
        # Unknown network: as much as the built-in convolutional one needs per parameter of a small model.
        return max(100_000, self.layout.size // 4)

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, current: CurrentStep, loss: LossState) -> None:
        views = self.layout.views(models)
        with self.autocast(models.device):
            found, each = MappedGradient(self.module, self.layout.trained_names, loss)(views, current)
        for slot in self.layout.trained_slots:
            if into is None:
                views[slot.name].sub_(found[slot.name], alpha=self.descent.rate)
            else:
                into[:, slot.offset : slot.offset + slot.size] = found[slot.name].flatten(1)
        for slot in self.layout.buffer_slots:
            views[slot.name].copy_(found[slot.name])
        current.add(each)
