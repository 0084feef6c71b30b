"""Hand-derived steps of the convolutional network for stacked clients: windows gathered, then batched products.

Every client has its own kernels, so a convolution over the stack is one batched product of gathered windows
[clients, positions, window] with kernels [clients, window, channels]. Numbers stand channels last throughout, and
kernels and the first dense layer are kept in that order for the whole round. Pooling comes before bias and ReLU,
which is the same function (both are monotone) on a quarter of the numbers.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from steelyard.clients.local.architectures import Views, Writer, dense, dense_back
from steelyard.clients.local.gradients import OutputGradient
from steelyard.learning.models import ConvNet
from steelyard.learning.parameters import Layout, Slot

aten = torch.ops.aten


class ConvOrder:
    """The order of numbers in which the steps keep a ConvNet: channels last in kernels and in the first dense layer."""

    def __init__(self, module: ConvNet, layout: Layout) -> None:
        self.layout = layout
        self.image = module.image
        self.kernel = module.conv1.kernel_size[0]
        self.channels = (module.conv1.out_channels, module.conv2.out_channels)
        height, width = module.image[1:]
        self.pooled = (height // 4, width // 4)
        self.slots = {slot.name: slot for slot in layout.slots}

    def _grid(self, slot: Slot) -> tuple[int, int, int, int] | None:
        """The slot's shape as (rows, channels, height, width), where it has channels to move."""
        if slot.name in ("conv1.weight", "conv2.weight"):
            return slot.shape[0], slot.shape[1], slot.shape[2], slot.shape[3]
        if slot.name == "dense1.weight":
            return slot.shape[0], self.channels[1], *self.pooled
        return None

    def native(self, flat: torch.Tensor) -> torch.Tensor:
        """Return stacked models with channels last."""
        return self._moved(flat, (0, 1, 3, 4, 2), last=False)

    def restore(self, native: torch.Tensor) -> torch.Tensor:
        """Return stacked models in the module's order."""
        return self._moved(native, (0, 1, 4, 2, 3), last=True)

    def _moved(self, flat: torch.Tensor, axes: tuple[int, ...], *, last: bool) -> torch.Tensor:
        moved = torch.empty_like(flat)
        for slot in self.layout.slots:
            source = flat.narrow(1, slot.offset, slot.size)
            target = moved.narrow(1, slot.offset, slot.size)
            grid = self._grid(slot)
            if grid is None:
                target.copy_(source)
                continue
            rows, channels, height, width = grid
            shape = (rows, height, width, channels) if last else grid
            turned = source.view(-1, *shape).permute(axes)
            target.view(turned.shape).copy_(turned)
        return moved

    def views(self, native: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return named tensors; kernels as matrices [..., channels out, window]."""
        lead = native.shape[:-1]
        named: dict[str, torch.Tensor] = {}
        for slot in self.layout.slots:
            shape = (slot.shape[0], -1) if len(slot.shape) > 1 else slot.shape
            named[slot.name] = native.narrow(-1, slot.offset, slot.size).view(*lead, *shape)
        return named

    def kernels(self, native: torch.Tensor, name: str) -> torch.Tensor:
        """Return one model's kernels as [out, in, height, width] with channels last in memory."""
        slot = self.slots[name]
        rows, channels, height, width = slot.shape
        return native.narrow(0, slot.offset, slot.size).view(rows, height, width, channels).permute(0, 3, 1, 2)


class ConvSteps(ConvOrder):
    """Steps of a ConvNet for stacked clients; use it on a GPU, where many small convolutions leave it idle."""

    def __init__(self, module: ConvNet, layout: Layout, *, half: bool) -> None:
        super().__init__(module, layout)
        self.dtype = torch.bfloat16 if half else torch.float32

    def sample_floats(self) -> int:
        depth, height, width = self.image
        window, area = self.kernel**2, height * width
        first = area * (window * depth + 4 * self.channels[0])
        second = area // 4 * (window * (self.channels[0] + self.channels[1]) + 6 * self.channels[1])
        dense = sum(3 * slot.shape[0] for slot in self.layout.slots if slot.name.startswith("dense"))
        return first + second + dense + 2 * self.channels[1] * self.pooled[0] * self.pooled[1]

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
        clients, samples = labels.shape
        depth, height, width = self.image
        images = features.reshape(clients * samples, depth, height, width).permute(0, 2, 3, 1).to(self.dtype)
        windows1 = self._windows(images, clients)
        raw1, below1, where1 = self._convolve(windows1, parameters, "conv1", images.shape[:3])
        windows2 = self._windows(below1, clients)
        raw2, below2, where2 = self._convolve(windows2, parameters, "conv2", below1.shape[:3])
        flat = below2.reshape(clients, samples, -1).float()
        hidden = dense(flat, "dense1", parameters, None).relu_()
        slope, each = gradient(dense(hidden, "dense2", parameters, None), labels, weights)

        below = dense_back(slope, "dense2", parameters, None)
        write.product("dense2.weight", slope, hidden)
        write.sum("dense2.bias", slope)
        slope = aten.threshold_backward(below, hidden, 0)
        below = dense_back(slope, "dense1", parameters, None)
        write.product("dense1.weight", slope, flat)
        write.sum("dense1.bias", slope)
        slope = aten.threshold_backward(below, flat, 0).to(self.dtype).view(below2.shape)
        slope = self._unpool(slope, raw2, where2, write, "conv2", clients)
        below = self._spread(slope, parameters["conv2.weight"], clients)
        write.product("conv2.weight", slope.reshape(clients, -1, self.channels[1]), windows2)
        slope = aten.threshold_backward(below, below1, 0)
        slope = self._unpool(slope, raw1, where1, write, "conv1", clients)
        write.product("conv1.weight", slope.reshape(clients, -1, self.channels[0]), windows1)
        return each

    def _windows(self, images: torch.Tensor, clients: int) -> torch.Tensor:
        """Gather the k×k windows around every position: [clients, samples · positions, k · k · channels]."""
        count, height, width, depth = images.shape
        edge = self.kernel // 2
        padded = functional.pad(images, (0, 0, edge, edge, edge, edge)).contiguous()
        rows, columns, cells = padded.stride()[:3]
        seen = padded.as_strided(
            (count, height, width, self.kernel, self.kernel * depth), (rows, columns, cells, columns, 1)
        )
        return seen.reshape(clients, -1, self.kernel * self.kernel * depth)

    def _convolve(
        self, windows: torch.Tensor, parameters: Views, name: str, grid: torch.Size
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the convolution before pooling, after pooling, bias and ReLU, and where each maximum was."""
        kernels = parameters[f"{name}.weight"].to(self.dtype)
        raw = torch.bmm(windows, kernels.transpose(1, 2)).view(*grid, -1)
        pooled, where = aten.max_pool2d_with_indices(raw.permute(0, 3, 1, 2), [2, 2])
        pooled = pooled.permute(0, 2, 3, 1).contiguous()
        rows = pooled.view(len(kernels), -1, pooled.shape[-1])
        rows.add_(parameters[f"{name}.bias"][:, None, :].to(self.dtype)).relu_()
        return raw, pooled, where

    def _unpool(
        self, slope: torch.Tensor, raw: torch.Tensor, where: torch.Tensor, write: Writer, name: str, clients: int
    ) -> torch.Tensor:
        """Take the bias' gradient, then send each slope back to where its maximum was."""
        write.sum(f"{name}.bias", slope.reshape(clients, -1, slope.shape[-1]))
        spread = aten.max_pool2d_with_indices_backward(
            slope.permute(0, 3, 1, 2), raw.permute(0, 3, 1, 2), [2, 2], [2, 2], [0, 0], [1, 1], False, where
        )
        return spread.permute(0, 2, 3, 1)

    def _spread(self, slope: torch.Tensor, kernels: torch.Tensor, clients: int) -> torch.Tensor:
        """The gradient at a convolution's inputs: a convolution with the turned kernels."""
        grid = (clients, self.channels[1], self.kernel, self.kernel, self.channels[0])
        turned = kernels.view(grid).flip(2, 3).permute(0, 2, 3, 1, 4).reshape(clients, -1, self.channels[0])
        below = torch.bmm(self._windows(slope, clients), turned.to(self.dtype))
        return below.view(*slope.shape[:3], self.channels[0])
