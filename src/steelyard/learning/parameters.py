"""A model as one flat vector of numbers, and back: what is sent, stacked, weighed and combined."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from steelyard.base.errors import UserError
from steelyard.learning.settings import no_part
from steelyard.messages.algorithm import Part


@dataclass(frozen=True)
class Slot:
    """Where one named tensor stands in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Which part of the flat vector is which tensor of a model; use it to go between the two forms.

    Parameters come first, in the order in which the module names them, then the floating buffers (running means of a
    normalisation layer, say). Parameters that the user excluded from training (requires_grad=False) are no part of what
    is averaged, nor are the buffers of parts that are frozen as a whole: everybody who builds the model has the same
    ones. So it is with buffers that no average has a meaning for: whole numbers, masks of -inf, and those that are no
    part of a module's state (persistent=False).
    """

    slots: tuple[Slot, ...]
    trained: int
    """How many numbers at the front are parameters; the rest are buffers."""

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Return the layout of a module; use it once per model."""
        slots: list[Slot] = []
        offset = 0
        for name, tensor in module.named_parameters():
            if tensor.requires_grad:
                slots.append(Slot(name, tuple(tensor.shape), offset, tensor.numel()))
                offset += tensor.numel()
        trained = offset
        constant = _unsaved(module)
        for part, layer in frozen_layers(module).items():
            constant |= {f"{part}.{name}" for name, _ in layer.named_buffers(recurse=False)}
        for name, tensor in module.named_buffers():
            if name not in constant and tensor.is_floating_point() and bool(tensor.isfinite().all()):
                slots.append(Slot(name, tuple(tensor.shape), offset, tensor.numel()))
                offset += tensor.numel()
        return cls(tuple(slots), trained)

    @property
    def size(self) -> int:
        """How many numbers the flat vector holds."""
        return sum(slot.size for slot in self.slots)

    @property
    def trained_slots(self) -> tuple[Slot, ...]:
        """The parameters, without the buffers."""
        return tuple(slot for slot in self.slots if slot.offset < self.trained)

    @property
    def buffer_slots(self) -> tuple[Slot, ...]:
        """The floating buffers."""
        return tuple(slot for slot in self.slots if slot.offset >= self.trained)

    @property
    def trained_names(self) -> frozenset[str]:
        """The names of the parameters."""
        return frozenset(slot.name for slot in self.trained_slots)

    @property
    def output(self) -> NDArray[np.int64]:
        """Positions of the last layer's rows, [outputs, parameters of each]: those of its weights, then its bias."""
        trained = self.trained_slots
        weight = next((slot for slot in reversed(trained) if len(slot.shape) > 1), None)
        if weight is None:
            raise UserError("model: has no layer with a row of weights for each output; allowed: a network with one")
        rows = (weight.offset + np.arange(weight.size)).reshape(weight.shape[0], -1)
        bias = next((slot for slot in trained if slot.offset > weight.offset and slot.shape == weight.shape[:1]), None)
        return rows if bias is None else np.column_stack([rows, bias.offset + np.arange(bias.size)])

    @property
    def kernels(self) -> NDArray[np.int64]:
        """Where each layer's kernel begins and ends, [kernels, 2]: parameters of more than one axis, no biases."""
        rows = [(slot.offset, slot.offset + slot.size) for slot in self.trained_slots if len(slot.shape) > 1]
        return np.array(rows, dtype=np.int64).reshape(-1, 2)

    @property
    def adapters(self) -> NDArray[np.int64]:
        """Low-rank adapters (LoRA) by their names in PEFT: [where A begins, where B begins, rank, inputs, outputs]."""
        named = {slot.name: slot for slot in self.trained_slots}
        rows: list[tuple[int, int, int, int, int]] = []
        for name, a in named.items():
            b = named.get(name.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B"))
            # Of a convolution A has the kernel's sides, B none.
            if b is not None and b is not a and len(a.shape) > 1 and b.size == b.shape[0] * a.shape[0]:
                rows.append((a.offset, b.offset, a.shape[0], a.size // a.shape[0], b.shape[0]))
        return np.array(rows, dtype=np.int64).reshape(-1, 5)

    def columns(self, names: Collection[str]) -> list[slice]:
        """Return where the tensors of these names stand in the flat vector, in runs without a gap."""
        found: list[slice] = []
        for slot in self.slots:
            if slot.name in names:
                follows = bool(found) and found[-1].stop == slot.offset
                found.append(slice(found.pop().start if follows else slot.offset, slot.offset + slot.size))
        return found

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return named views into a flat vector, or into stacked ones: [..., size] gives [..., *shape].

        Use it for functional calls; writing into a view writes into the vector.
        """
        lead = flat.shape[:-1]
        parts = flat.split([slot.size for slot in self.slots], dim=-1)
        return {slot.name: part.view(*lead, *slot.shape) for slot, part in zip(self.slots, parts, strict=True)}

    def flatten(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return one float32 vector made of the named tensors, stacked over their common leading axes."""
        first = self.slots[0]
        lead = tuple(tensors[first.name].shape)[: tensors[first.name].dim() - len(first.shape)]
        parts = [tensors[slot.name].detach().reshape(*lead, slot.size) for slot in self.slots]
        return torch.cat(parts, dim=-1).to(torch.float32)

    def read(self, module: nn.Module, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return the module's numbers as one flat vector; `into` is one to write them to."""
        held = self._held(module)
        into = held[0].new_empty(self.size, dtype=torch.float32) if into is None else into
        _copy(list(self.views(into).values()), held)
        return into

    def write(self, module: nn.Module, flat: torch.Tensor) -> None:
        """Put a flat vector into the module, in place."""
        _copy(self._held(module), list(self.views(flat).values()))

    def outside(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return the module's buffers that are no part of the flat vector, by their names: by all that one has."""
        named = dict(module.named_buffers(remove_duplicate=False))
        inside = {id(named[slot.name]) for slot in self.buffer_slots}
        return {name: buffer for name, buffer in named.items() if id(buffer) not in inside}

    def _held(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the module's own tensors, in the order of the slots."""
        if module not in _tables:
            _tables[module] = {
                f"{prefix}.{name}" if prefix else name: (table, name)
                for prefix, layer in module.named_modules()
                for table in (layer._parameters, layer._buffers)
                for name in table
            }
        tables = _tables[module]
        return [table[name] for table, name in (tables[slot.name] for slot in self.slots)]


def frozen_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return by name the layers in parts of a module that have parameters, all of them excluded from training."""
    found: dict[str, nn.Module] = {}
    if all(parameter.requires_grad for parameter in module.parameters()):
        return found
    for name, part in module.named_modules():
        held = list(part.parameters())
        if name and held and not any(parameter.requires_grad for parameter in held):
            found |= {f"{name}.{inner}" if inner else name: layer for inner, layer in part.named_modules()}
    return found


def still_layers(module: nn.Module) -> list[nn.Module]:
    """Return the frozen layers with buffers of floats, such as a backbone's batch norm: they run as in tests."""
    held = frozen_layers(module).values()
    return [layer for layer in held if any(each.is_floating_point() for each in layer.buffers(recurse=False))]


def for_training(module: nn.Module) -> nn.Module:
    """Put a module into training mode, all but its frozen layers with buffers; returns the module."""
    module.train()
    for layer in still_layers(module):
        layer.eval()
    return module


def _unsaved(module: nn.Module) -> set[str]:
    """The names of buffers that are no part of a module's state."""
    return {
        f"{part}.{name}" if part else name
        for part, layer in module.named_modules()
        for name in layer._non_persistent_buffers_set
    }


_tables: WeakKeyDictionary[nn.Module, dict[str, tuple[dict[str, Any], str]]] = WeakKeyDictionary()
"""Where each module keeps its tensors, by their whole names: a `state_dict` takes as long as a part of a small step."""


@torch.no_grad()
def _copy(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
    copy(into, tensors)


# Parts of a model: its head, its body, its batch norms.


def names_of(module: nn.Module, part: Part) -> set[str]:
    """Return the names of the parameters and buffers that are this part of a module; what is frozen is none."""
    layout = Layout.of(module)
    everything = {slot.name for slot in layout.slots}
    if part in ("nothing", "everything"):
        return everything if part == "everything" else set()
    if part == "norms":
        norms = [name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
        return {name for name in everything if name.rpartition(".")[0] in norms}
    last = layout.trained_slots[-1].name.rpartition(".")[0]
    head = {name for name in everything if name.rpartition(".")[0] == last}
    return head if part == "head" else everything - head


def check_part(module: nn.Module, part: Part, algorithm: str) -> None:
    """Refuse an algorithm that keeps a part of the model apart which this model does not have."""
    if part == "norms" and not names_of(module, part):
        raise UserError(no_part(algorithm, part))
    if part == "head" and not Layout.of(module).trained_names & names_of(module, "body"):
        raise UserError(no_part(algorithm, part))


def spans(module: nn.Module, part: Part) -> tuple[tuple[int, int], ...]:
    """Return begin and end of each run of this part in the flat vector."""
    return tuple((run.start, run.stop) for run in Layout.of(module).columns(names_of(module, part)))


def mask(module: nn.Module, part: Part, device: torch.device) -> torch.Tensor:
    """Return for each number of the flat vector whether it belongs to this part."""
    found = torch.zeros(Layout.of(module).size, dtype=torch.bool, device=device)
    for begin, end in spans(module, part):
        found[begin:end] = True
    return found
