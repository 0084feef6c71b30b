"""The built-in networks as a table: what each is for and how large it is; reading it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod


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


CONVOLUTIONAL: Mapping[str, Convolutional] = {
    "cnn-mnist": Convolutional((32, 64), 5, 512),
    "cnn-mnist-authors": Convolutional((32, 64), 5, 512, authors=True),
    "cnn-femnist": Convolutional((32, 64), 5, 2048),
    "cnn-celeba": Convolutional((32, 64), 3, 512, outputs=1),
    "cnn-keras": Convolutional((32, 64), 3, 128, keras=True),
    "cnn-adafed": Convolutional((16, 32), 5, 128),
    "cnn-digits": Convolutional((16, 32), 3, 64),
    "cnn": Convolutional((16, 32), 3, 64),
}
DENSE: Mapping[str, tuple[int, ...]] = {"logistic": (), "mlp": (64,), "linear": ()}
"""Hidden units of the networks of dense layers."""
PUBLISHED: Mapping[str, int] = {
    "lenet": 62_006,
    "moderate-cnn": 5_851_338,
    "resnet18": 11_172_170,
    "lstm": 26_192,
    "transformer": 126_800,
    "tabular": 19_970,
    "unet": 29_946,
}
"""Parameters, for a typical sample, of the networks that others publish their tables with (`networks`)."""
NAMES = (*CONVOLUTIONAL, *DENSE, *PUBLISHED)


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
    """One network as `steelyard models` shows it."""

    name: str
    purpose: str
    shape: tuple[int, ...]
    """Shape of a typical sample."""
    outputs: int
    fields: tuple[str, ...]
    """Fields of `[model]` that change it."""

    @property
    def parameters(self) -> int:
        """Number of weights for samples of the typical shape."""
        return count(self.name, self.shape, self.outputs)


def count(name: str, shape: Sequence[int], outputs: int) -> int:
    """Return how many parameters a built-in network has for samples of this shape, with `[model]` as it is."""
    if name in CONVOLUTIONAL:
        return CONVOLUTIONAL[name].parameters(shape, outputs)
    if name in PUBLISHED:
        return PUBLISHED[name]
    return dense(prod(shape), DENSE[name], outputs)


_SIZES = ("hidden", "channels", "kernel", "outputs")
_OWN = ("outputs", "arguments")
BUILT_IN: tuple[BuiltIn, ...] = (
    BuiltIn("cnn-mnist", "images of 28×28: the papers' network for MNIST", (1, 28, 28), 10, _SIZES),
    BuiltIn(
        "cnn-mnist-authors",
        "the same as its authors programmed it: no ReLU after the convolutions, Glorot-normal starts",
        (1, 28, 28),
        10,
        _SIZES,
    ),
    BuiltIn("cnn-femnist", "images of 28×28 in many classes: the papers' network for FEMNIST", (1, 28, 28), 62, _SIZES),
    BuiltIn("cnn-celeba", "faces in two classes, one output: the papers' network for CelebA", (3, 64, 64), 1, _SIZES),
    BuiltIn("cnn-keras", "images of 28×28: Keras' mnist_cnn with dropout, which AdaFed cites", (1, 28, 28), 10, _SIZES),
    BuiltIn("cnn-adafed", "images of 28×28: a smaller network, for AdaFed's simulations", (1, 28, 28), 10, _SIZES),
    BuiltIn("cnn-digits", "small images, such as scikit-learn's digits", (1, 8, 8), 10, _SIZES),
    BuiltIn("cnn", "images of any size from 4×4: two convolutions, a good first choice", (3, 32, 32), 10, _SIZES),
    BuiltIn("mlp", "tables and small images: dense layers with ReLU between them", (20,), 2, ("hidden", "outputs")),
    BuiltIn("logistic", "tables with classes: one dense layer, the safe choice for few rows", (20,), 2, ("outputs",)),
    BuiltIn("linear", "tables with a number to predict: linear regression", (20,), 1, ("outputs",)),
    BuiltIn("lenet", "images from 16×16: NIID-Bench's; arguments first, second, hidden", (3, 32, 32), 10, _OWN),
    BuiltIn("moderate-cnn", "images from 8×8: six convolutions with dropout, as in FedMA", (3, 32, 32), 10, _OWN),
    BuiltIn("resnet18", "images: ResNet-18 with group norm", (3, 32, 32), 10, _OWN),
    BuiltIn("lstm", "rows of tokens: arguments tokens (256), wide (8), hidden (64), depth (1)", (80,), 80, _OWN),
    BuiltIn("transformer", "rows of tokens: tokens (256), wide (64), depth (2), heads (4)", (80,), 80, _OWN),
    BuiltIn("unet", "masks of images: a small U-Net; arguments wide (8), depth (2)", (1, 64, 64), 2, _OWN),
    BuiltIn("tabular", "tables: dense layers with layer norm and dropout; wide (128), depth (2)", (20,), 2, _OWN),
)
