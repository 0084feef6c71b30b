"""Triton kernels for networks of any kind: Adam and Adadelta for a stack of clients, and the steps of an LSTM.

An optimiser goes over the memory once; torch's operators would need ten passes and more. An LSTM's program takes some
samples of one client through all steps, with weights and states on the chip: a step of its own products would wait for
a launch. Gates stand in torch's order: input, forget, new, output.
"""
# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# No postponed annotations: Triton reads those of its kernels.

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from steelyard.learning.descent import ADADELTA_DECAY, ADAM_DECAY, EPSILON, Descent, Step, correction


@triton.jit
def adadelta(parameters, gradients, square, moved, rates, size, decay, small, block: tl.constexpr):
    """A part of one client's step with Adadelta."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    here = tl.program_id(1).to(tl.int64) * size + at
    gradient = tl.load(gradients + here, inside, 0.0)
    squares = tl.load(square + here, inside, 0.0) * decay + (1 - decay) * gradient * gradient
    moves = tl.load(moved + here, inside, 0.0)
    change = gradient * tl.sqrt((moves + small) / (squares + small))
    tl.store(square + here, squares, inside)
    tl.store(moved + here, moves * decay + (1 - decay) * change * change, inside)
    value = tl.load(parameters + here, inside, 0.0)
    tl.store(parameters + here, value - tl.load(rates + tl.program_id(1)) * change, inside)


@triton.jit
def adam(parameters, gradients, mean, square, rates, corrections, size, decay, decay_2, small, block: tl.constexpr):
    """A part of one client's step with Adam."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    here = tl.program_id(1).to(tl.int64) * size + at
    gradient = tl.load(gradients + here, inside, 0.0)
    means = tl.load(mean + here, inside, 0.0) * decay + (1 - decay) * gradient
    squares = tl.load(square + here, inside, 0.0) * decay_2 + (1 - decay_2) * gradient * gradient
    tl.store(mean + here, means, inside)
    tl.store(square + here, squares, inside)
    root = (tl.sqrt(squares / tl.load(corrections + 1)) + small) * tl.load(corrections)
    value = tl.load(parameters + here, inside, 0.0)
    tl.store(parameters + here, value - tl.load(rates + tl.program_id(1)) * (means / root), inside)


BLOCK = 1024
"""Parameters that one program of an optimiser takes."""


@dataclass(frozen=True)
class KernelDescent(Descent):
    """A local optimiser whose steps with memory are one kernel; use it where Triton is ready."""

    @classmethod
    def like(cls, descent: Descent) -> "KernelDescent":
        """Return the same optimiser with its steps in kernels."""
        return cls(**asdict(descent))

    def _move(
        self,
        parameters: torch.Tensor,
        gradients: torch.Tensor,
        memory: Sequence[torch.Tensor],
        step: Step,
        rates: torch.Tensor | None,
    ) -> None:
        if self.optimiser == "sgd" or rates is None:
            super()._move(parameters, gradients, memory, step, rates)
            return
        clients, size = parameters.shape
        grid = (-(-size // BLOCK), clients)
        if self.optimiser == "adadelta":
            adadelta[grid](
                parameters, gradients, *memory, rates.contiguous(), size, ADADELTA_DECAY, EPSILON, block=BLOCK
            )
            return
        both = [torch.as_tensor(correction(decay, step), device=parameters.device).view(1) for decay in ADAM_DECAY]
        adam[grid](
            parameters, gradients, *memory, rates.contiguous(), torch.cat(both).float(), size, *ADAM_DECAY, EPSILON,
            block=BLOCK,
        )  # fmt: skip


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2 / (1 + tl.exp(-2 * x)) - 1


@triton.jit
def lstm_forward(gates, weights, hiddens, cells, actions, samples, steps, wide: tl.constexpr, block: tl.constexpr,
                 exact: tl.constexpr):  # fmt: skip
    """h, c and the gates' values of every step, from gates [clients, samples, steps, 4·wide] without h's share."""
    client = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * block + tl.arange(0, block)
    unit = tl.arange(0, wide)
    inside = (row < samples)[:, None]
    # wᵀ of each gate, [wide in, wide out].
    place = weights + client * 4 * wide * wide + unit[None, :] * wide + unit[:, None]
    w_in = tl.load(place)
    w_forget = tl.load(place + wide * wide)
    w_new = tl.load(place + 2 * wide * wide)
    w_out = tl.load(place + 3 * wide * wide)
    h = tl.zeros([block, wide], tl.float32)
    c = tl.zeros([block, wide], tl.float32)
    first = (client * samples + row)[:, None] * steps
    for step in range(steps):
        at = (first + step) * wide + unit[None, :]
        gate = (first + step) * (4 * wide) + unit[None, :]
        short = h.to(w_in.dtype)
        a_in = tl.dot(short, w_in, input_precision=exact) + tl.load(gates + gate, inside, 0.0)
        a_forget = tl.dot(short, w_forget, input_precision=exact) + tl.load(gates + gate + wide, inside, 0.0)
        a_new = tl.dot(short, w_new, input_precision=exact) + tl.load(gates + gate + 2 * wide, inside, 0.0)
        a_out = tl.dot(short, w_out, input_precision=exact) + tl.load(gates + gate + 3 * wide, inside, 0.0)
        a_in, a_forget, a_new, a_out = _sigmoid(a_in), _sigmoid(a_forget), _tanh(a_new), _sigmoid(a_out)
        c = a_forget * c + a_in * a_new
        h = a_out * _tanh(c)
        tl.store(hiddens + at, h, inside)
        tl.store(cells + at, c, inside)
        tl.store(actions + gate, a_in, inside)
        tl.store(actions + gate + wide, a_forget, inside)
        tl.store(actions + gate + 2 * wide, a_new, inside)
        tl.store(actions + gate + 3 * wide, a_out, inside)


@triton.jit
def lstm_backward(slopes, last_cell, weights, cells, actions, out, samples, steps, wide: tl.constexpr,
                  block: tl.constexpr, exact: tl.constexpr):  # fmt: skip
    """The slopes of all gates, [clients, samples, steps, 4·wide], from those of every h and of the last c."""
    client = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * block + tl.arange(0, block)
    unit = tl.arange(0, wide)
    inside = (row < samples)[:, None]
    # w of each gate, [wide out, wide in].
    place = weights + client * 4 * wide * wide + unit[:, None] * wide + unit[None, :]
    w_in = tl.load(place)
    w_forget = tl.load(place + wide * wide)
    w_new = tl.load(place + 2 * wide * wide)
    w_out = tl.load(place + 3 * wide * wide)
    d_h = tl.zeros([block, wide], tl.float32)
    d_c = tl.load(last_cell + (client * samples + row)[:, None] * wide + unit[None, :], inside, 0.0).to(tl.float32)
    first = (client * samples + row)[:, None] * steps
    for back in range(steps):
        step = steps - 1 - back
        at = (first + step) * wide + unit[None, :]
        gate = (first + step) * (4 * wide) + unit[None, :]
        a_in = tl.load(actions + gate, inside, 0.0)
        a_forget = tl.load(actions + gate + wide, inside, 0.0)
        a_new = tl.load(actions + gate + 2 * wide, inside, 0.0)
        a_out = tl.load(actions + gate + 3 * wide, inside, 0.0)
        before = tl.load(cells + at - wide, inside & (step > 0), 0.0)
        bent = _tanh(tl.load(cells + at, inside, 0.0))
        d_h += tl.load(slopes + at, inside, 0.0)
        d_c += d_h * a_out * (1 - bent * bent)
        d_in = d_c * a_new * a_in * (1 - a_in)
        d_forget = d_c * before * a_forget * (1 - a_forget)
        d_new = d_c * a_in * (1 - a_new * a_new)
        d_out = d_h * bent * a_out * (1 - a_out)
        d_c = d_c * a_forget
        tl.store(out + gate, d_in, inside)
        tl.store(out + gate + wide, d_forget, inside)
        tl.store(out + gate + 2 * wide, d_new, inside)
        tl.store(out + gate + 3 * wide, d_out, inside)
        d_h = tl.dot(d_in.to(w_in.dtype), w_in, input_precision=exact)
        d_h += tl.dot(d_forget.to(w_in.dtype), w_forget, input_precision=exact)
        d_h += tl.dot(d_new.to(w_in.dtype), w_new, input_precision=exact)
        d_h += tl.dot(d_out.to(w_in.dtype), w_out, input_precision=exact)


SAMPLES = 16
"""Samples that one program of the LSTM takes."""
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _exact(weights: torch.Tensor) -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 or weights.dtype != torch.float32 else "ieee"


@torch.library.custom_op("steelyard::lstm", mutates_args=())
def lstm(gates: torch.Tensor, weights: torch.Tensor) -> Three:
    """Return h, c [clients, samples, steps, hidden] and the gates' values, from gates without the share of h."""
    clients, samples, steps, four = gates.shape
    hidden, weights = four // 4, weights.contiguous()
    h, c, actions = _like(gates, weights)
    lstm_forward[(clients, -(-samples // SAMPLES))](
        gates.contiguous(), weights, h, c, actions, samples, steps, wide=hidden, block=SAMPLES, exact=_exact(weights)
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
    lstm_backward[(clients, -(-samples // SAMPLES))](
        slope.contiguous(), last.contiguous(), weights, c.contiguous(), actions.contiguous(), out, samples, steps,
        wide=hidden, block=SAMPLES, exact=_exact(weights),
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
