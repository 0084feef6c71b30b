"""A whole training step of a stack as one program that torch's compiler made: any network that can be mapped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from steelyard.clients.local.device_data.schedule import CurrentStep
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.engines.graph_steps import MappedStep
from steelyard.clients.local.engines.vmap import MappedGradient
from steelyard.learning.descent import Descent
from steelyard.messages import LossState

Tensors = Sequence[torch.Tensor]
Program = Callable[[Tensors, Tensors, Tensors], torch.Tensor]


class CompiledStep(MappedStep):
    """Steps of any module: mapped over the clients, traced down to torch's operators, fused by inductor.

    A program belongs to one number of clients and one size of batches; inductor keeps what it made on the disk.
    """

    shares = (1.0, 0.5, 0.25)
    """Each size of the stack is compiled anew."""
    backend = "inductor"
    """What makes a program of the traced operators; tests use one that needs no compiler."""

    def __init__(self, setup: TrainingSetup, descent: Descent) -> None:
        super().__init__(setup, descent)
        self._programs: dict[object, Program] = {}

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, current: CurrentStep, loss: LossState) -> None:
        # Each tensor of the model as columns of the stack: the compiler sees that they do not overlap.
        cuts = [models[:, slot.offset : slot.offset + slot.size] for slot in self.layout.slots]
        targets = [] if into is None else [into[:, s.offset : s.offset + s.size] for s in self.layout.trained_slots]
        samples = (current.features, current.labels, current.weights, current.valid, current.chance)
        key = (loss, into is None, *((tuple(tensor.shape), tensor.dtype) for tensor in (models, *samples)))
        with _deterministic():
            if key not in self._programs:
                self._programs[key] = self._program(loss, cuts, targets, samples)
            current.add(self._programs[key](cuts, targets, samples))

    def _program(self, loss: LossState, cuts: Tensors, targets: Tensors, samples: Tensors) -> Program:
        gradient = MappedGradient(self.module, self.layout.trained_names, loss)
        trained = len(self.layout.trained_slots)

        def step(cuts: Tensors, targets: Tensors, samples: Tensors) -> torch.Tensor:
            views = {s.name: cut.view(-1, *s.shape) for s, cut in zip(self.layout.slots, cuts, strict=True)}
            with self.autocast(cuts[0].device):
                found, each = gradient.of(views, *samples)
            new = [found[slot.name].reshape(cut.shape) for slot, cut in zip(self.layout.slots, cuts, strict=True)]
            for number, cut in enumerate(cuts):
                if number >= trained:
                    cut.copy_(new[number])
                elif targets:
                    targets[number].copy_(new[number])
                else:
                    cut.sub_(new[number], alpha=self.descent.rate)
            return each

        # What is frozen belongs to the module and is no input.
        traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(cuts, targets, samples)
        return torch.compile(traced, backend=self.backend, dynamic=False)


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
