"""The order in which the convolutional network's numbers are kept while it trains."""

from __future__ import annotations

import torch

from steelyard.learning.models import ConvNet
from steelyard.learning.parameters import Layout, Slot


class ConvOrder:
    """The order of numbers in which the steps keep a ConvNet: channels last in kernels and in the first dense layer."""

    def __init__(self, module: ConvNet, layout: Layout) -> None:
        self.layout = layout
        self.image = module.image
        self.kernel = module.conv1.kernel_size[0]
        self.channels = (module.conv1.out_channels, module.conv2.out_channels)
        self.rectified = module.rectified
        height, width = module.image[1:]
        self.pooled = (height // 4, width // 4)

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
        return matrix_views(self.layout, native)


def matrix_views(layout: Layout, native: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the named tensors of one model or of stacked ones, whatever has several dimensions as a matrix."""
    lead = native.shape[:-1]
    named: dict[str, torch.Tensor] = {}
    for slot in layout.slots:
        shape = (slot.shape[0], -1) if len(slot.shape) > 1 else slot.shape
        named[slot.name] = native.narrow(-1, slot.offset, slot.size).view(*lead, *shape)
    return named
