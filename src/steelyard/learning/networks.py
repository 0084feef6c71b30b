"""Networks that others publish their tables with, by name: for images, for tokens and for tables of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import isqrt, prod

import torch
from torch import nn
from torch.nn import functional

from steelyard.base.errors import UserError

Shape = tuple[int, ...]


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (channels, height, width) for features of this shape; a flat square counts as a grey image."""
    if len(shape) == 1 and isqrt(shape[0]) ** 2 == shape[0]:
        shape = (1, isqrt(shape[0]), isqrt(shape[0]))
    if len(shape) == 2:
        shape = (1, *shape)
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise UserError(f"model.name: a convolutional network needs images of at least 4×4, the data have {shape}")
    return shape[0], shape[1], shape[2]


class Shaped(nn.Module):
    """Layers for images, whatever form the images come in: a grey one may be flat."""

    def __init__(self, image: tuple[int, int, int], *layers: nn.Module) -> None:
        super().__init__()
        self.image, self.layers = image, nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.reshape(-1, *self.image))


def lenet(
    feature_shape: Shape, outputs: int, first: int = 6, second: int = 16, hidden: Sequence[int] = (120, 84)
) -> nn.Module:
    """NIID-Bench's network (Li et al. 2022): convolutions of 6 and 16 kernels of side 5, then 120 and 84 units.

    With 32 and 64 kernels and 512 units it is PFLlib's.
    """
    depth, height, width = image = image_shape(feature_shape)
    if min(height, width) < 16:
        raise UserError(f"model.name: lenet needs images of at least 16×16, the data have {height}×{width}")
    flat = second * prod(((side - 4) // 2 - 4) // 2 for side in (height, width))
    layers = [nn.Conv2d(depth, first, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    for inputs, units in pairwise([flat, *hidden]):
        layers += [nn.Linear(inputs, units), nn.ReLU()]
    return Shaped(image, *layers, nn.Linear([flat, *hidden][-1], outputs))


def moderate_cnn(feature_shape: Shape, outputs: int) -> nn.Module:
    """FedMA's network (Wang et al. 2020): six convolutions in three stages, then 1,024 and 512 units, with dropout."""
    depth, height, width = image = image_shape(feature_shape)
    if min(height, width) < 8:
        raise UserError(f"model.name: moderate-cnn needs images of at least 8×8, the data have {height}×{width}")

    def stage(inputs: int, first: int, second: int) -> list[nn.Module]:
        layers = [nn.Conv2d(inputs, first, 3, padding=1), nn.ReLU(), nn.Conv2d(first, second, 3, padding=1), nn.ReLU()]
        return [*layers, nn.MaxPool2d(2)]

    return Shaped(
        image, *stage(depth, 32, 64), *stage(64, 128, 128), nn.Dropout2d(0.05), *stage(128, 256, 256), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(256 * (height // 8) * (width // 8), 1024), nn.ReLU(), nn.Linear(1024, 512),
        nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, outputs),
    )  # fmt: skip


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with group norm, added to what came in (He et al. 2016; Wu and He 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(groups(outputs), outputs) for _ in range(2))
        alike = stride == 1 and inputs == outputs
        self.across = nn.Identity() if alike else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norms[1](self.second(functional.relu(self.norms[0](self.first(x)))))
        return functional.relu(inner + self.across(x))


def groups(channels: int) -> int:
    """Return how many groups group norm makes of so many channels: 32, or half of few channels."""
    return min(32, channels // 2)


class ResidualNet(nn.Module):
    """A residual network for small images: a 3×3 convolution, stages of blocks, the mean, one dense layer."""

    def __init__(self, image: tuple[int, int, int], outputs: int, widths: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        self.image = image
        self.stem = nn.Conv2d(image[0], widths[0], 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(groups(widths[0]), widths[0])
        layers: list[nn.Module] = []
        inputs = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(ResidualBlock(inputs, width, 2 if stage and not block else 1))
                inputs = width
        self.body, self.dense = nn.Sequential(*layers), nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.stem(x.reshape(-1, *self.image))))
        return self.dense(self.body(x).mean(dim=(2, 3)))


def resnet18(feature_shape: Shape, outputs: int) -> nn.Module:
    """ResNet-18 with group norm in place of batch norm (Hsieh et al. 2020), for small images."""
    return ResidualNet(image_shape(feature_shape), outputs, (64, 128, 256, 512), 2)


class Lstm(nn.Module):
    """Tokens to numbers, one LSTM or several, one dense layer on the last step (LEAF's networks for text)."""

    def __init__(self, outputs: int, tokens: int = 256, wide: int = 8, hidden: int = 64, depth: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, wide)
        self.lstm = nn.LSTM(wide, hidden, depth, batch_first=True)
        self.dense = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.lstm(self.embedding(x))[0][:, -1])


class Attention(nn.Module):
    """Self-attention of several heads, then two dense layers, each added to what came in (Vaswani et al. 2017)."""

    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(2))
        self.inputs, self.output = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, wide = x.shape
        parts = self.inputs(self.norms[0](x)).view(samples, length, 3, self.heads, wide // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.output(found.transpose(1, 2).reshape(samples, length, wide))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Tokens and their places to numbers, blocks of attention, one dense layer on the mean over the places."""

    def __init__(
        self, feature_shape: Shape, outputs: int, tokens: int = 256, wide: int = 64, depth: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, wide)
        self.places = nn.Parameter(0.02 * torch.randn(feature_shape[0], wide))
        self.blocks = nn.ModuleList(Attention(wide, heads) for _ in range(depth))
        self.norm, self.dense = nn.LayerNorm(wide), nn.Linear(wide, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) + self.places[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.dense(self.norm(x).mean(dim=1))


class UNet(nn.Module):
    """A small U-Net: stages of two convolutions, down and up again, each joined by what stood at its size before.

    O. Ronneberger, P. Fischer, T. Brox: "U-Net", MICCAI 2015; here with padding, so that the mask has the image's size,
    group norm in place of none, and nearest pixels on the way up. Outputs are flat, [samples, classes · pixels], class
    after class.
    """

    def __init__(self, feature_shape: Shape, outputs: int, wide: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.image = image_shape(feature_shape)
        if any(side % 2**depth for side in self.image[1:]):
            # Each stage halves the sides, and the way up must meet what stood there before.
            raise UserError(
                f"model.arguments: depth {depth} for images of {self.image[1]}×{self.image[2]}; allowed: sides that "
                f"can be halved {depth} times (data.size), or a smaller depth"
            )
        widths = [wide * 2**stage for stage in range(depth + 1)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([self.image[0], *widths], widths, strict=False))
        self.up = nn.ModuleList(_twice(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.last = nn.Conv2d(wide, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down[0](x.reshape(-1, *self.image))
        before: list[torch.Tensor] = []
        for stage in list(self.down)[1:]:
            before.append(x)
            x = stage(functional.max_pool2d(x, 2))
        for stage in self.up:
            samples, channels, height, width = x.shape
            wider = x[..., None, :, None].expand(samples, channels, height, 2, width, 2)
            x = stage(torch.cat([wider.reshape(samples, channels, 2 * height, 2 * width), before.pop()], dim=1))
        return self.last(x).flatten(1)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for entering in (inputs, outputs):
        layers += [nn.Conv2d(entering, outputs, 3, padding=1), nn.GroupNorm(groups(outputs), outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def tabular(feature_shape: Shape, outputs: int, wide: int = 128, depth: int = 2) -> nn.Module:
    """Dense layers with layer norm and dropout, for columns of numbers."""
    layers: list[nn.Module] = [nn.Flatten()]
    for number in range(depth):
        inputs = wide if number else prod(feature_shape)
        layers += [nn.Linear(inputs, wide), nn.LayerNorm(wide), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(wide, outputs))


NETWORKS: Mapping[str, Callable[..., nn.Module]] = {
    "lenet": lenet,
    "moderate-cnn": moderate_cnn,
    "resnet18": resnet18,
    "lstm": Lstm,
    "transformer": Transformer,
    "tabular": tabular,
    "unet": UNet,
}
"""Networks by name; `model.arguments` gives them what has a default here."""
