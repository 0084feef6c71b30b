"""Training steps derived by hand, without autograd, for a stack of clients at a time; the dense network's own.

A step computes outputs, the gradient at the outputs and, layer by layer from the last to the first, the product that
changes the weights; nothing is kept that plain SGD does not need. What autograd would give is the test of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from steelyard.clients.local.cohort import CurrentStep
from steelyard.learning import losses
from steelyard.learning.models import DenseNet
from steelyard.learning.parameters import Layout
from steelyard.messages.updates import LossState

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


@dataclass(frozen=True, eq=False)
class OfPart(Writer):
    """Gradients of the parameters of these names alone, put where another writer puts them."""

    write: Writer
    names: Collection[str]

    def product(self, name: str, slope: torch.Tensor, inputs: torch.Tensor) -> None:
        if name in self.names:
            self.write.product(name, slope, inputs)

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        if name in self.names:
            self.write.ready(name, gradient)


OutputGradient = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(outputs [..., n, o], labels [..., n], weights [..., n]) → (gradient [..., n, o], loss of each sample [..., n])."""

SHORT, MANY = 32, 4096
"""Up to so many classes, and from so many numbers on, log softmax on the CPU goes by columns."""


def output_gradient(loss: LossState) -> OutputGradient:
    """Return the function that gives d(Σ weight · loss)/d outputs, and each sample's unweighted loss.

    The weights hold κ of the sample's class over the number of samples of the step; 0 marks padding. The losses of
    the papers have closed forms; any other goes through autograd, on the outputs alone.
    """
    closed = {
        "cross-entropy": _cross_entropy,
        "binary-cross-entropy": _binary_cross_entropy,
        "squared-error": _squared_error,
    }
    # Cox holds the samples of a batch against each other: the clients of a stack stay apart.
    other = _through_autograd(losses.per_sample(loss), apart=loss.name == "cox")
    return closed.get(loss.name, other)


def _cross_entropy(
    outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logs = _log_softmax(outputs)
    each = logs.gather(-1, labels[..., None]).squeeze(-1).neg_()
    classes = torch.arange(outputs.shape[-1], device=outputs.device)
    return logs.exp_().sub_((labels[..., None] == classes).to(logs.dtype)).mul_(weights[..., None]), each


def _log_softmax(outputs: torch.Tensor) -> torch.Tensor:
    """log softmax over the last axis; on the CPU a short last axis goes several times faster when it stands first."""
    if outputs.is_cuda or outputs.shape[-1] > SHORT or outputs.numel() < MANY:
        return torch.log_softmax(outputs, dim=-1)
    upright = outputs.reshape(-1, outputs.shape[-1]).t()
    return torch.log_softmax(upright, dim=0).t().contiguous().view(outputs.shape)


def _binary_cross_entropy(
    outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits, target = outputs.squeeze(-1), labels.to(outputs.dtype)
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return torch.sigmoid(logits).sub_(target).mul_(weights)[..., None], each


def _squared_error(
    outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gap = outputs.squeeze(-1) - labels.to(outputs.dtype)
    return (2 * gap * weights)[..., None], gap.square()


def _through_autograd(each_of: losses.PerSample, *, apart: bool) -> OutputGradient:
    def gradient(
        outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            leaf = (outputs.detach().clone() if apart else outputs.detach().flatten(0, -2)).requires_grad_()
            each = each_of(leaf, labels.reshape(*leaf.shape[:-1], *labels.shape[weights.dim() :]))
            # A product with weight 0 would carry a nan of padding into the sum; where() does not.
            share = weights.reshape(each.shape)
            total = torch.where(share > 0, each * share, torch.zeros_like(each)).sum()
            (slope,) = torch.autograd.grad(total, leaf)
        return slope.view_as(outputs), each.detach().view_as(weights)

    return gradient


SHARES = tuple(sixteenths / 16 for sixteenths in range(16, 0, -1))
"""Sizes of the stack for which graphs are captured, as shares of the whole, each when it is first needed. A stack of
unequal clients (benchmark B) does 2 % more work than it must; with ¾, ½, ¼ and ⅛ alone it was 10 %."""


class StackedSteps(Protocol):
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
        self, parameters: Views, current: CurrentStep, gradient: OutputGradient, write: Writer, shared: Views | None
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
        self, parameters: Views, current: CurrentStep, gradient: OutputGradient, write: Writer, shared: Views | None
    ) -> torch.Tensor:
        entered = [current.features.flatten(2)]
        for layer in range(self.depth):
            last = layer == self.depth - 1
            out = dense(entered[layer], f"layers.{layer}", parameters, shared)
            entered.append(out if last else out.relu_())
        slope, each = gradient(entered.pop(), current.labels, current.weights)
        for layer in reversed(range(self.depth)):
            name, inputs = f"layers.{layer}", entered[layer]
            if layer == 0:
                write_dense(slope, inputs, name, write)
            else:
                below = dense_back(slope, inputs, name, parameters, write, shared)
                slope = torch.ops.aten.threshold_backward(below, inputs, 0)
        return each


def dense(inputs: torch.Tensor, name: str, parameters: Views, shared: Views | None = None) -> torch.Tensor:
    """x Wᵀ + b for every client: inputs [clients, n, i] → [clients, n, o]."""
    if shared is not None:
        clients, samples, width = inputs.shape
        flat = torch.addmm(shared[f"{name}.bias"], inputs.reshape(-1, width), shared[f"{name}.weight"].t())
        return flat.view(clients, samples, -1)
    return torch.baddbmm(parameters[f"{name}.bias"][:, None, :], inputs, parameters[f"{name}.weight"].transpose(1, 2))


def dense_back(
    slope: torch.Tensor, inputs: torch.Tensor, name: str, parameters: Views, write: Writer, shared: Views | None = None
) -> torch.Tensor:
    """Write the gradients of a dense layer and return the one at its inputs: slope [clients, n, o] @ W."""
    # Before the weights change: the slope at the inputs needs them as they were.
    if shared is not None:
        clients, samples, width = slope.shape
        below = (slope.reshape(-1, width) @ shared[f"{name}.weight"]).view(clients, samples, -1)
    else:
        below = torch.bmm(slope, parameters[f"{name}.weight"])
    write_dense(slope, inputs, name, write)
    return below


def write_dense(slope: torch.Tensor, inputs: torch.Tensor, name: str, write: Writer) -> None:
    """Write the gradients of a dense layer, from the slope at its outputs and what entered it."""
    write.product(f"{name}.weight", slope, inputs)
    write.sum(f"{name}.bias", slope)
