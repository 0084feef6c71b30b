"""One training step of a stack in the form that a graph captures: derived by hand, or through vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from steelyard.clients.local.convolution.order import channels_moved
from steelyard.clients.local.device_data.dataset import as_numbers
from steelyard.clients.local.device_data.schedule import CurrentStep
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.execution import shortened
from steelyard.clients.local.engines.vmap import MappedGradient
from steelyard.clients.local.layers.replacing import stackable, stacked_layout
from steelyard.clients.local.steps.gradients import output_gradient
from steelyard.clients.local.steps.stacked_steps import SHARES, StackedSteps
from steelyard.clients.local.steps.writers import writer
from steelyard.learning.augmentation import Augmentation
from steelyard.learning.descent import Descent
from steelyard.messages.updates import LossState

Tensors = Sequence[torch.Tensor]
Program = Callable[[Tensors, Tensors, Tensors], torch.Tensor]


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
        self.layout, self._turned = stacked_layout(setup.layout, self.module)

    def native(self, flat: torch.Tensor) -> torch.Tensor:
        return channels_moved(flat, self.layout, self._turned, last=True)

    def restore(self, native: torch.Tensor) -> torch.Tensor:
        return channels_moved(native, self.layout, self._turned, last=False)

    def sample_floats(self, samples: int) -> int:
        # Unknown network: as much as the built-in convolutional one needs per parameter of a small model.
        return max(100_000, self.layout.size // 4)

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, current: CurrentStep, loss: LossState) -> None:
        # Each tensor of the model as columns of the stack: a compiler sees that they do not overlap.
        cuts = [models[:, slot.offset : slot.offset + slot.size] for slot in self.layout.slots]
        targets = [] if into is None else [into[:, s.offset : s.offset + s.size] for s in self.layout.trained_slots]
        # They become numbers and are changed at random inside, where a compiler makes one pass of it.
        samples = (current.taken, current.labels, current.weights, current.valid, current.chance)
        program = self.program(loss, current.dataset.augment, cuts, targets, samples)
        current.add(program(cuts, targets, samples))

    def program(
        self, loss: LossState, augment: Augmentation | None, cuts: Tensors, targets: Tensors, samples: Tensors
    ) -> Program:
        """Return what takes one step of tensors like these: the models' own, the gradients' where a step is not plain.

        `samples` are those taken from the data set, labels, weights, which are no padding, and streams of chance. It
        returns each sample's loss.
        """
        gradient = MappedGradient(self.module, self.layout.trained_names, loss)
        trained = len(self.layout.trained_slots)

        def step(cuts: Tensors, targets: Tensors, samples: Tensors) -> torch.Tensor:
            views = {s.name: cut.view(-1, *s.shape) for s, cut in zip(self.layout.slots, cuts, strict=True)}
            taken, labels, weights, valid, chance = samples
            features = as_numbers(taken) if augment is None else augment(as_numbers(taken), chance)
            with shortened(self.setup.precision, cuts[0].device):
                found, each = gradient.of(views, features, labels, weights, valid, chance)
            fresh = [found[s.name].reshape(cut.shape) for s, cut in zip(self.layout.slots, cuts, strict=True)]
            for cut, value in zip([*targets, *cuts[trained:]], [*fresh[: len(targets)], *fresh[trained:]], strict=True):
                cut.copy_(value)
            if not targets:
                # One call for all tensors: a compiler makes few kernels of it, not one for each.
                add: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
                add(cuts[:trained], fresh[:trained], alpha=-self.descent.rate)
            return each

        return step
