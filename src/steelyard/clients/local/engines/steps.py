"""One training step of a stack in the form that a graph captures: derived by hand, through vmap, or compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from steelyard.clients.local.cnn.steps import channels_moved
from steelyard.clients.local.cohort import CurrentStep
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.stacked import MappedGradient
from steelyard.clients.local.hardware import shortened
from steelyard.clients.local.layers import stackable, stacked_layout
from steelyard.clients.local.population import as_numbers
from steelyard.clients.local.steps import SHARES, StackedSteps, output_gradient, writer
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


class CompiledStep(MappedStep):
    """Steps of any module: mapped over the clients, traced down to torch's operators, fused by inductor.

    A program belongs to one number of clients and one size of batches; inductor keeps what it made on the disk. Within
    a process all steps of a module share them, so that what a trial had made is not made again.
    """

    shares = (1.0, 0.5, 0.25)
    """Each size of the stack is compiled anew."""
    backend = "inductor"
    """What makes a program of the traced operators; tests use one that needs no compiler."""

    _programs: ClassVar[WeakKeyDictionary[nn.Module, dict[object, Program]]] = WeakKeyDictionary()
    """By the module of the setup; a program holds none of it but the numbers that are not trained."""

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, current: CurrentStep, loss: LossState) -> None:
        with _deterministic():
            super().gradients(models, into, current, loss)

    def program(
        self, loss: LossState, augment: Augmentation | None, cuts: Tensors, targets: Tensors, samples: Tensors
    ) -> Program:
        """Return the compiled step; made once for each loss and each shape of a stack."""
        programs = self._programs.setdefault(self.setup.module, {})
        # Gradients are the same whatever an optimiser makes of them: algorithms with their own share one program.
        rate = None if targets else self.descent.rate
        how = (self.backend, self.setup.precision, self.setup.device, rate, loss, augment)
        # What is frozen is written into the program: numbers that were changed since need another one.
        frozen = tuple(
            (id(value), value._version) for value in self.setup.module.parameters() if not value.requires_grad
        )
        key = (how, frozen, *((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in (cuts[0], *samples)))
        if key not in programs:
            step = super().program(loss, augment, cuts, targets, samples)
            # What is frozen belongs to the module and is no input.
            traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(cuts, targets, samples)
            # A number that a network writes into a tensor, as in x[:, -1] = 1, is traced as a constant on the CPU, from
            # where a recorded graph may copy nothing.
            programs[key] = torch.compile(traced.to(self.setup.device), backend=self.backend, dynamic=False)
        return programs[key]


@contextmanager
def _deterministic() -> Generator[None]:
    """Let the compiler add up in a fixed order: without this, rows of embeddings are added as they come."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            memory.fill_uninitialized_memory = filled
