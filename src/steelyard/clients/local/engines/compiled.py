"""A whole training step of a stack as one program that torch's compiler made: any network that can be mapped."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from steelyard.clients.local.device_data.schedule import CurrentStep
from steelyard.clients.local.engines.graph_steps import MappedStep, Program, Tensors
from steelyard.learning.augmentation import Augmentation
from steelyard.messages.updates import LossState


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
