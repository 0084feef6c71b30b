"""LSTM and GRU cell by cell: `torch.func` cannot map torch's own over clients."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import nn
from torch.nn import functional

from steelyard.clients.local.layers.recurrent_kernel import fits, lstm_steps
from steelyard.learning.dropout import NamedGRU, NamedLSTM

State = tuple[torch.Tensor, ...]


class StackedRecurrent(nn.Module):
    """nn.LSTM or nn.GRU as products and gates, layer by layer and step by step; the parameters keep their names.

    The share of the inputs in all gates of all steps is one product; only that of the last state must wait its turn.
    """

    def __init__(self, layer: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.hidden, self.depth, self.first = layer.hidden_size, layer.num_layers, layer.batch_first
        self.ways = ("", "_reverse") if layer.bidirectional else ("",)
        self.lstm = isinstance(layer, nn.LSTM)
        self.drops = layer.drops if isinstance(layer, NamedLSTM | NamedGRU) else None
        for name, parameter in layer.named_parameters():
            self.register_parameter(name, parameter)

    @staticmethod
    def takes(layer: nn.Module) -> TypeGuard[nn.LSTM | nn.GRU]:
        """Whether this layer can be written so: no projection, nothing between its layers that torch draws."""
        plain = type(layer) in (nn.LSTM, nn.GRU) and not layer.proj_size and not layer.dropout
        return plain or type(layer) in (NamedLSTM, NamedGRU)

    def flatten_parameters(self) -> None:
        """Do nothing: users call this on torch's layers."""

    def forward(self, input: torch.Tensor, hx: torch.Tensor | State | None = None) -> tuple[torch.Tensor, object]:
        if not isinstance(input, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError("packed sequences do not stack")
        x = input if self.first else input.transpose(0, 1)
        given = None if hx is None else hx if isinstance(hx, tuple) else (hx,)
        ends: list[State] = []
        for depth in range(self.depth):
            x = self.drops[depth - 1](x) if depth and self.drops is not None else x
            outputs: list[torch.Tensor] = []
            for way in self.ways:
                place = len(ends)
                begin = None if given is None else tuple(part[place] for part in given)
                found, end = self._layer(x.flip(1) if way else x, f"_l{depth}{way}", begin)
                outputs.append(found.flip(1) if way else found)
                ends.append(end)
            x = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
        last = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
        return x if self.first else x.transpose(0, 1), last if self.lstm else last[0]

    def _layer(self, x: torch.Tensor, suffix: str, state: State | None) -> tuple[torch.Tensor, State]:
        inner, outer = getattr(self, f"weight_hh{suffix}"), getattr(self, f"weight_ih{suffix}")
        inner_bias, bias = getattr(self, f"bias_hh{suffix}", None), getattr(self, f"bias_ih{suffix}", None)
        if self.lstm and bias is not None:
            bias, inner_bias = bias + inner_bias, None  # a GRU's reset gate comes between the two
        gates = functional.linear(x, outer, bias)
        if self.lstm and state is None and fits(x, self.hidden):
            outputs, cell = lstm_steps(gates, inner)
            return outputs, (outputs[:, -1], cell)
        state = state or (x.new_zeros((len(x), self.hidden), dtype=torch.float32),) * (1 + self.lstm)
        found: list[torch.Tensor] = []
        for step in range(x.shape[1]):
            own = functional.linear(state[0], inner, inner_bias)
            state = _lstm(gates[:, step] + own, state[1]) if self.lstm else _gru(gates[:, step], own, state[0])
            found.append(state[0])
        return torch.stack(found, dim=1), state


def _lstm(gates: torch.Tensor, cell: torch.Tensor) -> State:
    """c' = σ(f)·c + σ(i)·tanh(g); h' = σ(o)·tanh(c')."""
    inside, forget, new, out = gates.float().chunk(4, dim=1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(inside) * torch.tanh(new)
    return torch.sigmoid(out) * torch.tanh(cell), cell


def _gru(gates: torch.Tensor, own: torch.Tensor, hidden: torch.Tensor) -> State:
    """r = σ, z = σ, n = tanh(x_n + r·h_n); h' = (1 − z)·n + z·h."""
    (x_reset, x_keep, x_new), (h_reset, h_keep, h_new) = gates.float().chunk(3, dim=1), own.float().chunk(3, dim=1)
    keep = torch.sigmoid(x_keep + h_keep)
    new = torch.tanh(x_new + torch.sigmoid(x_reset + h_reset) * h_new)
    return ((1 - keep) * new + keep * hidden,)
