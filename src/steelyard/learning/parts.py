"""Parts of a model by what they are: its head, its body, its batch norms; which of its numbers each of them is."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from steelyard.base.errors import UserError
from steelyard.learning.catalogue import no_part
from steelyard.learning.parameters import Layout
from steelyard.messages.algorithm import Part


def _names(module: nn.Module, part: Part) -> set[str]:
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
    if part == "norms" and not _names(module, part):
        raise UserError(no_part(algorithm, part))
    if part == "head" and not Layout.of(module).trained_names & _names(module, "body"):
        raise UserError(no_part(algorithm, part))


def spans(module: nn.Module, part: Part) -> tuple[tuple[int, int], ...]:
    """Return begin and end of each tensor of this part in the flat vector."""
    names = _names(module, part)
    return tuple((s.offset, s.offset + s.size) for s in Layout.of(module).slots if s.name in names)


def mask(module: nn.Module, part: Part, device: torch.device) -> torch.Tensor:
    """Return for each number of the flat vector whether it belongs to this part."""
    found = torch.zeros(Layout.of(module).size, dtype=torch.bool, device=device)
    for begin, end in spans(module, part):
        found[begin:end] = True
    return found
