"""Hand-derived training steps of the built-in networks, for a stack of clients at a time.

A step computes outputs, the gradient at the outputs and, layer by layer from the last to the first, the product that
changes the weights; nothing is kept that plain SGD does not need. What autograd would give is the test of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from steelyard.clients.local.steps.gradients import OutputGradient, Sgd
from steelyard.learning.models import DenseNet
from steelyard.learning.parameters import Layout

Views = Mapping[str, torch.Tensor]
NEAR_BYTES = 4 << 20
"""Products that are added to something at once: enough to hide the cost of calls, few enough to stay in a cache."""


class Writer(Protocol):
    """Where a step puts its gradients: straight into the parameters, or into a buffer for what SGD does next."""

    def product(self, name: str, slope: torch.Tensor, inputs: torch.Tensor) -> None:
        """Take slopeᵀ @ inputs of every client as the gradient of a weight matrix."""
        ...

    def sum(self, name: str, slope: torch.Tensor) -> None:
        """Take the sum of slope over the samples as the gradient of a bias."""
        ...

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        """Take a gradient as it is."""
        ...


@dataclass(frozen=True, eq=False)
class InPlace:
    """θ ← θ − η·gradient while the gradient is computed; right for plain SGD only."""

    parameters: Views
    rate: float

    def product(self, name: str, slope: torch.Tensor, inputs: torch.Tensor) -> None:
        weight = self.parameters[name]
        target = weight.view(len(weight), weight.shape[1], -1)
        if target.dtype == slope.dtype:
            target.baddbmm_(slope.transpose(1, 2), inputs, alpha=-self.rate)
        else:
            target.sub_(torch.bmm(slope.transpose(1, 2), inputs), alpha=self.rate)

    def sum(self, name: str, slope: torch.Tensor) -> None:
        self.ready(name, slope.sum(dim=1, dtype=torch.float32))

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        self.parameters[name].sub_(gradient, alpha=self.rate)


@dataclass(frozen=True, eq=False)
class Fresh:
    """θ = Θ − η·gradient, written into models that nobody has read yet; right for the first step of plain SGD.

    A stack that holds the shared model need not be copied out first: its numbers pass the memory once, not three times.
    """

    parameters: Views
    shared: Views
    rate: float

    def product(self, name: str, slope: torch.Tensor, inputs: torch.Tensor) -> None:
        weight, shared, slope = self.parameters[name], self.shared[name], slope.transpose(1, 2)
        block = max(1, NEAR_BYTES // (4 * shared.numel()))
        near = weight.new_empty((min(block, len(weight)), *shared.shape))
        for begin in range(0, len(weight), block):
            part = slice(begin, begin + block)
            product = torch.bmm(slope[part], inputs[part], out=near[: len(weight[part])])
            torch.add(shared, product, alpha=-self.rate, out=weight[part])

    def sum(self, name: str, slope: torch.Tensor) -> None:
        self.ready(name, slope.sum(dim=1, dtype=torch.float32))

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        torch.sub(self.shared[name], gradient, alpha=self.rate, out=self.parameters[name])


@dataclass(frozen=True, eq=False)
class Collected:
    """Gradients written into a buffer of the parameters' shape."""

    gradients: Views

    def product(self, name: str, slope: torch.Tensor, inputs: torch.Tensor) -> None:
        target = self.gradients[name]
        target.view(len(target), target.shape[1], -1).copy_(torch.bmm(slope.transpose(1, 2), inputs))

    def sum(self, name: str, slope: torch.Tensor) -> None:
        self.ready(name, slope.sum(dim=1, dtype=torch.float32))

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        self.gradients[name].copy_(gradient)


class Architecture(Protocol):
    """A network whose step is written out by hand for stacked clients."""

    size: int
    """How many numbers a model has in the order that the step wants."""
    first_is_shared: bool
    """Whether a step that is given `shared` leaves the stacked parameters unread."""

    def native(self, flat: torch.Tensor) -> torch.Tensor:
        """Return stacked models [clients, parameters] in the order of numbers that the step wants."""
        ...

    def restore(self, native: torch.Tensor) -> torch.Tensor:
        """Return stacked models in the order of the module again."""
        ...

    def views(self, native: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the named tensors in the native order."""
        ...

    def step(
        self,
        parameters: Views,
        features: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        gradient: OutputGradient,
        write: Writer,
        shared: Views | None = None,
    ) -> torch.Tensor:
        """Do one step and return each sample's loss.

        `shared` is one model that all clients still hold (first step): its forward is one plain product.
        """
        ...

    def sample_floats(self, samples: int) -> int:
        """Return about how many numbers one of a client's `samples` needs while a step runs; it sizes the stacks."""
        ...


class DenseSteps:
    """Steps of a DenseNet: dense layers with ReLU between them."""

    first_is_shared = True

    def __init__(self, module: DenseNet, layout: Layout) -> None:
        self.layout = layout
        self.size = layout.size
        self.depth = len(module.layers)
        self.widths = [slot.shape[0] for slot in layout.slots if len(slot.shape) == 2]
        self.inputs = layout.slots[0].shape[1]

    def native(self, flat: torch.Tensor) -> torch.Tensor:
        return flat

    def restore(self, native: torch.Tensor) -> torch.Tensor:
        return native

    def views(self, native: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.layout.views(native)

    def sample_floats(self, samples: int) -> int:
        return self.inputs + 4 * sum(self.widths)

    def step(
        self,
        parameters: Views,
        features: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        gradient: OutputGradient,
        write: Writer,
        shared: Views | None = None,
    ) -> torch.Tensor:
        entered = [features.flatten(2)]
        for place in range(self.depth):
            last = place == self.depth - 1
            out = dense(entered[place], f"layers.{place}", parameters, shared)
            entered.append(out if last else out.relu_())
        slope, each = gradient(entered.pop(), labels, weights)
        for place in reversed(range(self.depth)):
            below = dense_back(slope, f"layers.{place}", parameters, shared) if place else None
            write.product(f"layers.{place}.weight", slope, entered[place])
            write.sum(f"layers.{place}.bias", slope)
            if below is not None:
                slope = torch.ops.aten.threshold_backward(below, entered[place], 0)
        return each


def dense(inputs: torch.Tensor, name: str, parameters: Views, shared: Views | None) -> torch.Tensor:
    """x Wᵀ + b for every client: inputs [clients, n, i] → [clients, n, o]."""
    if shared is not None:
        clients, samples, width = inputs.shape
        flat = torch.addmm(shared[f"{name}.bias"], inputs.reshape(-1, width), shared[f"{name}.weight"].t())
        return flat.view(clients, samples, -1)
    return torch.baddbmm(parameters[f"{name}.bias"][:, None, :], inputs, parameters[f"{name}.weight"].transpose(1, 2))


def dense_back(slope: torch.Tensor, name: str, parameters: Views, shared: Views | None) -> torch.Tensor:
    """The gradient at the inputs of a dense layer: slope [clients, n, o] @ W."""
    if shared is not None:
        clients, samples, width = slope.shape
        return (slope.reshape(-1, width) @ shared[f"{name}.weight"]).view(clients, samples, -1)
    return torch.bmm(slope, parameters[f"{name}.weight"])


def architecture_of(module: nn.Module, layout: Layout, precision: str) -> Architecture | None:
    """Return the hand-derived steps of a built-in network, or None for a module of which nothing is known."""
    from steelyard.clients.local.convolution.stacked import ConvSteps
    from steelyard.learning.models import ConvNet

    if type(module) is DenseNet:
        return DenseSteps(module, layout)
    if type(module) is ConvNet:
        return ConvSteps(module, layout, half=precision == "bfloat16")
    return None


__all__ = ["Architecture", "Collected", "DenseSteps", "Fresh", "InPlace", "Sgd", "Writer", "architecture_of"]
