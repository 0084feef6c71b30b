"""Calls of the kernels that go through activations number by number: shapes and memory for results."""

from __future__ import annotations

from typing import Any

import torch

from steelyard.clients.local.convolution.windows import DEAD
from steelyard.clients.local.kernels import elementwise as _elementwise
from steelyard.learning import dropout

elementwise: Any = _elementwise  # what Triton makes of a function has no type
BLOCK = 1024
"""Numbers of a row that one program takes."""


def _grid(lines: int, numbers: int) -> tuple[int, int]:
    return lines, -(-numbers // BLOCK)


class KernelPasses:
    """The passes of `convolution.passes` in one pass over the memory each; use it where Triton is ready."""

    def windows(self, images: torch.Tensor, kernel: int, width: int, *, ones: bool = False) -> torch.Tensor:
        images = images.contiguous()
        count, height, columns, channels = images.shape
        lines, across = count * (height - kernel + 1), columns - kernel + 1
        out = images.new_empty((lines * across, width))
        elementwise.windows[_grid(lines, across * width)](
            images, out, height=height, width=columns, channels=channels, kernel=kernel, wide=width, ones=ones,
            block=BLOCK,
        )  # fmt: skip
        return out

    def pool(self, raw: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count, height, width, channels = raw.shape
        pooled = raw.new_empty((count, height // 2, width // 2, channels))
        codes = torch.empty_like(pooled, dtype=torch.uint8)
        elementwise.pool[_grid(count * (height // 2), width // 2 * channels)](
            raw.contiguous(), bias, pooled, codes, count // len(bias), bias.stride(0), height=height, width=width,
            channels=channels, dead=DEAD, block=BLOCK,
        )  # fmt: skip
        return pooled, codes

    def unpool(self, slope: torch.Tensor, codes: torch.Tensor, height: int, width: int) -> torch.Tensor:
        count, channels = len(slope), slope.shape[3]
        out = slope.new_empty((count, height, width, channels))
        elementwise.unpool[_grid(count * height, width * channels)](
            slope.contiguous(), codes, out, height=height, width=width, channels=channels, block=BLOCK
        )
        return out

    def added(self, parts: torch.Tensor, entered: torch.Tensor, kernel: int) -> torch.Tensor:
        count, height, width, channels = entered.shape
        out = torch.empty_like(entered)
        elementwise.added[_grid(count * height, width * channels)](
            parts.contiguous(), entered, out, height=height, width=width, channels=channels, kernel=kernel, block=BLOCK
        )
        return out

    def mask(self, chance: torch.Tensor, layer: int, samples: int, units: int, rate: float) -> torch.Tensor:
        clients, block = len(chance), BLOCK // dropout.LANES
        out = torch.empty((clients, samples, units), device=chance.device)
        elementwise.mask[(clients * samples, -(-units // BLOCK))](
            chance, out, samples, layer, dropout.threshold(rate), 1 / (1 - rate), units=units,
            lanes=dropout.LANES, layers=dropout.LAYERS, sample_bits=dropout.SAMPLE_BITS, word_bits=dropout.WORD_BITS,
            golden=dropout.GOLDEN, mix_1=dropout.MIX_1, mix_2=dropout.MIX_2, block=block,
        )  # fmt: skip
        return out

    def product(self, slope: torch.Tensor, seen: torch.Tensor, samples: int) -> torch.Tensor:
        # The product over all positions of a client keeps few cores busy: one per sample, then their sum.
        each = torch.bmm(
            slope.reshape(len(slope) * samples, -1, slope.shape[2]).transpose(1, 2),
            seen.reshape(len(seen) * samples, -1, seen.shape[2]),
        )
        return each.view(len(slope), samples, *each.shape[1:]).sum(1, dtype=torch.float32)
