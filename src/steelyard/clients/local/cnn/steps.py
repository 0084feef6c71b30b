"""Hand-derived steps of the convolutional network for stacked clients: windows gathered, then batched products.

Every client has its own kernels, so a convolution over the stack is one batched product of gathered windows
[clients, positions, window] with kernels [clients, window, channels]. Numbers stand channels last throughout (images
are [images, height, width, channels]), and kernels and the first dense layer are kept in that order for the whole
round.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch.nn import functional

from steelyard.clients.local.cohort import CurrentStep
from steelyard.clients.local.steps import OutputGradient, Views, Writer, dense, dense_back
from steelyard.learning.models import ConvNet
from steelyard.learning.parameters import Layout


class ConvOrder:
    """The order of numbers in which the steps keep a ConvNet: channels last in kernels and in the first dense layer."""

    def __init__(self, module: ConvNet, layout: Layout) -> None:
        self.layout = layout
        self.image = module.image
        self.kernel = module.conv1.kernel_size[0]
        self.channels = (module.conv1.out_channels, module.conv2.out_channels)
        self.rectified = module.rectified
        height, width = module.image[1:]
        dense = (module.dense1.out_features, self.channels[1], height // 4, width // 4)
        self._grids = {**kernels(layout), "dense1.weight": dense}

    def native(self, flat: torch.Tensor) -> torch.Tensor:
        """Return stacked models with channels last."""
        return channels_moved(flat, self.layout, self._grids, last=True)

    def restore(self, native: torch.Tensor) -> torch.Tensor:
        """Return stacked models in the module's order."""
        return channels_moved(native, self.layout, self._grids, last=False)

    def views(self, native: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return named tensors; kernels as matrices [..., channels out, window]."""
        return matrix_views(self.layout, native)


def kernels(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's kernels by name."""
    return {slot.name: slot.shape for slot in layout.slots if len(slot.shape) == 4}


def channels_moved(
    flat: torch.Tensor, layout: Layout, grids: Mapping[str, tuple[int, ...]], *, last: bool
) -> torch.Tensor:
    """Return stacked models [clients, parameters] with the channels of some tensors moved last, or back again.

    `grids` are shapes (rows, channels, height, width) of the tensors whose channels move; without any, these are the
    models themselves.
    """
    if not grids:
        return flat
    moved = torch.empty_like(flat)
    for slot in layout.slots:
        source = flat.narrow(1, slot.offset, slot.size)
        target = moved.narrow(1, slot.offset, slot.size)
        grid = grids.get(slot.name)
        if grid is None:
            target.copy_(source)
            continue
        rows, channels, height, width = grid
        shape, axes = (grid, (0, 1, 3, 4, 2)) if last else ((rows, height, width, channels), (0, 1, 4, 2, 3))
        turned = source.view(-1, *shape).permute(axes)
        target.view(turned.shape).copy_(turned)
    return moved


def matrix_views(layout: Layout, native: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the named tensors of one model or of stacked ones, whatever has several dimensions as a matrix."""
    lead = native.shape[:-1]
    named: dict[str, torch.Tensor] = {}
    for slot in layout.slots:
        shape = (slot.shape[0], -1) if len(slot.shape) > 1 else slot.shape
        named[slot.name] = native.narrow(-1, slot.offset, slot.size).view(*lead, *shape)
    return named


aten = torch.ops.aten
DEAD = 4
"""The code of a pooled number that ReLU cuts off; codes 0 to 3 say which of the four was the largest."""


def pool(raw: torch.Tensor, bias: torch.Tensor | None, *, rectified: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return relu(2×2 maximum + bias) and the codes of where each maximum was.

    `bias` is [clients, channels] for images that stand client by client. Adding a bias and cutting at 0 are monotone,
    so doing both after the maximum gives the same numbers from a quarter of the work. Without
    `rectified` nothing is cut.
    """
    width, channels = raw.shape[2:]
    pooled, where = aten.max_pool2d_with_indices(raw.permute(0, 3, 1, 2), [2, 2])
    pooled, where = pooled.permute(0, 2, 3, 1).contiguous(), where.permute(0, 2, 3, 1)
    if bias is not None:
        pooled.view(len(bias), -1, channels).add_(bias[:, None, :].to(raw.dtype))
    codes = (where // width % 2 * 2 + where % width % 2).to(torch.uint8)
    if not rectified:
        return pooled, codes
    pooled.relu_()
    return pooled, torch.where(pooled > 0, codes, DEAD)


def unpool(slope: torch.Tensor, codes: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Send each slope back to where its maximum was, and nowhere where ReLU cut it off."""
    count, rows, columns, channels = slope.shape
    spread = slope.new_zeros((count, height, width, channels))
    inner = spread[:, : 2 * rows, : 2 * columns].unflatten(1, (rows, 2)).unflatten(3, (columns, 2))
    for code in range(4):
        inner[:, :, code // 2, :, code % 2] = torch.where(codes == code, slope, 0)
    return spread


def windows(images: torch.Tensor, kernel: int, width: int, *, ones: bool = False, turned: bool = False) -> torch.Tensor:
    """Gather the kernel×kernel window around every position: [images · positions, width].

    Beyond the border are zeros. `turned` takes the windows back to front, which is what the way back through a
    convolution needs. Numbers beyond kernel² · channels are 0, except that `ones` puts a 1 right after them: a bias
    then is one more weight.
    """
    edge = kernel // 2
    images = functional.pad(images, (0, 0, edge, edge, edge, edge)).contiguous()
    count, height, columns, channels = images.shape
    taps = kernel * kernel * channels
    steps = images.stride()
    shape = (count, height - kernel + 1, columns - kernel + 1, kernel, kernel, channels)
    seen = images.as_strided(shape, (steps[0], steps[1], steps[2], steps[1], steps[2], 1))
    seen = seen.flip(3, 4) if turned else seen
    if taps == width:
        return seen.reshape(-1, width)
    out = images.new_zeros((prod(shape[:3]), width))
    out[:, :taps] = seen.reshape(-1, taps)
    if ones:
        out[:, taps] = 1
    return out


class ConvSteps:
    """Steps of a ConvNet for stacked clients in torch's operators; use it where there is no Triton.

    Numbers are packed for the step: every tensor begins on a boundary that matrix units like, kernels stand channels
    last, and the first convolution's bias is one more weight of its kernels (its windows carry a 1).
    """

    first_is_shared = False

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
        below1, codes1 = pool(raw.view(-1, height, width, self.channels[0]), None, rectified=self.rectified)
        second = _Gathered(self, below1, parameters["conv2.weight"].to(self.dtype))
        below2, codes2 = pool(second.forward(), parameters["conv2.bias"], rectified=self.rectified)
        flat = below2.view(clients, samples, -1).float()
        hidden = dense(flat, "dense1", parameters).relu_()
        slope, each = gradient(dense(hidden, "dense2", parameters), current.labels, current.weights)

        slope = aten.threshold_backward(dense_back(slope, hidden, "dense2", parameters, write), hidden, 0)
        below = dense_back(slope, flat, "dense1", parameters, write)
        slope = aten.threshold_backward(below, flat, 0) if self.rectified else below
        slope = slope.to(self.dtype).view(below2.shape)
        write.sum("conv2.bias", slope.view(clients, -1, self.channels[1]))
        slope = unpool(slope, codes2, *below1.shape[1:3])
        below = second.backward(slope)
        second.write(slope, write)
        slope = unpool(below, codes1, height, width)
        # The product over all positions of a client keeps few cores busy: one per sample, then their sum.
        each_slope = slope.view(clients * samples, -1, self.channels[0])
        products = torch.bmm(each_slope.transpose(1, 2), seen1.view(clients * samples, -1, self.widths[0]))
        write.ready("conv1.weight", products.view(clients, samples, -1, self.widths[0]).sum(1, dtype=torch.float32))
        return each

    def first_windows(self, features: torch.Tensor) -> torch.Tensor:
        """Gather the windows of the images themselves, each with a 1 for the bias; no model has a part in it."""
        depth, height, width = self.image
        images = features.reshape(-1, depth, height, width).permute(0, 2, 3, 1).to(self.dtype).contiguous()
        return windows(images, self.kernel, self.widths[0], ones=True)


class _Gathered:
    """The second convolution of all clients at once, by gathered windows and batched products."""

    def __init__(self, steps: ConvSteps, images: torch.Tensor, weights: torch.Tensor) -> None:
        self.steps, self.weights, self.grid = steps, weights, images.shape
        self.seen = windows(images, steps.kernel, steps.widths[1]).view(len(weights), -1, steps.widths[1])

    def forward(self) -> torch.Tensor:
        return torch.bmm(self.seen, self.weights.transpose(1, 2)).view(*self.grid[:3], -1)

    def backward(self, slope: torch.Tensor) -> torch.Tensor:
        """The gradient at the inputs: turned windows of the slope times the kernels."""
        steps, clients = self.steps, len(self.weights)
        outer, inner = steps.channels[1], steps.channels[0]
        turned = self.weights.view(clients, outer, steps.kernel**2, inner).transpose(1, 2).reshape(clients, -1, inner)
        seen = windows(slope, steps.kernel, steps.kernel**2 * outer, turned=True)
        return torch.bmm(seen.view(clients, -1, seen.shape[1]), turned).view(self.grid)

    def write(self, slope: torch.Tensor, write: Writer) -> None:
        write.product("conv2.weight", slope.view(len(self.weights), -1, slope.shape[-1]), self.seen)


def _round(number: int, step: int) -> int:
    return -(-number // step) * step
