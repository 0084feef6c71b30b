"""A convolution with the 2×2 pooling behind it, forward and back, for one client at a time on the CPU.

Two ways to the same numbers: the library's convolution, and (in `winograd`) one with fewer multiplications. Images
stand channels last; bias and ReLU come after the pooling, where a quarter of the numbers is left, and are the caller's.
"""

from __future__ import annotations

from math import prod
from typing import Protocol

import torch
from torch.nn import functional

aten = torch.ops.aten
Corners = tuple[torch.Tensor, ...]
"""The four numbers of each 2×2 pool: upper left, upper right, lower left, lower right."""


class PooledConvolution(Protocol):
    """A convolution and its pooling; `forward` first, then `backward` of the same batch.

    What `backward` returns may lie in memory that the next `forward` uses again.
    """

    def forward(self, images: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """Return the pooled convolution [n, h/2, w/2, out] of images [n, h, w, in] with kernels [out, k · k · in]."""
        ...

    def backward(self, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients at the images and at the kernels from the slope at what `forward` returned."""
        ...


class LibraryConvolution:
    """The library's convolution; use it for large batches, and in half precision, where matrix units do the work."""

    def __init__(self, kernel: int, dtype: torch.dtype = torch.float32) -> None:
        self.kernel, self.dtype = kernel, dtype

    def forward(self, images: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        self.images = images.permute(0, 3, 1, 2).to(self.dtype)  # channels last in memory all the same
        grid = kernels.view(len(kernels), self.kernel, self.kernel, -1)
        self.kernels = grid.permute(0, 3, 1, 2).to(self.dtype)
        raw = functional.conv2d(self.images, self.kernels, padding=self.kernel // 2)
        self.raw = raw.permute(0, 2, 3, 1)
        self.top = largest(corners_of(self.raw))
        return self.top.float().contiguous()  # the library may answer a single image channels first

    def backward(self, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raw, top = self.raw, self.top
        corners = corners_of(raw)
        for corner in corners:
            corner.eq_(top)
        send_back(slope.to(self.dtype), corners)
        raw[:, 2 * top.shape[1] :].zero_()  # an odd last row or column is in no pool
        raw[:, :, 2 * top.shape[2] :].zero_()
        # Asked for together, the two gradients take longer than one by one.
        at_images, at_kernels = self._gradient(raw, inputs=True), self._gradient(raw, inputs=False)
        turned = at_kernels.permute(0, 2, 3, 1).reshape(len(at_kernels), -1)
        return at_images.permute(0, 2, 3, 1).float(), turned.float()

    def _gradient(self, slope: torch.Tensor, *, inputs: bool) -> torch.Tensor:
        edge = [self.kernel // 2] * 2
        wanted = [inputs, not inputs, False]
        both = aten.convolution_backward(
            slope.permute(0, 3, 1, 2), self.images, self.kernels, None, [1, 1], edge, [1, 1], False, [0, 0], 1, wanted
        )
        return both[0] if inputs else both[1]


def corners_of(images: torch.Tensor) -> Corners:
    """Return the four corners of the 2×2 pools of images [n, height, width, channels], as views."""
    height, width = images.shape[1] // 2 * 2, images.shape[2] // 2 * 2
    whole = images[:, :height, :width]
    return whole[:, ::2, ::2], whole[:, ::2, 1::2], whole[:, 1::2, ::2], whole[:, 1::2, 1::2]


def largest(corners: Corners, top: torch.Tensor | None = None) -> torch.Tensor:
    """Return the largest of four corners, number by number."""
    top = torch.maximum(corners[0], corners[1], out=top)
    torch.maximum(top, corners[2], out=top)
    return torch.maximum(top, corners[3], out=top)


def send_back(slope: torch.Tensor, corners: Corners) -> None:
    """Send each slope back to the first corner that holds a 1 (the largest); corners become slopes.

    In the corners' own memory and in floats throughout: torch's comparisons into bytes, and what is done with those,
    take several times as long, and its own way back through a pool fills fresh memory with zeros first.
    """
    first, second, third, fourth = corners
    left = slope - first.mul_(slope)
    left.sub_(second.mul_(left))
    left.sub_(third.mul_(left))
    fourth.mul_(left)


class Scratch:
    """Scratch memory that every step uses again: the same tensor lies at the same address, still near the core."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._most = 0

    def grown(self, samples: int) -> bool:
        """Say whether a batch is larger than any before; then all views are stale and are to be made anew."""
        if samples <= self._most:
            return False
        self._most = samples
        self._kept.clear()
        return True

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return memory of this name in this shape; what the largest batch took serves the smaller ones too."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < prod(shape):
            kept = self._kept[name] = torch.empty(prod(shape))
        return kept[: prod(shape)].view(shape)
