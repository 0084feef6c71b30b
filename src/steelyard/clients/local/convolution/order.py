"""The order in which the convolutional network's numbers are kept while it trains."""

from __future__ import annotations

from collections.abc import Mapping

import torch

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
