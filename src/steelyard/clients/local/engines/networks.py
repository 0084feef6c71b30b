"""Which built-in network a module is, and its steps derived by hand."""

from __future__ import annotations

from typing import TypeGuard

from torch import nn

from steelyard.clients.local.convolution.keras import KerasSteps
from steelyard.clients.local.convolution.stacked import ConvSteps
from steelyard.clients.local.layers.replacing import has_hooks
from steelyard.clients.local.steps.dense import DenseSteps
from steelyard.clients.local.steps.stacked_steps import StackedSteps
from steelyard.learning.models import ConvNet, DenseNet, KerasNet
from steelyard.learning.parameters import Layout


def is_convolutional(module: nn.Module) -> TypeGuard[ConvNet]:
    """Whether a module computes exactly what the built-in convolutional network does."""
    return isinstance(module, ConvNet) and _unchanged(module, ConvNet)


def is_dense(module: nn.Module) -> TypeGuard[DenseNet]:
    """Whether a module computes exactly what the built-in dense network does."""
    return isinstance(module, DenseNet) and _unchanged(module, DenseNet)


def is_keras(module: nn.Module) -> TypeGuard[KerasNet]:
    """Whether a module computes exactly what Keras' example network does."""
    return isinstance(module, KerasNet) and _unchanged(module, KerasNet)


def _unchanged(module: nn.Module, network: type[nn.Module]) -> bool:
    # A user's subclass may add layers or compute something else, and steps written out for the network would then be
    # wrong: they are used only where both how the network is made and how it is run are the network's own, where no
    # layer was replaced or given a hook, and where every parameter is trained.
    kind = type(module)
    if kind.forward is not network.forward or kind.__init__ is not network.__init__:
        return False
    inner = [layer for layer in module.modules() if layer is not module]
    return (
        all(type(layer) in (nn.Linear, nn.Conv2d, nn.ModuleList) for layer in inner)
        and not any(has_hooks(layer) or "forward" in vars(layer) for layer in (module, *inner))
        and all(parameter.requires_grad for parameter in module.parameters())
    )


def hand_derived_steps(module: nn.Module, layout: Layout, precision: str) -> StackedSteps | None:
    """Return the hand-derived steps of a built-in network, or None for a module of which nothing is known."""
    if is_dense(module):
        return DenseSteps(module, layout)
    if is_convolutional(module):
        return ConvSteps(module, layout, half=precision == "bfloat16")
    if is_keras(module):
        return KerasSteps(module, layout, half=precision == "bfloat16")
    return None
