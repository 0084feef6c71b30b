"""Steps that policies take over weights: Adam, softmax, and the nearest point of the simplex."""

from __future__ import annotations

import numpy as np

from steelyard.messages.updates import Floats


class Adam:
    """Adam (Kingma and Ba 2015, Algorithm 1) on a few numbers, as torch.optim.Adam takes its steps."""

    def __init__(self, size: int, betas: tuple[float, float]) -> None:
        self._betas = betas
        self._mean, self._square, self._steps = np.zeros(size), np.zeros(size), 0

    def step(self, values: Floats, slopes: Floats, rate: float) -> Floats:
        """Return the values after one step against the slopes."""
        first, second = self._betas
        self._steps += 1
        self._mean = first * self._mean + (1 - first) * slopes
        self._square = second * self._square + (1 - second) * slopes**2
        mean = self._mean / (1 - first**self._steps)
        root = np.sqrt(self._square) / np.sqrt(1 - second**self._steps)
        return values - rate * mean / (root + 1e-8)


def softmax(values: Floats) -> Floats:
    """Return e^x / Σ e^x; the largest is taken off first, which changes nothing and keeps exp within range."""
    grown = np.exp(values - values.max())
    return grown / grown.sum()


def nearest_shares(values: Floats, low: float = 0.0, high: float = 1.0) -> Floats:
    """Return the nearest point, by Euclid, whose coordinates sum to 1 and lie between the bounds: clip(x − τ, l, h).

    Bounds that no point keeps give equal shares. (Wang and Carreira-Perpiñán, arXiv:1309.1541, for bounds 0 and 1.)
    """
    count = len(values)
    if low * count >= 1 or high * count <= 1:
        return np.full(count, 1.0 / count)
    # Σ clip(x − τ, l, h) falls with τ in straight pieces that meet at x − l and x − h.
    edges = np.unique(np.concatenate([values - high, values - low]))
    sums = np.array([np.clip(values - edge, low, high).sum() for edge in edges])
    piece = int(np.clip(np.searchsorted(-sums, -1.0), 1, len(edges) - 1))
    middle = (edges[piece - 1] + edges[piece]) / 2
    free = (values - middle > low) & (values - middle < high)
    found = np.clip(values - middle, low, high)
    if free.any():
        found[free] = values[free] + (1.0 - found[~free].sum() - values[free].sum()) / free.sum()
    return np.clip(found, low, high)
