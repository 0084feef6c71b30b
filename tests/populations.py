"""Populations of a few rows for tests that compute by hand what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from steelyard.data.dataset import ClientRows, Dataset, Population


def regression_population(seed: int, sizes: Mapping[str, int], **more: Any) -> Population:
    """Return clients with so many random rows of two features and a number each; the first two rows are tests too."""
    draw = np.random.default_rng(seed)
    count = sum(sizes.values())
    x, y = draw.normal(size=(count, 2)).astype(np.float32), draw.normal(size=count).astype(np.float32)
    ends = np.cumsum(list(sizes.values()))
    clients = tuple(
        ClientRows(name, np.arange(end - size, end), np.arange(end - size, end)[:2])
        for (name, size), end in zip(sizes.items(), ends, strict=True)
    )
    dataset = Dataset("toy", torch.from_numpy(x), torch.from_numpy(y), 0)
    return Population(dataset, clients, np.arange(count), **more)
