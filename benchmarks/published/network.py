"""The network of FedSCS' authors, as their Flower baseline describes it (adap/flower, pull request 8035)."""

from __future__ import annotations

from itertools import pairwise

from torch import nn


def three_convolutions(feature_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return three 3×3 convolutions of 32, 64 and 128 kernels, each halved by a pool, then 256 units."""
    depth, height, width = feature_shape
    layers: list[nn.Module] = []
    for inputs, kernels in pairwise((depth, 32, 64, 128)):
        layers += [nn.Conv2d(inputs, kernels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(128 * (height // 8) * (width // 8), 256), nn.ReLU(), nn.Linear(256, outputs)
    )
