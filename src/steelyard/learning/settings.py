"""The settings of learning: `[model]` and `[training]`; reading them needs no torch."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from steelyard.base.settings import Section
from steelyard.base.usercode import hand_over, refuse_unknown
from steelyard.learning.catalogue import NAMES

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


class ModelSettings(Section):
    """[model]: which network the clients train.

        >>> ModelSettings(name="mlp", hidden=[64]).hidden
        (64,)

    Raises:
        UserError: a field is unknown or holds what it does not take.
    """

    name: Annotated[str, BeforeValidator(_named)] = "auto"
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
    loss: Annotated[str, BeforeValidator(_named)] = "auto"
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
