"""Steps of Keras' mnist_cnn for stacked clients, derived by hand: gathered windows, batched products, masks by name.

Both convolutions lose their border, only the second is pooled. The way back through the second goes by the windows:
slopes times kernels, and the nine parts of a window added where they came from.
"""

from __future__ import annotations

from itertools import product
from math import prod

import torch

from steelyard.clients.local.convolution import windows
from steelyard.clients.local.convolution.order import matrix_views
from steelyard.clients.local.steps.dense import dense, dense_back
from steelyard.clients.local.steps.gradients import OutputGradient
from steelyard.clients.local.steps.writers import Views, Writer
from steelyard.learning.dropout import mask
from steelyard.learning.keras_cnn import RATES, KerasNet
from steelyard.learning.parameters import Layout

aten = torch.ops.aten


class KerasSteps:
    """Steps of a KerasNet for stacked clients in torch's operators; kernels are kept channels last."""

    first_is_shared, draws = False, True

    def __init__(self, module: KerasNet, layout: Layout, *, half: bool) -> None:
        self.layout, self.size, self.image = layout, layout.size, module.image
        self.kernel = module.conv1.kernel_size[0]
        self.channels = (module.conv1.out_channels, module.conv2.out_channels)
        self.hidden = module.dense1.out_features
        self.dtype = torch.bfloat16 if half else torch.float32
        _, height, width = module.image
        self.sides = tuple(
            (height - count * (self.kernel - 1), width - count * (self.kernel - 1)) for count in range(3)
        )
        """Height and width of the image and after each convolution."""

    def views(self, native: torch.Tensor) -> dict[str, torch.Tensor]:
        return matrix_views(self.layout, native)

    def native(self, flat: torch.Tensor) -> torch.Tensor:
        return self._moved(flat, inward=True)

    def restore(self, native: torch.Tensor) -> torch.Tensor:
        return self._moved(native, inward=False)

    def _moved(self, flat: torch.Tensor, *, inward: bool) -> torch.Tensor:
        """Kernels with their channels last, or back; the first dense layer stands so in the module itself."""
        moved = flat.clone()
        for slot in self.layout.slots:
            if slot.name in ("conv1.weight", "conv2.weight"):
                out, channels, rows, columns = slot.shape
                shape = (out, channels, rows, columns) if inward else (out, rows, columns, channels)
                axes = (0, 1, 3, 4, 2) if inward else (0, 1, 4, 2, 3)
                turned = flat.narrow(1, slot.offset, slot.size).view(-1, *shape).permute(axes)
                moved.narrow(1, slot.offset, slot.size).view(turned.shape).copy_(turned)
        return moved

    def sample_floats(self, samples: int) -> int:
        first, second = prod(self.sides[1]), prod(self.sides[2])
        window = self.kernel**2 * self.channels[0]
        convolutions = first * (self.kernel**2 * self.image[0] + 4 * self.channels[0])
        return convolutions + second * (2 * window + 4 * self.channels[1]) + 8 * self.hidden

    def step(
        self,
        parameters: Views,
        features: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        gradient: OutputGradient,
        write: Writer,
        shared: Views | None = None,
        chance: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert chance is not None  # what trains a network that draws says from which stream
        clients, samples = labels.shape
        inner, outer = self.channels
        images = features.reshape(-1, *self.image).permute(0, 2, 3, 1).to(self.dtype)
        seen1 = self._windows(images, self.sides[1]).view(clients, -1, self.kernel**2 * self.image[0])
        below1 = self._convolved(seen1, "conv1", parameters).relu_()
        seen2 = self._windows(below1.view(-1, *self.sides[1], inner), self.sides[2])
        seen2 = seen2.view(clients, -1, self.kernel**2 * inner)
        raw = torch.bmm(seen2, parameters["conv2.weight"].to(self.dtype).transpose(1, 2))
        pooled, codes = windows.pool(raw.view(-1, *self.sides[2], outer), parameters["conv2.bias"])
        flat = pooled.view(clients, samples, -1).float()
        drop1 = mask(chance, 0, samples, flat.shape[2], RATES[0])
        flat = flat.mul_(drop1)
        hidden = dense(flat, "dense1", parameters, None).relu_()
        drop2 = mask(chance, 1, samples, hidden.shape[2], RATES[1])
        entered = hidden * drop2
        slope, each = gradient(dense(entered, "dense2", parameters, None), labels, weights)

        below = dense_back(slope, "dense2", parameters, None).mul_(drop2)
        write.product("dense2.weight", slope, entered)
        write.sum("dense2.bias", slope)
        slope = aten.threshold_backward(below, hidden, 0)
        below = dense_back(slope, "dense1", parameters, None).mul_(drop1)
        write.product("dense1.weight", slope, flat)
        write.sum("dense1.bias", slope)
        slope = windows.unpool(below.to(self.dtype).view(pooled.shape), codes, *self.sides[2]).view(clients, -1, outer)
        # Before the kernels change: the slopes at the windows need them as they were.
        parts = torch.bmm(slope, parameters["conv2.weight"].to(self.dtype))
        write.sum("conv2.bias", slope)
        write.product("conv2.weight", slope, seen2)
        slope = aten.threshold_backward(self._added(parts), below1.view(-1, *self.sides[1], inner), 0)
        slope = slope.view(clients, -1, inner)
        write.sum("conv1.bias", slope)
        write.product("conv1.weight", slope, seen1)
        return each

    def _convolved(self, seen: torch.Tensor, name: str, parameters: Views) -> torch.Tensor:
        kernels = parameters[f"{name}.weight"].to(self.dtype).transpose(1, 2)
        return torch.baddbmm(parameters[f"{name}.bias"][:, None, :].to(self.dtype), seen, kernels)

    def _windows(self, images: torch.Tensor, sides: tuple[int, int]) -> torch.Tensor:
        """The kernel×kernel windows of images [n, h, w, c] that lie inside: [n · positions, kernel² · c]."""
        images = images.contiguous()
        steps = images.stride()
        shape = (len(images), *sides, self.kernel, self.kernel, images.shape[3])
        seen = images.as_strided(shape, (steps[0], steps[1], steps[2], steps[1], steps[2], 1))
        return seen.reshape(-1, self.kernel**2 * images.shape[3])

    def _added(self, parts: torch.Tensor) -> torch.Tensor:
        """Add the parts of every window where they came from: [images, height, width, channels]."""
        rows, columns = self.sides[2]
        windowed = parts.view(-1, rows, columns, self.kernel, self.kernel, self.channels[0])
        total = parts.new_zeros((len(windowed), *self.sides[1], self.channels[0]))
        for down, along in product(range(self.kernel), range(self.kernel)):
            total[:, down : down + rows, along : along + columns] += windowed[:, :, :, down, along]
        return total
