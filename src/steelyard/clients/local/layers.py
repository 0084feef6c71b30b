"""Layers that compute what torch's do, in a form that stacks; a copy of a module that has them in place of torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product as product_of
from math import ceil, prod
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]

from steelyard.clients.local.hardware import ready
from steelyard.learning.dropout import NamedGRU, NamedLSTM
from steelyard.learning.parameters import Layout, for_training, still_layers

Layer = TypeVar("Layer", bound="StackedLayer")


class StackedLayer(nn.Module):
    """What stands in the place of one of torch's layers while clients are trained in stacks; see `stacked`."""

    of_products: ClassVar[bool] = False
    """Whether it only writes the layer as products of matrices, which matrix units want."""
    AXES: ClassVar[tuple[int, ...]] = ()
    """The axes of torch's weights in the order in which they stand here, where that is not torch's own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        """Whether a layer of its kinds can be written so."""
        return True


_STACKED: dict[type[nn.Module], type[StackedLayer]] = {}
"""By the kind of torch's layer, what stands in its place."""


def stacked(*kinds: type[nn.Module]) -> Callable[[type[Layer]], type[Layer]]:
    """Register a class for layers of exactly these kinds: it is made from such a layer, and keeps its parameters."""

    def register(made: type[Layer]) -> type[Layer]:
        _STACKED.update(dict.fromkeys(kinds, made))
        return made

    return register


@stacked(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class MaskedBatchNorm(StackedLayer):
    """nn.BatchNorm over the samples of a batch that are no padding, without a change of its own buffers.

    What trains it gives `valid` [samples], above 0 for a sample that counts, and takes the running mean and variance
    after the step from `fresh`.
    """

    valid: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__(layer)
        self.eps, self.momentum = layer.eps, layer.momentum or 0.0
        self.weight: nn.Parameter | None = layer.weight
        self.bias = layer.bias
        self.register_buffer("running_mean", layer.running_mean)
        self.register_buffer("running_var", layer.running_var)
        self.register_buffer("valid", torch.ones(1), persistent=False)
        self.fresh: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        """Whether this layer keeps running means with a fixed share for the newest batch, as torch does unasked."""
        assert isinstance(layer, _BatchNorm)
        return layer.track_running_stats and layer.momentum is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        kind, x = x.dtype, x.float()
        rest = (1,) * (x.dim() - 2)
        counted = (self.valid > 0).float().view(-1, 1, *rest)
        axes = (0, *range(2, x.dim()))
        count = (counted.sum() * prod(x.shape[2:])).clamp(min=1)
        mean = (x * counted).sum(axes) / count
        centred = x - mean.view(-1, *rest)
        variance = (centred * centred * counted).sum(axes) / count
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.fresh = (
            torch.lerp(self.running_mean, mean.detach(), self.momentum),
            torch.lerp(self.running_var, unbiased.detach(), self.momentum),
        )
        found = centred * torch.rsqrt(variance + self.eps).view(-1, *rest)
        if self.weight is not None:
            found = found * self.weight.view(-1, *rest) + self.bias.view(-1, *rest)
        return found.to(kind)


# LSTM and GRU cell by cell: `torch.func` cannot map torch's own over clients.


State = tuple[torch.Tensor, ...]
WIDTHS = (16, 32, 64)
"""Hidden units of an LSTM for which a client's weights stay on a GPU's chip."""


@stacked(nn.LSTM, nn.GRU, NamedLSTM, NamedGRU)
class StackedRecurrent(StackedLayer):
    """nn.LSTM or nn.GRU as products and gates, layer by layer and step by step; the parameters keep their names.

    The share of the inputs in all gates of all steps is one product; only that of the last state must wait its turn.
    """

    def __init__(self, layer: nn.LSTM | nn.GRU) -> None:
        super().__init__(layer)
        self.hidden, self.depth, self.first = layer.hidden_size, layer.num_layers, layer.batch_first
        self.ways = ("", "_reverse") if layer.bidirectional else ("",)
        self.lstm = isinstance(layer, nn.LSTM)
        self.drops = layer.drops if isinstance(layer, NamedLSTM | NamedGRU) else None
        self.steps = _lstm_steps() if self.lstm and self.hidden in WIDTHS else None
        """Takes all steps of a layer in one kernel, where there is one."""
        for name, parameter in layer.named_parameters():
            self.register_parameter(name, parameter)

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        """Whether this layer can be written so: no projection, nothing between its layers that torch draws."""
        assert isinstance(layer, nn.LSTM | nn.GRU)
        return isinstance(layer, NamedLSTM | NamedGRU) or not (layer.proj_size or layer.dropout)

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
        if self.steps is not None and state is None and x.is_cuda:
            outputs, cell = self.steps(gates, inner)
            return outputs, (outputs[:, -1], cell)
        state = state or (x.new_zeros((len(x), self.hidden), dtype=torch.float32),) * (1 + self.lstm)
        found: list[torch.Tensor] = []
        for step in range(x.shape[1]):
            own = functional.linear(state[0], inner, inner_bias)
            state = _lstm(gates[:, step] + own, state[1]) if self.lstm else _gru(gates[:, step], own, state[0])
            found.append(state[0])
        return torch.stack(found, dim=1), state


def _lstm_steps() -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None:
    if not torch.cuda.is_available() or not ready(torch.device("cuda")):
        return None
    from steelyard.clients.local.kernels import lstm_steps  # For speed of start, and it imports Triton.

    return lstm_steps


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


# Products and convolutions of one client, such that a stack of clients is one product of matrices for each:
# `torch.func` maps torch's own convolution over clients as one of many groups, which leaves the matrix units idle.


Sides = tuple[int, int]


class Product(torch.autograd.Function):
    """x @ wᵀ of x [rows, inputs] and w [outputs, inputs]; both gradients come in the layout of what they belong to."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return (slope @ weight) if ctx.needs_input_grad[0] else None, slope.t() @ x


ALIGNED = 8
"""Matrix units of a GPU take rows of so many numbers; cuBLAS multiplies others many times slower."""


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weightᵀ for x [..., inputs], in the arithmetic of the block around it."""
    if torch.is_autocast_enabled(x.device.type):
        short = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(short), weight.to(short)
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs)
    if x.is_cuda:
        outer, inner = -outputs % ALIGNED, -inputs % ALIGNED
        flat, weight = functional.pad(flat, (0, inner)), functional.pad(weight, (0, inner, 0, outer))
    found: Any = Product.apply(flat, weight)
    return found[:, :outputs].reshape(*x.shape[:-1], outputs)


class Windows(torch.autograd.Function):
    """[images, rows, columns, kernel · kernel · channels] of images [images, height, width, channels].

    Both ways are one pass over memory when compiled: torch's own gradient of overlapping views adds numbers one by one.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: torch.Tensor, kernel: Sides, stride: Sides, dilation: Sides
    ) -> torch.Tensor:
        (high, wide), (down, right), (far, apart) = kernel, stride, dilation
        views = x.unfold(1, far * (high - 1) + 1, down).unfold(2, apart * (wide - 1) + 1, right)
        return views[..., ::far, ::apart].permute(0, 1, 2, 4, 5, 3).flatten(3)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.kernel, ctx.stride, ctx.dilation = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (high, wide), (down, right), (far, apart) = ctx.kernel, ctx.stride, ctx.dilation
        _, height, width, channels = ctx.shape
        rows, columns = slope.shape[1:3]
        parts = slope.view(*slope.shape[:3], high, wide, channels)
        total = slope.new_zeros(ctx.shape)
        if ctx.dilation != (1, 1):
            for i, j in product_of(range(high), range(wide)):
                top, left, part = i * far, j * apart, parts[:, :, :, i, j]
                total[:, top : top + down * rows : down, left : left + right * columns : right] += part
            return total, None, None, None
        # Parts of windows as large as a step from one to the next lie side by side: each is added where it begins.
        for i, j in product_of(range(0, high, down), range(0, wide, right)):
            part = parts[:, :, :, i : i + down, j : j + right]
            part = functional.pad(part, (0, 0, 0, right - part.shape[4], 0, down - part.shape[3]))
            part = part.permute(0, 1, 3, 2, 4, 5).reshape(-1, rows * down, columns * right, channels)
            below, after = height - i - rows * down, width - j - columns * right
            total = total + functional.pad(part, (0, 0, j, after, i, below))
        return total, None, None, None


COLUMNS = 64
"""How wide a product is made on a GPU: its matrix units are idle for most of a narrower one."""


def beside(outputs: int, columns: int) -> int:
    """Return how many outputs of an image's row are taken as one, so that a product has some `COLUMNS`; all alike."""
    most = min(max(1, COLUMNS // outputs), columns)
    return ceil(columns / ceil(columns / most))


def banded(weight: torch.Tensor, count: int) -> torch.Tensor:
    """Return kernels [outputs, high, wide, channels] for so many neighbours in a row at once.

    A window that is `count` − 1 wider holds those of all; row (i, output) is the output's kernel from its column i on,
    with zeros elsewhere: [count · outputs, high · (wide + count − 1) · channels].
    """
    outputs, high, wide, channels = weight.shape
    # A row of zeros behind each copy of a kernel, one column too long, so that cut again each begins a column later.
    copies = functional.pad(weight, (0, 0, 0, count))[:, :, None].expand(-1, -1, count, -1, -1)
    cut = copies.reshape(outputs, high, -1)[..., : count * (wide + count - 1) * channels]
    return cut.view(outputs, high, count, -1).permute(2, 0, 1, 3).reshape(count * outputs, -1)


def convolve(images: torch.Tensor, weight: torch.Tensor, stride: Sides, dilation: Sides, count: int) -> torch.Tensor:
    """Return the convolution [images, rows, columns, outputs], `count` neighbours of a row in one row of the product.

    Images are [images, height, width, channels], weights [outputs, high, wide, channels]. Neighbours share most of
    their windows, so that fewer numbers are written out and the product is less narrow. Where `count` is more than 1,
    stride and dilation are 1.
    """
    outputs, high, wide, _ = weight.shape
    if count == 1:
        windows: Any = Windows.apply(images, (high, wide), stride, dilation)
        return product(windows, weight.flatten(1))
    columns = images.shape[2] - wide + 1
    images = functional.pad(images, (0, 0, 0, -columns % count))
    windows = Windows.apply(images, (high, wide + count - 1), (1, count), (1, 1))
    found = product(windows, banded(weight, count))
    return found.reshape(*found.shape[:2], -1, outputs)[:, :, :columns]


@stacked(nn.Linear)
class StackedLinear(StackedLayer):
    """nn.Linear as a `product`."""

    of_products = True

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        self.weight = layer.weight
        self.bias: nn.Parameter | None = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = product(x, self.weight)
        return found if self.bias is None else found + self.bias.to(found.dtype)


@stacked(nn.Conv2d)
class StackedConvolution(StackedLayer):
    """nn.Conv2d as a `product` over the windows of its images; images and weights stand channels last (`AXES`)."""

    of_products, AXES = True, (0, 2, 3, 1)

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__(layer)
        self.weight = nn.Parameter(layer.weight.detach().permute(self.AXES).contiguous(), layer.weight.requires_grad)
        self.bias = layer.bias
        self.stride: Any = layer.stride
        self.dilation: Any = layer.dilation
        self.padding = _sides(layer)

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        """Whether this is a convolution that can be written so: one group, zeros around the image."""
        assert isinstance(layer, nn.Conv2d)
        return layer.groups == 1 and layer.padding_mode == "zeros"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        images = functional.pad(x.permute(0, 2, 3, 1), (0, 0, *self.padding))
        outputs, _, wide, _ = self.weight.shape
        plain = self.stride == self.dilation == (1, 1)
        count = beside(outputs, images.shape[2] - wide + 1) if plain and x.is_cuda else 1
        found = convolve(images, self.weight, self.stride, self.dilation, count)
        found = found if self.bias is None else found + self.bias.to(found.dtype)
        return found.permute(0, 3, 1, 2)


def _sides(layer: nn.Conv2d) -> tuple[int, int, int, int]:
    """Return the zeros to the left, to the right, above and below an image."""
    if layer.padding == "valid":
        return 0, 0, 0, 0
    if isinstance(layer.padding, str):
        # "same": one more to the right and below, where the kernel is even.
        (high, wide) = (d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
        return wide // 2, wide - wide // 2, high // 2, high - high // 2
    above, left = layer.padding
    return left, left, above, above


def stackable(module: nn.Module, *, products: bool) -> nn.Module:
    """Return a copy in training mode with layers that `torch.func` can map over clients.

    `products` writes dense and convolutional layers as products of matrices too, which matrix units want. Layers of a
    user's own class, or with hooks, stay as they are.
    """
    module = copy.deepcopy(module)
    still = frozenset(map(id, still_layers(module)))
    return for_training(_replaced(module, {}, still, products))


def stacked_layout(layout: Layout, module: nn.Module) -> tuple[Layout, dict[str, tuple[int, ...]]]:
    """Return where the parameters of a stackable module stand, and torch's shapes of the kernels that are turned."""
    layers = dict(module.named_modules())
    turned: dict[str, tuple[int, ...]] = {}
    slots = list(layout.slots)
    for number, slot in enumerate(slots):
        name, _, kind = slot.name.rpartition(".")
        layer = layers[name]
        if kind == "weight" and isinstance(layer, StackedLayer) and layer.AXES:
            turned[slot.name] = slot.shape
            slots[number] = replace(slot, shape=tuple(slot.shape[axis] for axis in layer.AXES))
    return replace(layout, slots=tuple(slots)), turned


def unmasked_norms(module: nn.Module) -> bool:
    """Whether a module normalises over batches in a way that counts the padding of short batches."""
    still = set(map(id, still_layers(module)))
    layers = [layer for layer in module.modules() if id(layer) not in still]
    if any(isinstance(layer, _InstanceNorm) and layer.track_running_stats for layer in layers):
        return True
    return any(_stacked(layer, products=False) is None for layer in layers if isinstance(layer, _BatchNorm))


def has_hooks(module: nn.Module) -> bool:
    """Whether something of the user's runs before or after this layer, forward or backward."""
    return any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks") and "state_dict" not in name)


def _replaced(layer: nn.Module, known: dict[int, nn.Module], still: frozenset[int], products: bool) -> nn.Module:
    # A layer that stands in two places of a network is replaced by one layer, so that it keeps its one set of weights.
    if id(layer) not in known:
        known[id(layer)] = layer
        known[id(layer)] = (None if id(layer) in still else _stacked(layer, products)) or layer
        for name, child in list(layer.named_children()):
            setattr(layer, name, _replaced(child, known, still, products))
    return known[id(layer)]


def _stacked(layer: nn.Module, products: bool) -> nn.Module | None:
    made = _STACKED.get(type(layer))
    if made is None or has_hooks(layer) or "forward" in vars(layer) or (made.of_products and not products):
        return None
    return made(layer) if made.takes(layer) else None
