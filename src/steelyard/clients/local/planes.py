"""The first convolution of a network together with its pooling, as four plain products; no window is gathered.

A pooled number looks at a patch of (k+1)×(k+1) pixels. Plane (u, v) holds pixel (u, v) of every patch, so the number at
corner (a, b) of a 2×2 pool needs planes a … a+k−1 × b … b+k−1. Give the kernel one more column of zeros, and those
planes stand in memory as one slab without a gap: planes are laid out once a batch, and each of the four corners is a
product of its slab with the kernels. Pooling then is the maximum over four matrices.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from steelyard.clients.local.pooled import largest, send_back


class FirstConvolution:
    """relu(max-pool(convolution) + bias) of images, and the gradient at its kernels; use it where images come first."""

    def __init__(self, image: tuple[int, int, int], kernel: int, channels: int) -> None:
        self.depth, height, width = image
        self.kernel, self.channels = kernel, channels
        self.pooled = (height // 2, width // 2)
        self.starts = tuple(((a * (kernel + 1)) + b) * self.depth for a in (0, 1) for b in (0, 1))
        self.taps = kernel * (kernel + 1) * self.depth
        # Half the padded image, counted in pools: the patch of the last one ends (k−1)/2 pools beyond it.
        self.halves = (self.pooled[0] + kernel // 2, self.pooled[1] + kernel // 2)

    def split(self, images: torch.Tensor) -> torch.Tensor:
        """Return images [n, depth, height, width] padded and split by odd and even rows and columns; once a client."""
        edge, (rows, columns) = self.kernel // 2, self.halves
        height, width = images.shape[2:]
        padding = (edge, 2 * columns - width - edge, edge, 2 * rows - height - edge)
        padded = functional.pad(images, padding)  # an odd last row that no pool looks at is cut off: negative padding
        return padded.view(-1, self.depth, rows, 2, columns, 2).permute(0, 1, 3, 5, 2, 4).contiguous()

    def planes(self, split: torch.Tensor) -> torch.Tensor:
        """Return the planes of split images, [(k+1)² · depth + room for the last slab, n · pools]."""
        side, (down, across) = self.kernel + 1, self.pooled
        image, channel, odd_row, odd_column, row, column = split.stride()
        seen = split.as_strided(
            (side // 2, 2, side // 2, 2, self.depth, len(split), down, across),
            (row, odd_row, column, odd_column, channel, image, row, column),
        )
        planes = split.new_empty(((side * side + 1) * self.depth, len(split) * down * across))
        planes[: side * side * self.depth].view(seen.shape).copy_(seen)
        planes[side * side * self.depth :].zero_()
        return planes

    def forward(
        self, planes: torch.Tensor, kernels: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return relu(maximum + bias) [n · pools, channels], the four corners, and their maximum.

        `kernels` are [channels, k · k · depth], channels of the image last.
        """
        wide = kernels.new_zeros((self.channels, self.kernel, self.kernel + 1, self.depth))
        wide[:, :, : self.kernel] = kernels.view(self.channels, self.kernel, self.kernel, self.depth)
        turned = wide.view(self.channels, -1).t()
        corners = planes.new_empty((4, planes.shape[1], self.channels))
        for corner, start in enumerate(self.starts):
            torch.mm(planes[start : start + self.taps].t(), turned, out=corners[corner])
        top = largest(corners.unbind())
        return (top + bias).relu_(), corners, top

    def backward(
        self, slope: torch.Tensor, planes: torch.Tensor, corners: torch.Tensor, top: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient at the kernels from the slope at the pooled numbers (ReLU's part done); eats corners."""
        send_back(slope, corners.unbind(), top)
        total = planes.new_empty((self.taps, self.channels))
        for corner, start in enumerate(self.starts):
            total.addmm_(planes[start : start + self.taps], corners[corner], beta=min(corner, 1))
        kept = total.view(self.kernel, self.kernel + 1, self.depth, self.channels)[:, : self.kernel]
        return kept.permute(3, 0, 1, 2).reshape(self.channels, -1)
