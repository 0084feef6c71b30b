"""Hand-derived steps of the convolutional network for stacked clients: windows gathered, then batched products.

Every client has its own kernels, so a convolution over the stack is one batched product of gathered windows
[clients, positions, window] with kernels [clients, window, channels]. Numbers stand channels last throughout, and
kernels and the first dense layer are kept in that order for the whole round.
"""

from __future__ import annotations

from math import prod

import torch

from steelyard.clients.local.convolution import windows
from steelyard.clients.local.convolution.order import ConvOrder
from steelyard.clients.local.device_data.schedule import CurrentStep
from steelyard.clients.local.steps.dense import dense, dense_back
from steelyard.clients.local.steps.gradients import OutputGradient
from steelyard.clients.local.steps.writers import Views, Writer
from steelyard.learning.models import ConvNet
from steelyard.learning.parameters import Layout

aten = torch.ops.aten


class ConvSteps:
    """Steps of a ConvNet for stacked clients in torch's operators; use it where there is no Triton.

    Numbers are packed for the step: every tensor begins on a boundary that matrix units like, kernels stand channels
    last, and the first convolution's bias is one more weight of its kernels (its windows carry a 1).
    """

    first_is_shared, draws = False, False

    def __init__(self, module: ConvNet, layout: Layout, *, half: bool) -> None:
        self.order = ConvOrder(module, layout)
        self.image, self.kernel, self.channels = self.order.image, self.order.kernel, self.order.channels
        self.layout, self.rectified = layout, self.order.rectified
        self.dtype = torch.bfloat16 if half else torch.float32
        self.first = self.kernel**2 * self.image[0]
        self.widths = (_round(self.first + 1, 16), self.kernel**2 * self.channels[0])
        self.slots: dict[str, tuple[int, tuple[int, ...]]] = {}
        """Offset and shape of each tensor in a packed model."""
        self.size = 0
        for slot in layout.slots:
            if slot.name == "conv1.bias":
                continue
            rows = int(slot.shape[0])
            columns = self.widths[0] if slot.name == "conv1.weight" else slot.size // rows
            self.slots[slot.name] = (self.size, (rows, columns) if len(slot.shape) > 1 else (rows,))
            self.size += _round(rows * columns, 32)

    def views(self, native: torch.Tensor) -> dict[str, torch.Tensor]:
        lead = native.shape[:-1]
        return {
            name: native.narrow(-1, begin, prod(shape)).view(*lead, *shape)
            for name, (begin, shape) in self.slots.items()
        }

    def native(self, flat: torch.Tensor) -> torch.Tensor:
        turned = self.order.views(self.order.native(flat))
        native = flat.new_zeros((len(flat), self.size))
        named = self.views(native)
        for name, target in named.items():
            if name != "conv1.weight":
                target.copy_(turned[name])
        named["conv1.weight"][..., : self.first] = turned["conv1.weight"]
        named["conv1.weight"][..., self.first] = turned["conv1.bias"]
        return native

    def restore(self, native: torch.Tensor) -> torch.Tensor:
        turned = native.new_empty((len(native), self.layout.size))
        named = self.views(native)
        for name, target in self.order.views(turned).items():
            if name == "conv1.weight":
                target.copy_(named[name][..., : self.first])
            elif name == "conv1.bias":
                target.copy_(named["conv1.weight"][..., self.first])
            else:
                target.copy_(named[name])
        return self.order.restore(turned)

    def sample_floats(self, samples: int) -> int:
        _, height, width = self.image
        area = height * width
        first = area * (self.widths[0] + 3 * self.channels[0])
        gathered = self.widths[1] + self.kernel**2 * self.channels[1]
        second = area // 4 * (gathered + 6 * self.channels[1] + 2 * self.channels[0])
        dense = sum(3 * slot.shape[0] for slot in self.layout.slots if slot.name.startswith("dense"))
        return first + second + dense

    def step(
        self, parameters: Views, current: CurrentStep, gradient: OutputGradient, write: Writer, shared: Views | None
    ) -> torch.Tensor:
        clients, samples = current.busy, current.samples
        _, height, width = self.image
        seen1 = self.first_windows(current.features).view(clients, -1, self.widths[0])
        raw = torch.bmm(seen1, parameters["conv1.weight"].to(self.dtype).transpose(1, 2))
        below1, codes1 = windows.pool(raw.view(-1, height, width, self.channels[0]), None, rectified=self.rectified)
        second = _Gathered(self, below1, parameters["conv2.weight"].to(self.dtype))
        below2, codes2 = windows.pool(second.forward(), parameters["conv2.bias"], rectified=self.rectified)
        flat = below2.view(clients, samples, -1).float()
        hidden = dense(flat, "dense1", parameters).relu_()
        slope, each = gradient(dense(hidden, "dense2", parameters), current.labels, current.weights)

        slope = aten.threshold_backward(dense_back(slope, hidden, "dense2", parameters, write), hidden, 0)
        below = dense_back(slope, flat, "dense1", parameters, write)
        slope = aten.threshold_backward(below, flat, 0) if self.rectified else below
        slope = slope.to(self.dtype).view(below2.shape)
        write.sum("conv2.bias", slope.view(clients, -1, self.channels[1]))
        slope = windows.unpool(slope, codes2, *below1.shape[1:3])
        below = second.backward(slope)
        second.write(slope, write)
        slope = windows.unpool(below, codes1, height, width)
        # The product over all positions of a client keeps few cores busy: one per sample, then their sum.
        each_slope = slope.view(clients * samples, -1, self.channels[0])
        products = torch.bmm(each_slope.transpose(1, 2), seen1.view(clients * samples, -1, self.widths[0]))
        write.ready("conv1.weight", products.view(clients, samples, -1, self.widths[0]).sum(1, dtype=torch.float32))
        return each

    def first_windows(self, features: torch.Tensor) -> torch.Tensor:
        """Gather the windows of the images themselves, each with a 1 for the bias; no model has a part in it."""
        depth, height, width = self.image
        images = features.reshape(-1, depth, height, width).permute(0, 2, 3, 1).to(self.dtype).contiguous()
        return windows.windows(images, self.kernel, self.widths[0], ones=True)


class _Gathered:
    """The second convolution of all clients at once, by gathered windows and batched products."""

    def __init__(self, steps: ConvSteps, images: torch.Tensor, weights: torch.Tensor) -> None:
        self.steps, self.weights, self.grid = steps, weights, images.shape
        self.seen = windows.windows(images, steps.kernel, steps.widths[1]).view(len(weights), -1, steps.widths[1])

    def forward(self) -> torch.Tensor:
        return torch.bmm(self.seen, self.weights.transpose(1, 2)).view(*self.grid[:3], -1)

    def backward(self, slope: torch.Tensor) -> torch.Tensor:
        """The gradient at the inputs: turned windows of the slope times the kernels."""
        steps, clients = self.steps, len(self.weights)
        outer, inner = steps.channels[1], steps.channels[0]
        turned = self.weights.view(clients, outer, steps.kernel**2, inner).transpose(1, 2).reshape(clients, -1, inner)
        seen = windows.windows(slope, steps.kernel, steps.kernel**2 * outer, turned=True)
        return torch.bmm(seen.view(clients, -1, seen.shape[1]), turned).view(self.grid)

    def write(self, slope: torch.Tensor, write: Writer) -> None:
        write.product("conv2.weight", slope.view(len(self.weights), -1, slope.shape[-1]), self.seen)


def _round(number: int, step: int) -> int:
    return -(-number // step) * step
