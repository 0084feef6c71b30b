"""Which built-in network a module is, and its steps derived by hand."""

from __future__ import annotations

from typing import TypeGuard

from torch import nn

from steelyard.clients.local.convolution.stacked import ConvSteps
from steelyard.clients.local.steps.dense import DenseSteps
from steelyard.clients.local.steps.stacked_steps import StackedSteps
from steelyard.learning.models import ConvNet, DenseNet
from steelyard.learning.parameters import Layout


def is_convolutional(module: nn.Module) -> TypeGuard[ConvNet]:
    """Whether a module computes exactly what the built-in convolutional network does."""
    return isinstance(module, ConvNet) and _unchanged(type(module), ConvNet)


def is_dense(module: nn.Module) -> TypeGuard[DenseNet]:
    """Whether a module computes exactly what the built-in dense network does."""
    return isinstance(module, DenseNet) and _unchanged(type(module), DenseNet)


def _unchanged(kind: type[nn.Module], network: type[nn.Module]) -> bool:
    # A user's subclass may add layers or compute something else, and steps written out for the network would then be
    # wrong: they are used only where both how the network is made and how it is run are the network's own.
    return kind.forward is network.forward and kind.__init__ is network.__init__


def hand_derived_steps(module: nn.Module, layout: Layout, precision: str) -> StackedSteps | None:
    """Return the hand-derived steps of a built-in network, or None for a module of which nothing is known."""
    if is_dense(module):
        return DenseSteps(module, layout)
    if is_convolutional(module):
        return ConvSteps(module, layout, half=precision == "bfloat16")
    return None
