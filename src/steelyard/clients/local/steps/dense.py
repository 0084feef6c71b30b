"""Steps of the dense network, derived by hand for stacked clients; the convolutional one shares its dense layers."""

from __future__ import annotations

import torch

from steelyard.clients.local.device_data.schedule import CurrentStep
from steelyard.clients.local.steps.gradients import OutputGradient
from steelyard.clients.local.steps.writers import Views, Writer
from steelyard.learning.models import DenseNet
from steelyard.learning.parameters import Layout


class DenseSteps:
    """Steps of a DenseNet: dense layers with ReLU between them."""

    first_is_shared, draws = True, False

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
