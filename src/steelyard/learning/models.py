"""The models that clients train: the papers' networks, a few small ones, or the user's own module."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isqrt, prod
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field, PositiveInt
from torch import nn

from steelyard.errors import UserError, listed, nearest
from steelyard.randomness import stream_key
from steelyard.settings import Section
from steelyard.usercode import load_code

Factory = Callable[..., nn.Module]

_given: dict[str, Factory] = {}
"""Factories handed over from Python that no import path names."""


class ConvNet(nn.Module):
    """Two convolutions, each followed by ReLU and 2×2 pooling, then two dense layers (papers 000, 001, 003).

    With 28×28 images, channels (32, 64), kernel 5 and 512 hidden units it is the MNIST network with 1,663,370
    parameters; convolutions keep the size of the image.
    """

    def __init__(
        self, image: tuple[int, int, int], channels: tuple[int, int], kernel: int, hidden: int, outputs: int
    ) -> None:
        super().__init__()
        depth, height, width = image
        self.image = image
        self.conv1 = nn.Conv2d(depth, channels[0], kernel, padding=kernel // 2)
        self.conv2 = nn.Conv2d(channels[0], channels[1], kernel, padding=kernel // 2)
        self.dense1 = nn.Linear(channels[1] * (height // 4) * (width // 4), hidden)
        self.dense2 = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, *self.image)
        x = nn.functional.max_pool2d(nn.functional.relu(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(nn.functional.relu(self.conv2(x)), 2)
        return self.dense2(nn.functional.relu(self.dense1(x.flatten(1))))


class DenseNet(nn.Module):
    """Dense layers with ReLU between them; with no hidden layer it is logistic (or linear) regression."""

    def __init__(self, inputs: int, hidden: Sequence[int], outputs: int) -> None:
        super().__init__()
        sizes = [inputs, *hidden, outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for position, layer in enumerate(self.layers):
            x = layer(x if position == 0 else nn.functional.relu(x))
        return x


_CONVOLUTIONAL: dict[str, tuple[tuple[int, int], int, int, int | None]] = {
    # name: channels, kernel, hidden units, outputs (None: one per class)
    "cnn-mnist": ((32, 64), 5, 512, None),
    "cnn-femnist": ((32, 64), 5, 2048, None),
    "cnn-celeba": ((32, 64), 3, 512, 1),
    "cnn-adafed": ((16, 32), 5, 128, None),
    "cnn-digits": ((16, 32), 3, 64, None),
}
_DENSE = ("logistic", "mlp", "linear")
NAMES = (*_CONVOLUTIONAL, "cnn", *_DENSE)


def _named(value: Any) -> Any:
    return hand_over(value) if callable(value) else value


class ModelSettings(Section):
    """[model]: which network the clients train."""

    name: Annotated[str, BeforeValidator(_named)] = "cnn-mnist"
    """A built-in model (cnn-mnist, cnn-femnist, cnn-celeba, cnn-adafed, cnn-digits, cnn, mlp, logistic, linear) or your
    own torch.nn.Module as "package.module:factory" or "path/to/file.py:factory"; from Python, the factory itself."""
    hidden: tuple[PositiveInt, ...] | None = None
    """Hidden units: one number per dense layer for mlp, one number for the convolutional networks."""
    channels: tuple[PositiveInt, PositiveInt] | None = None
    """Channels of the two convolutions (convolutional networks only)."""
    kernel: PositiveInt | None = None
    """Odd side of the convolution kernels (convolutional networks only)."""
    outputs: PositiveInt | None = None
    """Number of outputs; by default one per class, one for regression, one logit for cnn-celeba."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for your own factory."""


def hand_over(factory: Callable[..., Any]) -> str:
    """Return a name under which a factory given from Python can be found again; use it to name a model in settings."""
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", repr(factory))
    if module and module != "__main__" and "<" not in name:
        path = f"{module}:{name}"
        if _attribute(sys.modules.get(module), name) is factory:
            return path
    path = f"python:{name}"
    _given[path] = factory
    return path


def build(settings: ModelSettings | Factory, feature_shape: Sequence[int], classes: int, seed: int) -> nn.Module:
    """Build a model whose first parameters are a pure function of the seed; the global generator is left alone.

    Use it wherever a fresh network is needed; server and clients of one seed get the same one.
    """
    if not isinstance(settings, ModelSettings):
        settings = ModelSettings(name=settings)  # pyright: ignore[reportArgumentType]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_key(seed, purpose="model"))
        module = _construct(settings, tuple(feature_shape), classes)
    return module.to(torch.float32)


def _construct(settings: ModelSettings, shape: tuple[int, ...], classes: int) -> nn.Module:
    name = settings.name
    outputs = settings.outputs or max(classes, 1)
    if name in _CONVOLUTIONAL or name == "cnn":
        channels, kernel, hidden, fixed = _CONVOLUTIONAL.get(name, ((16, 32), 3, 64, None))
        kernel = settings.kernel or kernel
        if kernel % 2 == 0:
            raise UserError(f"model.kernel: got {kernel}; allowed: an odd number")
        if settings.hidden is not None and len(settings.hidden) != 1:
            raise UserError(f"model.hidden: got {list(settings.hidden)}; allowed: one number for {name}")
        return ConvNet(
            image_shape(shape),
            settings.channels or channels,
            kernel,
            settings.hidden[0] if settings.hidden else hidden,
            settings.outputs or fixed or outputs,
        )
    if name in _DENSE:
        hidden_sizes = (settings.hidden or (64,)) if name == "mlp" else ()
        return DenseNet(prod(shape), hidden_sizes, outputs)
    return _own(settings, shape, classes, outputs)


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (channels, height, width) for features of this shape; a flat square counts as a grey image."""
    if len(shape) == 1 and isqrt(shape[0]) ** 2 == shape[0]:
        shape = (1, isqrt(shape[0]), isqrt(shape[0]))
    if len(shape) == 2:
        shape = (1, *shape)
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise UserError(f"model.name: a convolutional network needs images of at least 4×4, the data have {shape}")
    return shape[0], shape[1], shape[2]


def _own(settings: ModelSettings, shape: tuple[int, ...], classes: int, outputs: int) -> nn.Module:
    factory = find(settings.name, "model.name", NAMES)
    known = {"feature_shape": shape, "classes": classes, "outputs": outputs}
    try:
        accepted = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        accepted = {}
    given = {key: value for key, value in known.items() if key in accepted and key not in settings.arguments}
    try:
        module = factory(**given, **settings.arguments)
    except TypeError as error:
        raise UserError(f"model.arguments: {settings.name} cannot be called so: {error}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"model.name: {settings.name} returned {type(module).__name__}; allowed: a torch.nn.Module")
    return module


def find(name: str, field: str, known: Sequence[str]) -> Callable[..., Any]:
    """Return what "module:name", "file.py:name" or a handed-over name stands for; use it for user-written code."""
    if name in _given:
        return _given[name]
    source, colon, attribute = name.rpartition(":")
    if not colon or not source:
        raise UserError(
            f"{field}: got '{name}'{nearest(name, known)}; allowed: {listed(known)}, "
            "'package.module:name' or 'path/to/file.py:name'"
        )
    found = _attribute(load_code(source, field), attribute)
    if not callable(found):
        raise UserError(f"{field}: {source} has no function or class '{attribute}'")
    return found


def _attribute(holder: object, dotted: str) -> Any:
    for part in dotted.split("."):
        holder = getattr(holder, part, None)
    return holder
