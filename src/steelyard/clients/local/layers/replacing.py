"""A copy of a module whose layers can be trained in stacks: the same parameters, names and results."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]

from steelyard.clients.local.layers.convolution import StackedConvolution, StackedLinear
from steelyard.clients.local.layers.normalisation import MaskedBatchNorm
from steelyard.clients.local.layers.recurrent import StackedRecurrent
from steelyard.learning.parameters import Layout, for_training, still_layers

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def stackable(module: nn.Module, *, products: bool) -> nn.Module:
    """Return a copy in training mode with layers that `torch.func` can map over clients.

    `products` writes dense and convolutional layers as products of matrices too, which matrix units want. Layers of a
    user's own class, or with hooks, stay as they are.
    """
    module = copy.deepcopy(module)
    still = frozenset(map(id, still_layers(module)))
    return for_training(_replaced(module, {}, still, products))


def stacked_layout(layout: Layout, module: nn.Module) -> tuple[Layout, dict[str, tuple[int, ...]]]:
    """Return where the parameters of a stackable module stand, and torch's shapes of the kernels that are turned."""
    layers = dict(module.named_modules())
    turned: dict[str, tuple[int, ...]] = {}
    slots = list(layout.slots)
    for number, slot in enumerate(slots):
        name, _, kind = slot.name.rpartition(".")
        if kind == "weight" and isinstance(layers[name], StackedConvolution):
            turned[slot.name] = slot.shape
            slots[number] = replace(slot, shape=tuple(slot.shape[axis] for axis in StackedConvolution.AXES))
    return replace(layout, slots=tuple(slots)), turned


def unmasked_norms(module: nn.Module) -> bool:
    """Whether a module normalises over batches in a way that counts the padding of short batches."""
    still = set(map(id, still_layers(module)))
    layers = [layer for layer in module.modules() if id(layer) not in still]
    if any(isinstance(layer, _InstanceNorm) and layer.track_running_stats for layer in layers):
        return True
    return any(_stacked(layer, products=False) is None for layer in layers if isinstance(layer, _BatchNorm))


def has_hooks(module: nn.Module) -> bool:
    """Whether something of the user's runs before or after this layer, forward or backward."""
    return any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks") and "state_dict" not in name)


def _replaced(layer: nn.Module, known: dict[int, nn.Module], still: frozenset[int], products: bool) -> nn.Module:
    # A layer that stands in two places of a network is replaced by one layer, so that it keeps its one set of weights.
    if id(layer) not in known:
        known[id(layer)] = layer
        known[id(layer)] = (None if id(layer) in still else _stacked(layer, products)) or layer
        for name, child in list(layer.named_children()):
            setattr(layer, name, _replaced(child, known, still, products))
    return known[id(layer)]


def _stacked(layer: nn.Module, products: bool) -> nn.Module | None:
    kind = type(layer)
    if has_hooks(layer) or "forward" in vars(layer):
        return None
    if kind in NORMS and isinstance(layer, _BatchNorm) and MaskedBatchNorm.takes(layer):
        return MaskedBatchNorm(layer)
    if StackedRecurrent.takes(layer):
        return StackedRecurrent(layer)
    if products and kind is nn.Linear:
        assert isinstance(layer, nn.Linear)
        return StackedLinear(layer)
    if products and kind is nn.Conv2d:
        assert isinstance(layer, nn.Conv2d)
        return StackedConvolution(layer) if StackedConvolution.takes(layer) else None
    return None
