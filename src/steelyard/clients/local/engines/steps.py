"""One training step of a stack: derived by hand, through vmap, or compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from steelyard.clients.local.cnn.steps import channels_moved
from steelyard.clients.local.cohort import CurrentStep
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.hardware import shortened
from steelyard.clients.local.layers import MaskedBatchNorm, stackable, stacked_layout
from steelyard.clients.local.population import as_numbers
from steelyard.clients.local.steps import SHARES, Fresh, OfPart, StackedSteps, output_gradient, writer
from steelyard.learning import losses
from steelyard.learning.augmentation import Augmentation
from steelyard.learning.descent import Descent
from steelyard.learning.dropout import NamedDropout
from steelyard.learning.parameters import names_of
from steelyard.messages.algorithm import Part
from steelyard.messages.updates import LossState

Tensors = Sequence[torch.Tensor]
Program = Callable[[Tensors, Tensors, Tensors], torch.Tensor]


class StackStep(Protocol):
    """One training step of a stack, in whatever way."""

    shares: tuple[float, ...]
    """Sizes of the stack for which graphs are captured, as shares of the whole."""
    descent: Descent
    size: int
    trained: int
    """How many numbers at the front are parameters; the rest are buffers, which no descent moves."""
    moved: Sequence[slice]
    """Where the parameters stand that a step moves."""
    order: object
    """What the order of numbers goes by: steps with the same one take each other's models."""
    draws: bool
    """Whether a step must be given the clients' streams of chance in any case."""
    first_is_shared: bool
    """Whether a step of plain SGD of clients with a common model leaves `models` unread."""

    def native(self, flat: torch.Tensor) -> torch.Tensor: ...

    def restore(self, native: torch.Tensor) -> torch.Tensor: ...

    def sample_floats(self, samples: int) -> int: ...

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, current: CurrentStep, loss: LossState) -> None:
        """Do the step in place (`into` is None) or write the gradients; add the samples' losses up in `current`."""
        ...


class HandDerivedStep:
    """Steps of a built-in network, or of the parameters of these names in it."""

    shares, draws = SHARES, False

    def __init__(self, steps: StackedSteps, descent: Descent, names: Collection[str] | None = None) -> None:
        self.steps, self.descent, self.size, self.trained = steps, descent, steps.size, steps.size
        self.native, self.restore, self.sample_floats = steps.native, steps.restore, steps.sample_floats
        self.first_is_shared = steps.first_is_shared and names is None
        self._names = names
        self.order: object = steps
        places = steps.views(torch.arange(steps.size))
        ends = [(int(each.min()), int(each.max()) + 1) for name, each in places.items() if names and name in names]
        self.moved: Sequence[slice] = [slice(None)] if names is None else [slice(*each) for each in ends]

    def gradients(self, models: torch.Tensor, into: torch.Tensor | None, current: CurrentStep, loss: LossState) -> None:
        views, rate = self.steps.views(models), self.descent.rate
        shared = None if current.common is None else self.steps.views(current.common)
        write = writer(views, None if into is None else self.steps.views(into), rate)
        if shared is not None and into is None and self.first_is_shared:
            write = Fresh(views, shared, rate)
        if self._names is not None:
            write = OfPart(write, self._names)
        current.add(self.steps.step(views, current, output_gradient(loss), write, shared))


Named = dict[str, torch.Tensor]


class MappedGradient:
    """The gradient of a stack of clients, by name, for a module whose layers are `stackable`.

    With `shared` all of them have one model, which is given once: so each sample's own gradient is taken.
    """

    def __init__(self, module: nn.Module, trained: Collection[str], loss: LossState, *, shared: bool = False) -> None:
        self.module, self.trained, self.each = module, trained, losses.per_sample(loss)
        layers = list(module.named_modules())
        self.norms = [(_inside(name), layer) for name, layer in layers if isinstance(layer, MaskedBatchNorm)]
        self.dropouts = [(_inside(name) + "chance", layer) for name, layer in layers if isinstance(layer, NamedDropout)]
        models, draws = (None, "different") if shared else (0, "error")
        gradient = grad_and_value(self._total, has_aux=True)
        self._mapped = vmap(gradient, in_dims=(models, models, 0, 0, 0, 0, 0), randomness=draws)

    def __call__(self, named: Named, *samples: torch.Tensor) -> tuple[Named, torch.Tensor]:
        """Return what the step makes of (stacked) parameters and buffers, and each sample's loss.

        Parameters get their gradients, buffers their new values. `samples` are features, labels, weights, which of them
        are no padding, and streams of chance.
        """
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


class MappedStep:
    """Steps of any module through vmap."""

    shares, draws, first_is_shared = SHARES, True, False
    order: object = "mapped"

    def __init__(
        self, setup: TrainingSetup, descent: Descent, part: Part = "everything", *, products: bool = True
    ) -> None:
        self.setup, self.descent = setup, descent
        self.size, self.trained = setup.layout.size, setup.layout.trained
        self.module = stackable(setup.module, products=products).to(setup.device)
        self.layout, self._turned = stacked_layout(setup.layout, self.module)
        self._names = names_of(setup.module, part) & self.layout.trained_names
        self.moved: Sequence[slice] = self.layout.columns(self._names)

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
        moving = [slot for slot in self.layout.slots if slot.name in self._names]
        targets = [] if into is None else [into[:, slot.offset : slot.offset + slot.size] for slot in moving]
        # They become numbers and are changed at random inside, where a compiler makes one pass of it.
        samples = (current.taken, current.labels, current.weights, current.valid, current.chance)
        program = self.program(loss, current.dataset.augment, cuts, targets, samples)
        current.add(program(cuts, targets, samples))

    def outputs(self, models: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return what models make of samples of their own, [models, samples, outputs], as in tests."""

        def one(named: Named, samples: torch.Tensor) -> torch.Tensor:
            return functional_call(self.module, named, (samples,))

        self.module.eval()
        with sdpa_kernel(SDPBackend.MATH):
            return vmap(one)(self.layout.views(self.native(models)), features)

    def program(
        self, loss: LossState, augment: Augmentation | None, cuts: Tensors, targets: Tensors, samples: Tensors
    ) -> Program:
        """Return what takes one step of tensors like these: the models' own, the gradients' where a step is not plain.

        `samples` are those taken from the data set, labels, weights, which are no padding, and streams of chance. It
        returns each sample's loss.
        """
        gradient = MappedGradient(self.module, self._names, loss)
        buffers = [slot.name for slot in self.layout.buffer_slots]
        moving = [slot.name for slot in self.layout.trained_slots if slot.name in self._names]

        def step(cuts: Tensors, targets: Tensors, samples: Tensors) -> torch.Tensor:
            held = {slot.name: cut for slot, cut in zip(self.layout.slots, cuts, strict=True)}
            views = {slot.name: held[slot.name].view(-1, *slot.shape) for slot in self.layout.slots}
            taken, labels, weights, valid, chance = samples
            features = as_numbers(taken) if augment is None else augment(as_numbers(taken), chance)
            with shortened(self.setup.precision, cuts[0].device):
                found, each = gradient(views, features, labels, weights, valid, chance)
            fresh = {name: found[name].reshape(held[name].shape) for name in (*moving, *buffers)}
            for name, target in [*zip(moving, targets, strict=False), *((name, held[name]) for name in buffers)]:
                target.copy_(fresh[name])
            if not targets:
                # One call for all tensors: a compiler makes few kernels of it, not one for each.
                add: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
                add([held[name] for name in moving], [fresh[name] for name in moving], alpha=-self.descent.rate)
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
        how = (self.backend, self.setup.precision, self.setup.device, rate, loss, augment, *sorted(self._names))
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
