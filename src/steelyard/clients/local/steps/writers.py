"""Where a training step that is derived by hand puts its gradients: into the parameters, or into a buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

Views = Mapping[str, torch.Tensor]
"""Stacked parameters by name: [clients, ...]."""
NEAR_BYTES = 4 << 20
"""Products that are added to something at once: enough to hide the cost of calls, few enough to stay in a cache."""


class Writer(ABC):
    """Where a step puts its gradients: straight into the parameters, or into a buffer for what SGD does next."""

    @abstractmethod
    def product(self, name: str, slope: torch.Tensor, inputs: torch.Tensor) -> None:
        """Take slopeᵀ @ inputs of every client as the gradient of a weight matrix."""

    @abstractmethod
    def ready(self, name: str, gradient: torch.Tensor) -> None:
        """Take a gradient as it is."""

    def sum(self, name: str, slope: torch.Tensor) -> None:
        """Take the sum of slope over the samples as the gradient of a bias."""
        self.ready(name, slope.sum(dim=1, dtype=torch.float32))


def writer(parameters: Views, gradients: Views | None, rate: float) -> Writer:
    """Return what writes into the gradients, or straight into the parameters where there are none (plain SGD)."""
    return InPlace(parameters, rate) if gradients is None else Collected(gradients)


@dataclass(frozen=True, eq=False)
class InPlace(Writer):
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

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        self.parameters[name].sub_(gradient, alpha=self.rate)


@dataclass(frozen=True, eq=False)
class Fresh(Writer):
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

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        torch.sub(self.shared[name], gradient, alpha=self.rate, out=self.parameters[name])


@dataclass(frozen=True, eq=False)
class Collected(Writer):
    """Gradients written into a buffer of the parameters' shape."""

    gradients: Views

    def product(self, name: str, slope: torch.Tensor, inputs: torch.Tensor) -> None:
        target = self.gradients[name]
        target.view(len(target), target.shape[1], -1).copy_(torch.bmm(slope.transpose(1, 2), inputs))

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        self.gradients[name].copy_(gradient)
