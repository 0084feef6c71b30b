"""Dropout whose masks are drawn by name: a pure function of the client's stream, the step, the layer and the sample.

torch's own dropout draws from one generator in the order in which layers happen to run, so clients of a stack would get
other masks than the same clients one by one. Here word i of a stream is SplitMix64's, as in `randomness.words`, and
each word gives the fate of four units.
"""

from __future__ import annotations

from math import prod

import torch
from torch import nn

from steelyard.base.errors import UserError

LANES = 4
"""Units that one word decides on: sixteen bits each."""
SAMPLE_BITS, WORD_BITS = 16, 20
LAYERS = 256
"""Where a word stands in its stream: ((step · LAYERS + layer) · 2^16 + sample) · 2^20 + word."""
GOLDEN, MIX_1, MIX_2 = (
    word - (1 << 64) if word >= 1 << 63 else word
    for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""SplitMix64's constants as signed numbers: torch's integers wrap around as the unsigned ones do."""
ELSEWHERE = 0x5DEECE66D
"""What a key is moved by for layers beyond LAYERS: any odd number that no position comes to."""


def mask(chance: torch.Tensor, layer: int, samples: int, units: int, rate: float) -> torch.Tensor:
    """Return what dropout multiplies by: 0 with probability `rate`, else 1 / (1 − rate); [..., samples, units].

    `chance` is [..., 2]: the key of a client's stream and the number of its step. Rates are taken to 1/65,536.
    """
    device = chance.device
    key, begin = (part[..., None] for part in _place(chance, layer, samples))
    if device.type == "cuda":
        # A unit by itself, which a compiler can put wherever the mask is needed.
        unit = torch.arange(units, device=device)
        lanes = _words(*_onward(key, begin, unit // LANES, units)) << 48 - 16 * (unit % LANES) >> 48
    else:
        words = torch.arange(-(-units // LANES), device=device)
        lanes = _words(*_onward(key, begin, words, units)).view(torch.int16)[..., :units]
    return (lanes >= threshold(rate)).to(torch.float32).mul_(1 / (1 - rate))


def first_words(chance: torch.Tensor, layer: int, samples: int) -> torch.Tensor:
    """Return the first word of each sample's part of a layer's draws, [..., samples]; use it for other draws by name.

    `chance` is [..., 2], as in `mask`.
    """
    return _words(*_place(chance, layer, samples))


def _place(chance: torch.Tensor, layer: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key and the first position of each sample's draws in a layer, [..., samples].

    What has no room in a position, as the 257th layer or the 65,537th sample, moves the key.
    """
    sample = torch.arange(samples, device=chance.device)
    further, layer = divmod(layer, LAYERS)
    key = chance[..., 0, None] + further * ELSEWHERE if further else chance[..., 0, None]
    if samples > 1 << SAMPLE_BITS:
        key, sample = key + (sample >> SAMPLE_BITS) * MIX_2, sample & (1 << SAMPLE_BITS) - 1
    return key, ((chance[..., 1, None] * LAYERS + layer) << SAMPLE_BITS) + sample << WORD_BITS


def _onward(
    key: torch.Tensor, begin: torch.Tensor, words: torch.Tensor, units: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and positions of a sample's words; one with more units than it has room for moves the key."""
    if units > LANES << WORD_BITS:
        return key + (words >> WORD_BITS) * MIX_1, begin + (words & (1 << WORD_BITS) - 1)
    return key, begin + words


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
    """A network or a layer with dropout by name: what trains it sets `chance` before every step (`set_chance`).

    Use it as the base of a network that calls `dropped`; while it is tested, nothing is dropped.
    """

    chance: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("chance", torch.zeros(2, dtype=torch.int64), persistent=False)

    def begin(self) -> None:
        """Begin a new step."""

    def dropped(self, x: torch.Tensor, layer: int, rate: float) -> torch.Tensor:
        """Return x [samples, ...] with single numbers dropped while training; `layer` is another number each time."""
        if not self.training:
            return x
        return x * mask(self.chance, layer, len(x), prod(x.shape[1:]), rate).view_as(x)


class DropoutLayer(NamedDropout):
    """torch's dropout layers with masks by name: single units, or whole channels."""

    def __init__(self, number: int, rate: float, channels: bool) -> None:
        super().__init__()
        self.number, self.rate, self.channels = number, rate, channels
        self.layers = 1
        """How many such layers there are: a further call in a step draws as a layer after the last of them."""
        self._calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.rate:
            return x
        samples, *rest = x.shape
        dropped = rest[:1] if self.channels else rest
        kept = mask(self.chance, self._place(), samples, prod(dropped), self.rate)
        return x * kept.view(samples, *dropped, *(1,) * (len(rest) - len(dropped))).to(x.dtype)

    def begin(self) -> None:
        """Count the calls of a new step."""
        self._calls = 0

    def _place(self) -> int:
        """Which layer's draws this call takes: a network may call one layer in several places."""
        if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
            # On the way back torch.utils.checkpoint calls again what was called before, in another order.
            if self._calls > 1:
                raise UserError(
                    "model.name: a dropout layer that is called several times stands in a part that "
                    "torch.utils.checkpoint computes again; allowed: a layer for each call"
                )
            return self.number
        self._calls += 1
        return self.number + (self._calls - 1) * self.layers


def drawing(module: nn.Module) -> list[NamedDropout]:
    """Return the layers of a module that draw by name."""
    return [layer for layer in module.modules() if isinstance(layer, NamedDropout)]


def set_chance(layers: list[NamedDropout], key: int, step: int) -> None:
    """Name the stream (63 bits of `randomness.stream_key`) and the step that layers' masks are drawn for."""
    if layers:
        chance = torch.tensor([key, step], dtype=torch.int64, device=layers[0].chance.device)
        for layer in layers:
            layer.chance = chance
            layer.begin()
