"""`[model]` and `[training]`, and the networks by name with their sizes; reading this needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator
from pydantic_core import PydanticCustomError

from steelyard.base.marks import Code
from steelyard.base.settings import Section
from steelyard.base.usercode import hand_over, refuse_unknown


@dataclass(frozen=True)
class Convolutional:
    """The sizes of a network of two convolutions and two dense layers, where `[model]` does not say otherwise."""

    channels: tuple[int, int]
    kernel: int
    hidden: int
    outputs: int | None = None
    """None: one for each class."""
    authors: bool = False
    """As the authors of papers 000 and 004 programmed it: nothing between a convolution and its pooling, and
    Glorot-normal starts."""

    keras: bool = False
    """As Keras' example mnist_cnn: convolutions without padding, one pooling, dropout, Glorot-uniform starts."""

    def parameters(self, shape: Sequence[int], outputs: int) -> int:
        """Count the weights for images of this shape (channels, height, width); each pooling halves the sides."""
        depth, height, width = shape
        first, second = self.channels
        window, lost = self.kernel**2, 2 * (self.kernel - 1)
        flat = second * (height // 4) * (width // 4)
        if self.keras:
            flat = second * ((height - lost) // 2) * ((width - lost) // 2)
        return (depth * window + 1) * first + (first * window + 1) * second + dense(flat, (self.hidden,), outputs)


def no_part(algorithm: str, part: str) -> str:
    """Return the line that refuses an algorithm whose clients keep a part that the model does not have."""
    lacks, allowed = {
        "norms": ("a model without batch norm", "one with batch norm"),
        "adapters": ("a model without low-rank adapters", "one with parameters named lora_A and lora_B"),
        "head": ("a model of one layer, which is all head", "two or more"),
    }[part]
    return f"algorithm.name: got '{algorithm}' with {lacks}; allowed: {allowed}"


def dense(inputs: int, hidden: Sequence[int], outputs: int) -> int:
    """Count the weights and biases of dense layers."""
    return sum((a + 1) * b for a, b in pairwise([inputs, *hidden, outputs]))


@dataclass(frozen=True)
class BuiltIn:
    """One network as `steelyard list models` shows it."""

    name: str
    purpose: str
    shape: tuple[int, ...]
    """Shape of a typical sample."""
    outputs: int
    sizes: Convolutional | tuple[int, ...] | int
    """Of two convolutions and two dense layers; hidden units of dense layers; of others the number of weights for
    samples of the typical shape."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of `[model]` that change it."""
        if isinstance(self.sizes, Convolutional):
            return ("hidden", "channels", "kernel", "outputs")
        if isinstance(self.sizes, int):
            return ("outputs", "arguments")
        return ("hidden", "outputs") if self.sizes else ("outputs",)

    @property
    def parameters(self) -> int:
        """Number of weights for samples of the typical shape."""
        if isinstance(self.sizes, Convolutional):
            return self.sizes.parameters(self.shape, self.outputs)
        return self.sizes if isinstance(self.sizes, int) else dense(prod(self.shape), self.sizes, self.outputs)


_AUTHORS = "the same as its authors programmed it: no ReLU after the convolutions, Glorot-normal starts"
_MNIST = Convolutional((32, 64), 5, 512)
_SMALL = Convolutional((16, 32), 3, 64)
BUILT_IN: tuple[BuiltIn, ...] = (
    BuiltIn("cnn-mnist", "images of 28×28: the papers' network for MNIST", (1, 28, 28), 10, _MNIST),
    BuiltIn("cnn-mnist-authors", _AUTHORS, (1, 28, 28), 10, replace(_MNIST, authors=True)),
    BuiltIn(
        "cnn-femnist",
        "images of 28×28 in many classes: the papers' network for FEMNIST",
        (1, 28, 28),
        62,
        Convolutional((32, 64), 5, 2048),
    ),
    BuiltIn(
        "cnn-celeba",
        "faces in two classes, one output: the papers' network for CelebA",
        (3, 64, 64),
        1,
        Convolutional((32, 64), 3, 512, outputs=1),
    ),
    BuiltIn(
        "cnn-keras",
        "images of 28×28: Keras' mnist_cnn with dropout, which AdaFed cites",
        (1, 28, 28),
        10,
        Convolutional((32, 64), 3, 128, keras=True),
    ),
    BuiltIn(
        "cnn-adafed",
        "images of 28×28: a smaller network, for AdaFed's simulations",
        (1, 28, 28),
        10,
        Convolutional((16, 32), 5, 128),
    ),
    BuiltIn("cnn-digits", "small images, such as scikit-learn's digits", (1, 8, 8), 10, _SMALL),
    BuiltIn("cnn", "images of any size from 4×4: two convolutions, a good first choice", (3, 32, 32), 10, _SMALL),
    BuiltIn("mlp", "tables and small images: dense layers with ReLU between them", (20,), 2, (64,)),
    BuiltIn("logistic", "tables with classes: one dense layer, the safe choice for few rows", (20,), 2, ()),
    BuiltIn("linear", "tables with a number to predict: linear regression", (20,), 1, ()),
    # Those that others publish their tables with (`models.NETWORKS`).
    BuiltIn("lenet", "images from 16×16: NIID-Bench's; arguments first, second, hidden", (3, 32, 32), 10, 62_006),
    BuiltIn("moderate-cnn", "images from 8×8: six convolutions with dropout, as in FedMA", (3, 32, 32), 10, 5_851_338),
    BuiltIn("resnet18", "images: ResNet-18 with group norm", (3, 32, 32), 10, 11_172_170),
    BuiltIn("lstm", "rows of tokens: arguments tokens (256), wide (8), hidden (64), depth (1)", (80,), 80, 26_192),
    BuiltIn("transformer", "rows of tokens: tokens (256), wide (64), depth (2), heads (4)", (80,), 80, 126_800),
    BuiltIn("unet", "masks of images: a small U-Net; arguments wide (8), depth (2)", (1, 64, 64), 2, 29_946),
    BuiltIn("tabular", "tables: dense layers with layer norm and dropout; wide (128), depth (2)", (20,), 2, 19_970),
)
NAMES = tuple(model.name for model in BUILT_IN)
CONVOLUTIONAL = {model.name: model.sizes for model in BUILT_IN if isinstance(model.sizes, Convolutional)}
DENSE = {model.name: model.sizes for model in BUILT_IN if isinstance(model.sizes, tuple)}
"""Hidden units of the networks of dense layers."""


# The sections of the experiment.


LOSSES = (
    "auto",
    "cross-entropy",
    "binary-cross-entropy",
    "squared-error",
    "barron",
    "cox",
    "pixel-cross-entropy",
    "dice",
    "label-cross-entropy",
)
"""The losses by name."""

Width = Annotated[int, Field(ge=1, le=1_000_000)]
"""Units of a layer; what all layers together may have is checked when the data are known."""


def _named(value: Any) -> Any:
    return hand_over(value) if callable(value) else value


def _builder(value: Any) -> Any:
    if hasattr(value, "state_dict") and not isinstance(value, type):
        raise PydanticCustomError("plain", "what builds such a network: a class, or a function of (shape, outputs)")
    return _named(value)


class ModelSettings(Section):
    """[model]: which network the clients train.

        >>> ModelSettings(name="mlp", hidden=[64]).hidden
        (64,)

    Raises:
        UserError: a field is unknown or holds what it does not take.
    """

    name: Annotated[str, BeforeValidator(_builder), Code(among_names=True)] = "auto"
    """auto takes one that fits the data: cnn for images, mlp for tables, linear for a table with a number to predict,
    unet for masks.
    Built-in models are cnn-mnist, cnn-mnist-authors, cnn-femnist, cnn-celeba, cnn-keras, cnn-adafed, cnn-digits, cnn,
    mlp, logistic, linear. Your own torch.nn.Module is "path/to/file.py:factory", or "package.module:factory" that an
    installed package declares under the entry point steelyard.models. From Python, give the factory itself."""
    hidden: tuple[Width, ...] | None = None
    """Hidden units: one number per dense layer for mlp, one number for the convolutional networks."""
    channels: tuple[Width, Width] | None = None
    """Channels of the two convolutions (convolutional networks only)."""
    kernel: Annotated[int, Field(ge=1, le=999)] | None = None
    """Odd side of the convolution kernels (convolutional networks only)."""
    outputs: Width | None = None
    """Number of outputs; by default one per class, one for regression, one logit for cnn-celeba."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for your own factory."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        refuse_unknown(self.name, "name", ("auto", *NAMES))
        return self


class ScheduleSettings(Section):
    """[training.schedule]: how the clients' learning rate changes from round to round."""

    kind: Literal["step", "cosine"]
    """step: multiplied by `factor` every `every` rounds; cosine: falls along half a cosine wave, from all of it in the
    first round towards `lowest` of it after the last."""
    every: Annotated[int, Field(ge=1)] = 10
    """step: the number of rounds between two changes."""
    factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """step: what the rate is multiplied by at each change."""
    lowest: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """cosine: the share of the rate that it falls towards."""

    def share(self, round: int, rounds: int) -> float:
        """Return what the learning rate is multiplied by in a round, counted from 1, of so many."""
        if self.kind == "step":
            return self.factor ** ((round - 1) // self.every)
        done = (round - 1) / max(rounds, 1)
        return self.lowest + (1 - self.lowest) * (1 + math.cos(math.pi * done)) / 2


class TrainingSettings(Section):
    """[training]: how each client trains on its own data.

        >>> TrainingSettings(learning_rate=0.05, epochs=5).epochs
        5

    Raises:
        UserError: a field is unknown or holds what it does not take.
    """

    optimiser: Literal["sgd", "adam", "adadelta"] = "sgd"
    """How a client steps: sgd; adam; adadelta. What adam and adadelta remember (with the constants of Keras) begins
    afresh on every client in every round: nothing but the model travels."""
    learning_rate: PositiveFloat = 0.1
    """Step size of local training; 0.001 is usual with adam and 1 with adadelta."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """sgd: heavy-ball momentum, started afresh in every round."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty: this times the parameters is added to each gradient."""
    epochs: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Passes over the local data in one round (E)."""
    updates: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Steps that every client takes in one round, whatever its size, in place of `epochs`; it begins its data anew as
    often as it must."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["full"] = 10
    """Samples in one step (B), or "full" for all of the client's samples at once."""
    schedule: ScheduleSettings | None = None
    """How the learning rate changes from round to round; default: it stays the same."""
    loss: Annotated[str, BeforeValidator(_named), Code(among_names=True)] = "auto"
    """auto, cross-entropy, binary-cross-entropy, squared-error, barron, cox, or your own per-sample loss as
    "path/to/file.py:function", or "package.module:function" that an installed package declares under the entry point
    steelyard.losses, called with (outputs, labels); from Python, the function itself."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        refuse_unknown(self.loss, "loss", LOSSES)
        if self.updates is not None and self.epochs != 1:
            raise ValueError(f"updates: got {self.updates} with epochs = {self.epochs}; allowed: one of the two")
        if self.momentum and self.optimiser != "sgd":
            raise ValueError(f"momentum: got {self.momentum} with optimiser '{self.optimiser}'; allowed with: sgd")
        return self


def batches(samples: int, training: TrainingSettings) -> tuple[float, int]:
    """Return of a client with so many samples how likely each is in a Poisson batch, and how many steps a round has."""
    batch = samples if training.batch_size == "full" else min(training.batch_size, samples)
    return batch / samples, training.updates or training.epochs * -(-samples // batch)
