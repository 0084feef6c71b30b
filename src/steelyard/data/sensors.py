"""What bad sensors do to samples: noise, blur, and columns or pixels that hold nothing."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.data.backdoor import brightest
from steelyard.data.dataset import Population
from steelyard.data.flaw_settings import FlawSettings

Values = NDArray[np.float32]
_AT_ONCE = 4096
"""Rows whose numbers are summed in one go; bounds the memory for large data sets."""


class _Range(NamedTuple):
    """How the clients' clean training rows are spread: single numbers for images, one per column for tables."""

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]
    least: float
    most: float


class BadSensors:
    """Spoils features as a bad sensor would; it measures the range of clean training rows once, when first needed."""

    def __init__(self, population: Population) -> None:
        self.population = population
        self.images = population.dataset.features.dim() > 2

    def spoilt(self, features: torch.Tensor, flaw: FlawSettings, chance: np.random.Generator) -> torch.Tensor:
        """Return spoilt features [rows, ...] of the same type; `flaw` is noisy, blurred or missing."""
        if flaw.kind == "noisy":
            return self._noisy(features, flaw.size * self._range.deviation, chance)
        values = features.numpy().astype(np.float32)
        values = blur(values, flaw.size) if flaw.kind == "blurred" else self._missing(values, flaw.size, chance)
        return _as(features.dtype, values)

    def with_noise(self, features: torch.Tensor, variance: float, chance: np.random.Generator) -> torch.Tensor:
        """Return features with Gaussian noise: of this variance where the brightest pixel, or a deviation, is 1."""
        unit = brightest(self.population.dataset.features) if self.images else self._range.deviation
        return self._noisy(features, math.sqrt(variance) * np.asarray(unit), chance)

    @cached_property
    def _range(self) -> _Range:
        """Mean and deviation in float64, by sums of blocks, so that no copy of all samples is made."""
        features = self.population.dataset.features
        rows = np.unique(np.concatenate([client.train for client in self.population.clients]))
        axis = None if self.images else 0
        total, squares, count = np.zeros(()), np.zeros(()), 0
        least, most = math.inf, -math.inf
        for begin in range(0, len(rows), _AT_ONCE):
            block = features[torch.from_numpy(rows[begin : begin + _AT_ONCE])].numpy().astype(np.float64)
            total = total + block.sum(axis=axis)
            squares = squares + np.square(block).sum(axis=axis)
            count += block.size if self.images else len(block)
            least, most = min(least, float(block.min())), max(most, float(block.max()))
        mean = total / count
        deviation = np.sqrt(np.maximum(squares / count - np.square(mean), 0))
        return _Range(mean, deviation, least, most)

    def _noisy(
        self, features: torch.Tensor, deviation: NDArray[np.float64], chance: np.random.Generator
    ) -> torch.Tensor:
        values = features.numpy().astype(np.float32)
        noise = chance.standard_normal(values.shape, dtype=np.float32)
        values = (values + noise * deviation.astype(np.float32)).astype(np.float32)
        if self.images and features.dtype != torch.uint8:
            values = np.clip(values, self._range.least, self._range.most).astype(np.float32)
        return _as(features.dtype, values)

    def _missing(self, values: Values, share: float, chance: np.random.Generator) -> Values:
        # Pixels are missing in all channels; columns of a table are its only axis.
        shape = values.shape[-2:] if self.images else values.shape[1:]
        size = math.prod(shape)
        gone = np.zeros(size, dtype=np.bool_)
        gone[chance.permutation(size)[: max(1, round(share * size))]] = True
        blank = np.float32(0) if self.images else self._range.mean.astype(np.float32)
        return np.where(gone.reshape(shape), blank, values).astype(np.float32)


def _as(kind: torch.dtype, values: Values) -> torch.Tensor:
    """Return values in the type that their source has; bytes stay from 0 to 255."""
    if kind == torch.uint8:
        return torch.from_numpy(np.clip(np.rint(values), 0, 255).astype(np.uint8))
    return torch.from_numpy(values)


def blur(images: Values, sigma: float) -> Values:
    """Return images [..., height, width] blurred by a Gaussian of this sigma in pixels; edge pixels go on beyond it.

    Rows first, then columns; the Gaussian is cut at three sigmas (or the image's size) and sums to 1.
    """
    for axis in (-1, -2):
        reach = min(max(1, math.ceil(3 * sigma)), images.shape[axis])
        weights = np.exp(-0.5 * np.square(np.arange(-reach, reach + 1) / sigma))
        weights = (weights / weights.sum()).astype(np.float32)
        positions = np.arange(images.shape[axis])
        blurred = np.zeros_like(images)
        # One weighted copy after another: the same bits on every machine, whatever number of threads.
        for offset, weight in zip(range(-reach, reach + 1), weights, strict=True):
            blurred += weight * images.take(np.clip(positions + offset, 0, images.shape[axis] - 1), axis=axis)
        images = blurred
    return images
