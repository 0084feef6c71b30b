"""The first convolution of a network together with its pooling, as four plain products; no window is gathered.

A pooled number looks at a patch of (k+1)×(k+1) pixels. Plane (u, v) holds pixel (u, v) of every patch, so the number at
corner (a, b) of a 2×2 pool needs planes a … a+k−1 × b … b+k−1. Give the kernel one more column of zeros, and those
planes stand in memory as one slab without a gap: planes are laid out once a batch, and each of the four corners is a
product of its slab with the kernels. Pooling then is the maximum over four matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from steelyard.clients.local.convolution.pooled import Corners, Scratch, largest, send_back


@dataclass(frozen=True, eq=False)
class _Table:
    """Memory and views for batches of one size; made once, since threads wait for each other over every call."""

    patches: torch.Tensor
    slabs: Corners
    turned: Corners
    """The slabs, transposed."""
    whole: torch.Tensor
    """[4, n · pools, channels]: the corners."""
    corners: Corners
    top: torch.Tensor


class FirstConvolution:
    """relu(max-pool(convolution) + bias) of images, and the gradient at its kernels; one for every thread.

    Without `rectified` the ReLU is left out.
    """

    def __init__(self, image: tuple[int, int, int], kernel: int, channels: int, *, rectified: bool = True) -> None:
        self.depth, height, width = image
        self.kernel, self.channels, self.rectified = kernel, channels, rectified
        self.pooled = (height // 2, width // 2)
        self.starts = tuple(((a * (kernel + 1)) + b) * self.depth for a in (0, 1) for b in (0, 1))
        self.taps = kernel * (kernel + 1) * self.depth
        # Half the padded image, counted in pools: the patch of the last one ends (k−1)/2 pools beyond it.
        self.halves = (self.pooled[0] + kernel // 2, self.pooled[1] + kernel // 2)
        wide = torch.zeros((channels, kernel, kernel + 1, self.depth))
        self._kernels, self._wide = wide[:, :, :kernel], wide.view(channels, -1).t()
        self._total = torch.empty((self.taps, channels))
        kept = self._total.view(kernel, kernel + 1, self.depth, channels)[:, :kernel]
        self._kept = kept.permute(3, 0, 1, 2)
        self._scratch = Scratch()
        self._tables: dict[int, _Table] = {}

    def split(self, images: torch.Tensor) -> torch.Tensor:
        """Return images [n, depth, height, width] padded and split by odd and even rows and columns; once a client."""
        edge, (rows, columns) = self.kernel // 2, self.halves
        height, width = images.shape[2:]
        padding = (edge, 2 * columns - width - edge, edge, 2 * rows - height - edge)
        padded = functional.pad(images, padding)  # an odd last row that no pool looks at is cut off: negative padding
        return padded.view(-1, self.depth, rows, 2, columns, 2).permute(0, 1, 3, 5, 2, 4).contiguous()

    def forward(self, split: torch.Tensor, kernels: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return relu(maximum + bias) [n · pools, channels] of split images.

        `kernels` are [channels, k · k · depth], channels of the image last.
        """
        table = self._table = self._tables.get(len(split)) or self._laid(len(split))
        side, (down, across) = self.kernel + 1, self.pooled
        image, channel, odd_row, odd_column, row, column = split.stride()
        seen = split.as_strided(
            (side // 2, 2, side // 2, 2, self.depth, len(split), down, across),
            (row, odd_row, column, odd_column, channel, image, row, column),
            split.storage_offset(),
        )
        table.patches.copy_(seen)
        self._kernels.copy_(kernels.view(self._kernels.shape))
        for slab, corner in zip(table.turned, table.corners, strict=True):
            torch.mm(slab, self._wide, out=corner)
        found = largest(table.corners, table.top) + bias
        return found.relu_() if self.rectified else found

    def backward(self, slope: torch.Tensor) -> torch.Tensor:
        """Return the gradient at the kernels from the slope at the pooled numbers (ReLU's part done)."""
        table = self._table
        table.whole.eq_(table.top)
        send_back(slope, table.corners)
        for number, (slab, corner) in enumerate(zip(table.slabs, table.corners, strict=True)):
            self._total.addmm_(slab, corner, beta=min(number, 1))
        return self._kept.reshape(self.channels, -1)

    def _laid(self, count: int) -> _Table:
        side, (down, across) = self.kernel + 1, self.pooled
        rows, wide = side * side * self.depth, count * down * across
        if self._scratch.grown(count):
            self._tables.clear()
        planes = self._scratch.tensor("planes", rows + self.depth, wide)
        planes[rows:].zero_()  # the last slab reaches one plane beyond, where the kernel is 0
        whole = self._scratch.tensor("corners", 4, wide, self.channels)
        slabs = tuple(planes[start : start + self.taps] for start in self.starts)
        table = _Table(
            patches=planes[:rows].view(side // 2, 2, side // 2, 2, self.depth, count, down, across),
            slabs=slabs,
            turned=tuple(slab.t() for slab in slabs),
            whole=whole,
            corners=whole.unbind(),
            top=self._scratch.tensor("top", wide, self.channels),
        )
        self._tables[count] = table
        return table
