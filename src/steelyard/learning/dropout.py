"""Dropout whose masks are drawn by name: a pure function of the client's stream, the step, the layer and the sample.

torch's own dropout draws from one generator in the order in which layers happen to run, so clients of a stack would get
other masks than the same clients one by one. Here word i of a stream is SplitMix64's, as in `randomness.words`, and
each word gives the fate of four units.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from math import prod, sqrt
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

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


# torch's layers that draw at random, with draws by name.


CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class NamedAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention whose dropout of the attention weights is `drop`, the one layer that it has more.

    softmax(q kᵀ / √d + masks), dropped, times v, for every head. In tests it is torch's own, with its fast path.
    """

    drop: DropoutLayer

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.training or (is_causal and attn_mask is None):
            # The second is refused there.
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        single = query.dim() == 2
        q, k, v = self._heads(query, key, value, single)
        scores = q @ k.transpose(-2, -1) / sqrt(self.head_dim)
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.view(-1, 1, 1, key_padding_mask.shape[-1])
        for mask in (attn_mask, key_padding_mask):
            if mask is not None:
                if not mask.is_floating_point():
                    mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
                scores = scores + mask
        # As in torch: where nothing may be looked at, all weights are 0, or nan where they are asked for.
        softmax: Any = torch.softmax if need_weights else torch._safe_softmax  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        # In 32 bits, as torch's own: on a GPU the draws make a gradient of 32 bits, which sixteen do not take.
        weights = self.drop(softmax(scores, -1, dtype=torch.float32 if scores.dtype == torch.bfloat16 else None))
        found = self.out_proj((weights @ v).transpose(1, 2).flatten(2))
        weights = weights.mean(dim=1) if average_attn_weights else weights
        if single:
            found, weights = found[0], weights[0]
        elif not self.batch_first:
            found = found.transpose(0, 1)
        return found, weights if need_weights else None

    def _heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, single: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return q, k and v as [samples, heads, places, width]."""
        if self._qkv_same_embed_dim and query is key and key is value:
            found = functional.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = self.in_proj_weight.chunk(3) if self._qkv_same_embed_dim else weights
            bias: Any = self.in_proj_bias  # torch's types leave out that it may be None
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            found = map(functional.linear, (query, key, value), weights, biases)
        q, k, v = (x[None] if single else x if self.batch_first else x.transpose(0, 1) for x in found)
        return tuple(x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))


class NamedLSTM(nn.LSTM):
    """nn.LSTM whose dropout between its layers is drawn by name."""

    drops: nn.ModuleList

    def forward(self, input: Any, hx: Any = None) -> Any:
        return _by_layers(self, self.drops, input, hx) if _splits(self, input) else super().forward(input, hx)


class NamedGRU(nn.GRU):
    """nn.GRU whose dropout between its layers is drawn by name."""

    drops: nn.ModuleList

    def forward(self, input: Any, hx: Any = None) -> Any:
        return _by_layers(self, self.drops, input, hx) if _splits(self, input) else super().forward(input, hx)


def _splits(layer: nn.Module, x: object) -> bool:
    """Packed sequences and samples without a batch are left to torch: then its dropout is one for all clients."""
    return layer.training and isinstance(x, torch.Tensor) and x.dim() == 3


def _by_layers(layer: nn.LSTM | nn.GRU, drops: nn.ModuleList, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """Run torch's own layers one at a time, with what drops between them."""
    lstm, ways = isinstance(layer, nn.LSTM), 1 + layer.bidirectional
    x = x if layer.batch_first else x.transpose(0, 1)
    if state is None:
        state = (x.new_zeros(layer.num_layers * ways, len(x), layer.hidden_size),) * (1 + lstm)
    run: Any = torch.lstm if lstm else torch.gru
    ends: list[list[torch.Tensor]] = []
    for depth in range(layer.num_layers):
        x = drops[depth - 1](x) if depth else x
        here = slice(depth * ways, (depth + 1) * ways)
        own = [weight for way in layer.all_weights[here] for weight in way]
        begin = tuple(part[here].to(x.dtype) for part in (state if isinstance(state, tuple) else (state,)))
        # cuDNN says that it would rather have the weights of a call in one piece.
        with warnings.catch_warnings(action="ignore") if x.is_cuda else nullcontext():
            x, *end = run(x, begin if lstm else begin[0], own, layer.bias, 1, 0.0, True, layer.bidirectional, True)
        ends.append(end)
    last = tuple(torch.cat(parts) for parts in zip(*ends, strict=True))
    return x if layer.batch_first else x.transpose(0, 1), last if lstm else last[0]


def name_draws(module: nn.Module) -> nn.Module:
    """Replace torch's dropout inside a module by layers that draw by name; returns the module.

    Then the same seed gives the same masks in every engine, after a resume too.
    """
    numbers = count()
    replaced: dict[int, nn.Module] = {}
    places = [(parent, name, child) for parent in module.modules() for name, child in parent.named_children()]
    for parent, name, child in places:
        if isinstance(child, _DropoutNd) and type(child) in (nn.Dropout, *CHANNELS) and child.p < 1:
            made = replaced.get(id(child)) or DropoutLayer(next(numbers), child.p, type(child) in CHANNELS)
            replaced[id(child)] = made.train(child.training)
            setattr(parent, name, made)
    for layer in list(module.modules()):
        _name_inner(layer, numbers)
    total = next(numbers)
    for layer in drawing(module):
        if isinstance(layer, DropoutLayer):
            layer.layers = total
    return module


def _name_inner(layer: nn.Module, numbers: Iterator[int]) -> None:
    """Let a layer with dropout inside draw by name: it stays itself, with whatever the user hung on it."""
    if type(layer) is nn.MultiheadAttention and 0 < layer.dropout < 1:
        if layer.bias_k is not None or layer.add_zero_attn:
            return  # seldom seen, and torch has two ways to mask the place that is added
        layer.__class__ = NamedAttention
        layer.drop = DropoutLayer(next(numbers), layer.dropout, False).train(layer.training)
        return
    kind = {nn.LSTM: NamedLSTM, nn.GRU: NamedGRU}.get(type(layer))  # pyright: ignore[reportArgumentType]
    if kind and isinstance(layer, nn.LSTM | nn.GRU) and 0 < layer.dropout < 1 and not layer.proj_size:
        made = [DropoutLayer(next(numbers), layer.dropout, False) for _ in range(layer.num_layers - 1)]
        layer.drops = nn.ModuleList(made).train(layer.training)
        layer.__class__ = kind  # pyright: ignore[reportAttributeAccessIssue]
