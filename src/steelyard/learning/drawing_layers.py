"""torch's layers that draw at random, with draws by name: dropout, and the dropout inside attention, LSTM and GRU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from math import sqrt
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from steelyard.learning.dropout import DropoutLayer, drawing

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
        weights = self.drop(softmax(scores, -1))
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
