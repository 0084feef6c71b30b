"""What goes through a stack's activations number by number while Keras' network trains, in torch's operators.

Products are a library's; what lies between them is bound by memory. On a GPU with Triton `kernels.passes` does each of
these in one pass over the memory; here each is a few of torch's operators, which run everywhere.
"""

from __future__ import annotations

from itertools import product
from typing import Protocol

import torch

from steelyard.clients.local.convolution import windows
from steelyard.learning import dropout

aten = torch.ops.aten


class Passes(Protocol):
    """The passes of one step. Images stand channels last: [images, height, width, channels]."""

    def windows(self, images: torch.Tensor, kernel: int, width: int, *, ones: bool = False) -> torch.Tensor:
        """Return the kernel×kernel windows that lie inside the images, [images · positions, width].

        Numbers beyond kernel² · channels are 0; `ones` puts a 1 right after them, so that a bias is one more weight.
        """
        ...

    def pool(self, raw: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return relu(2×2 maximum + bias) and the codes of where each maximum was; `bias` is [clients, channels]."""
        ...

    def unpool(self, slope: torch.Tensor, codes: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Send each slope back to where its maximum was, and nowhere where ReLU cut it off."""
        ...

    def added(self, parts: torch.Tensor, entered: torch.Tensor, kernel: int) -> torch.Tensor:
        """Add the parts of every window where they came from; 0 where ReLU cut off what entered.

        `parts` is [..., kernel² · channels] with a row for each window, `entered` the images that were windowed.
        """
        ...

    def mask(self, chance: torch.Tensor, layer: int, samples: int, units: int, rate: float) -> torch.Tensor:
        """Return the masks of `learning.dropout.mask`."""
        ...

    def product(self, slope: torch.Tensor, seen: torch.Tensor, samples: int) -> torch.Tensor:
        """Return slopeᵀ @ seen of every client; both are [clients, samples · positions, ...]."""
        ...


class TorchPasses:
    """The passes in torch's operators; use it where there are no kernels."""

    def windows(self, images: torch.Tensor, kernel: int, width: int, *, ones: bool = False) -> torch.Tensor:
        return windows.inner_windows(images, kernel, width, ones=ones)

    def pool(self, raw: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return windows.pool(raw, bias)

    def unpool(self, slope: torch.Tensor, codes: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return windows.unpool(slope, codes, height, width)

    def added(self, parts: torch.Tensor, entered: torch.Tensor, kernel: int) -> torch.Tensor:
        count, height, width, channels = entered.shape
        rows, columns = height - kernel + 1, width - kernel + 1
        windowed = parts.view(count, rows, columns, kernel, kernel, channels)
        total = parts.new_zeros(entered.shape)
        for down, along in product(range(kernel), range(kernel)):
            total[:, down : down + rows, along : along + columns] += windowed[:, :, :, down, along]
        return aten.threshold_backward(total, entered, 0)

    def mask(self, chance: torch.Tensor, layer: int, samples: int, units: int, rate: float) -> torch.Tensor:
        return dropout.mask(chance, layer, samples, units, rate)

    def product(self, slope: torch.Tensor, seen: torch.Tensor, samples: int) -> torch.Tensor:
        return torch.bmm(slope.transpose(1, 2), seen)
