"""The steps of an LSTM for a stack of clients in one kernel: a step of its own products would wait for a launch.

A program takes some samples of one client through all steps; weights and states stay on the chip. Gates stand in
torch's order: input, forget, new, output. `layers.recurrent_kernel` calls these kernels.
"""
# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl


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
