"""Dropout whose masks are drawn by name: a pure function of the client's stream, the step, the layer and the sample.

torch's own dropout draws from one generator in the order in which layers happen to run, so clients of a stack would get
other masks than the same clients one by one. Here word i of a stream is SplitMix64's, as in `randomness.words`, and
each word gives the fate of four units.
"""

from __future__ import annotations

import torch
from torch import nn

LANES = 4
"""Units that one word decides on: sixteen bits each."""
SAMPLE_BITS, WORD_BITS = 16, 20
LAYERS = 4
"""Where a word stands in its stream: ((step · LAYERS + layer) · 2^16 + sample) · 2^20 + word."""
GOLDEN, MIX_1, MIX_2 = (
    word - (1 << 64) if word >= 1 << 63 else word
    for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""SplitMix64's constants as signed numbers: torch's integers wrap around as the unsigned ones do."""


def mask(chance: torch.Tensor, layer: int, samples: int, units: int, rate: float) -> torch.Tensor:
    """Return what dropout multiplies by: 0 with probability `rate`, else 1 / (1 − rate); [..., samples, units].

    `chance` is [..., 2]: the key of a client's stream and the number of its step. Rates are taken to 1/65,536.
    """
    device = chance.device
    key, step = chance[..., 0, None, None], chance[..., 1, None, None]
    sample = torch.arange(samples, device=device)[:, None]
    word = torch.arange(-(-units // LANES), device=device)
    position = (((step * LAYERS + layer) << SAMPLE_BITS) + sample << WORD_BITS) + word
    lanes = _words(key, position).view(torch.int16)[..., :units]
    return (lanes >= threshold(rate)).to(torch.float32).mul_(1 / (1 - rate))


def threshold(rate: float) -> int:
    """Return the least of a unit's sixteen bits, as a signed number, with which it is kept."""
    return round(rate * 65_536) - 32_768


def _words(key: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Word `position` of each key's stream, element by element: `randomness.words_at` on the device."""
    z = (position + 1).mul_(GOLDEN).add_(key)
    z.bitwise_xor_(_shifted(z, 30)).mul_(MIX_1)
    z.bitwise_xor_(_shifted(z, 27)).mul_(MIX_2)
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """A shift to the right that fills with zeros; torch's own fills with the sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


class NamedDropout(nn.Module):
    """A network with dropout by name: what trains it sets `chance` before every step (`set_chance`).

    Use it as the base of a network that calls `dropped`; while it is tested, nothing is dropped.
    """

    chance: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("chance", torch.zeros(2, dtype=torch.int64), persistent=False)

    def set_chance(self, key: int, step: int) -> None:
        """Name the stream (63 bits of `randomness.stream_key`) and the step that masks are drawn for."""
        self.chance = torch.tensor([key, step], dtype=torch.int64, device=self.chance.device)

    def dropped(self, x: torch.Tensor, layer: int, rate: float) -> torch.Tensor:
        """Return x [samples, units] with units dropped while training."""
        return x * mask(self.chance, layer, len(x), x.shape[1], rate) if self.training else x
