"""Steps of Keras' mnist_cnn for stacked clients, derived by hand: gathered windows, batched products, masks by name.

Both convolutions lose their border, only the second is pooled. The way back through the second goes by the windows:
slopes times kernels, and the nine parts of a window added where they came from. What lies between the products goes
through `passes`.
"""

from __future__ import annotations

from math import prod

import torch

from steelyard.clients.local.convolution.order import channels_moved, kernels, matrix_views
from steelyard.clients.local.convolution.passes import Passes, TorchPasses
from steelyard.clients.local.device_data.schedule import CurrentStep
from steelyard.clients.local.steps.dense import dense, dense_back
from steelyard.clients.local.steps.gradients import OutputGradient
from steelyard.clients.local.steps.writers import Views, Writer
from steelyard.learning.models import RATES, KerasNet
from steelyard.learning.parameters import Layout

aten = torch.ops.aten
ALIGNED = 8
"""Windows are filled up to a multiple of so many numbers; matrix units take half precision slowly otherwise."""


class KerasSteps:
    """Steps of a KerasNet for stacked clients; kernels are kept channels last."""

    first_is_shared, draws = False, True

    def __init__(self, module: KerasNet, layout: Layout, *, half: bool, passes: Passes | None = None) -> None:
        self.passes: Passes = passes or TorchPasses()
        self.layout, self.size, self.image = layout, layout.size, module.image
        self.kernel = module.conv1.kernel_size[0]
        self.channels = (module.conv1.out_channels, module.conv2.out_channels)
        self.hidden = module.dense1.out_features
        self.dtype = torch.bfloat16 if half else torch.float32
        depth, height, width = module.image
        self.taps = self.kernel**2 * depth
        self.width = -(-(self.taps + 1) // ALIGNED) * ALIGNED
        """Numbers of a first window, and with the 1 of the bias and what fills it up."""
        self.sides = tuple(
            (height - count * (self.kernel - 1), width - count * (self.kernel - 1)) for count in range(3)
        )
        """Height and width of the image and after each convolution."""

    def views(self, native: torch.Tensor) -> dict[str, torch.Tensor]:
        return matrix_views(self.layout, native)

    def native(self, flat: torch.Tensor) -> torch.Tensor:
        # The first dense layer has its channels last in the module itself.
        return channels_moved(flat, self.layout, kernels(self.layout), last=True)

    def restore(self, native: torch.Tensor) -> torch.Tensor:
        return channels_moved(native, self.layout, kernels(self.layout), last=False)

    def sample_floats(self, samples: int) -> int:
        first, second = prod(self.sides[1]), prod(self.sides[2])
        window = self.kernel**2 * self.channels[0]
        convolutions = first * (self.width + 4 * self.channels[0])
        return convolutions + second * (2 * window + 4 * self.channels[1]) + 8 * self.hidden

    def step(
        self, parameters: Views, current: CurrentStep, gradient: OutputGradient, write: Writer, shared: Views | None
    ) -> torch.Tensor:
        clients, samples, chance = current.busy, current.samples, current.chance
        inner, outer = self.channels
        passes = self.passes
        images = current.features.reshape(-1, *self.image).permute(0, 2, 3, 1).to(self.dtype)
        seen1 = passes.windows(images, self.kernel, self.width, ones=True).view(clients, -1, self.width)
        below1 = torch.bmm(seen1, self._first_kernels(parameters).transpose(1, 2)).relu_()
        below1 = below1.view(-1, *self.sides[1], inner)
        window = self.kernel**2 * inner
        seen2 = passes.windows(below1, self.kernel, window).view(clients, -1, window)
        kernels2 = parameters["conv2.weight"].to(self.dtype)
        raw = torch.bmm(seen2, kernels2.transpose(1, 2))
        pooled, codes = passes.pool(raw.view(-1, *self.sides[2], outer), parameters["conv2.bias"])
        drop1 = passes.mask(chance, 0, samples, pooled[0].numel(), RATES[0])
        flat = pooled.view(clients, samples, -1) * drop1
        hidden = dense(flat, "dense1", parameters).relu_()
        drop2 = passes.mask(chance, 1, samples, hidden.shape[2], RATES[1])
        entered = hidden * drop2
        slope, each = gradient(dense(entered, "dense2", parameters), current.labels, current.weights)

        below = dense_back(slope, entered, "dense2", parameters, write).mul_(drop2)
        slope = aten.threshold_backward(below, hidden, 0)
        below = dense_back(slope, flat, "dense1", parameters, write).mul_(drop1)
        slope = passes.unpool(below.to(self.dtype).view(pooled.shape), codes, *self.sides[2])
        slope = slope.view(clients, -1, outer)
        # Before the kernels change: the slopes at the windows need them as they were.
        parts = torch.bmm(slope, kernels2)
        write.sum("conv2.bias", slope)
        write.ready("conv2.weight", passes.product(slope, seen2, samples))
        slope = passes.added(parts, below1, self.kernel)
        both = passes.product(slope.view(clients, -1, inner), seen1, samples)
        write.ready("conv1.weight", both[..., : self.taps])
        write.ready("conv1.bias", both[..., self.taps])
        return each

    def _first_kernels(self, parameters: Views) -> torch.Tensor:
        """The first kernels with their bias behind them, as wide as the windows."""
        weight, bias = parameters["conv1.weight"], parameters["conv1.bias"]
        kernels = weight.new_zeros((*weight.shape[:2], self.width), dtype=self.dtype)
        kernels[..., : self.taps] = weight
        kernels[..., self.taps] = bias
        return kernels
