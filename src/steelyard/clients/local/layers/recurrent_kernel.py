"""All steps of an LSTM layer as one operator that can be mapped over clients, where the kernels fit."""

from __future__ import annotations

from typing import Any

import torch

from steelyard.clients.local.kernels.available import ready

WIDTHS = (16, 32, 64)
"""Hidden units for which a client's weights stay on the chip."""
BLOCK = 16
"""Samples that one program takes."""
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def fits(x: torch.Tensor, hidden: int) -> bool:
    """Whether the kernels can take a layer of this width on this device."""
    return x.device.type == "cuda" and hidden in WIDTHS and ready(x.device)


def _exact(weights: torch.Tensor) -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 or weights.dtype != torch.float32 else "ieee"


def _kernels() -> Any:
    from steelyard.clients.local.kernels import recurrent  # For speed of start, and it imports Triton.

    return recurrent


@torch.library.custom_op("steelyard::lstm", mutates_args=())
def lstm(gates: torch.Tensor, weights: torch.Tensor) -> Three:
    """Return h, c [clients, samples, steps, hidden] and the gates' values, from gates without the share of h."""
    clients, samples, steps, four = gates.shape
    hidden, weights = four // 4, weights.contiguous()
    h, c, actions = _like(gates, weights)
    _kernels().lstm_forward[(clients, -(-samples // BLOCK))](
        gates.contiguous(), weights, h, c, actions, samples, steps, wide=hidden, block=BLOCK, exact=_exact(weights)
    )
    return h, c, actions


@lstm.register_fake
def _like(gates: torch.Tensor, weights: torch.Tensor) -> Three:
    *lead, four = gates.shape
    h, c = (gates.new_empty((*lead, four // 4), dtype=torch.float32) for _ in range(2))
    return h, c, gates.new_empty(gates.shape, dtype=torch.float32)


@torch.library.custom_op("steelyard::lstm_slopes", mutates_args=())
def lstm_slopes(
    slope: torch.Tensor, last: torch.Tensor, weights: torch.Tensor, c: torch.Tensor, actions: torch.Tensor
) -> torch.Tensor:
    """Return the slopes of the gates, from those of every h and of the last c."""
    clients, samples, steps, hidden = c.shape
    out = torch.empty_like(actions)
    weights = weights.contiguous()
    _kernels().lstm_backward[(clients, -(-samples // BLOCK))](
        slope.contiguous(), last.contiguous(), weights, c.contiguous(), actions.contiguous(), out, samples, steps,
        wide=hidden, block=BLOCK, exact=_exact(weights),
    )  # fmt: skip
    return out


@lstm_slopes.register_fake
def _(
    slope: torch.Tensor, last: torch.Tensor, weights: torch.Tensor, c: torch.Tensor, actions: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(actions, memory_format=torch.contiguous_format)


def _stacked(info: Any, in_dims: tuple[int | None, ...], tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the tensors with the clients in front."""
    return [
        tensor.expand(info.batch_size, *tensor.shape) if place is None else tensor.movedim(place, 0)
        for tensor, place in zip(tensors, in_dims, strict=True)
    ]


class _Slopes(torch.autograd.Function):
    """`lstm_slopes` of one client, [samples, steps, ...], which vmap makes that of all."""

    @staticmethod
    def forward(*tensors: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return lstm_slopes(*(tensor[None] for tensor in tensors))[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, int]:
        return lstm_slopes(*_stacked(info, in_dims, tensors)), 0


class _Steps(torch.autograd.Function):
    """`lstm` of one client, which vmap makes that of all."""

    @staticmethod
    def forward(gates: torch.Tensor, weights: torch.Tensor) -> Three:  # pyright: ignore[reportIncompatibleMethodOverride]
        h, c, actions = lstm(gates[None], weights[None])
        return h[0], c[0], actions[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: Three) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(inputs[1], *output)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor, of_cells: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, h, c, actions = ctx.saved_tensors
        # Callers use the last cell alone.
        gates: Any = _Slopes.apply(slope, of_cells[:, -1], weights, c, actions)
        later, earlier = gates[:, 1:].flatten(0, 1), h[:, :-1].flatten(0, 1)
        return gates, (later.to(weights.dtype).t() @ earlier.to(weights.dtype)).to(weights.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: torch.Tensor) -> tuple[Three, tuple[int, int, int]]:
        gates, weights = _stacked(info, in_dims, tensors)
        return lstm(gates, weights), (0, 0, 0)


def lstm_steps(gates: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return h of every step [samples, steps, hidden] and the last c, from gates without the share of h."""
    if torch.is_autocast_enabled(gates.device.type):
        weights = weights.to(torch.get_autocast_dtype(gates.device.type))
    found: Any = _Steps.apply(gates.float(), weights)
    return found[0], found[1][:, -1]
