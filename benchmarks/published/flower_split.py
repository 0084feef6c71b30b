"""How Flower's NIID-Bench baseline shares rows out: its three "seeds" share one split, that of generator seed 42.

Its `main.py` (commit fdef7af) calls `load_datasets` without a seed, so `dataset_seed` of the command line changes
nothing and the default of 42 always holds. Only the first model and the order of the batches differ between its runs.
What is computed here is how many rows of each label every client has then; which rows these are does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SEED = 42
LEAST = 10
"""Rows that each client must have, or the split is drawn again."""


def label_table(sizes: Sequence[int], clients: int, each: int) -> list[list[int]]:
    """Return the rows by client and label where each client has `each` labels, whose clients share them equally."""
    chance = np.random.default_rng(SEED)
    has = np.zeros((clients, len(sizes)), dtype=np.bool_)
    for client in range(clients):
        has[client, client % len(sizes)] = True
        while has[client].sum() < each:
            has[client, chance.choice(len(sizes), 1)[0]] = True
    counts = np.zeros(has.shape, dtype=np.int64)
    for label, size in enumerate(sizes):
        holders = np.flatnonzero(has[:, label])
        counts[holders, label] = [len(part) for part in np.array_split(np.arange(size), len(holders))]
    return counts.tolist()


def dirichlet_table(
    sizes: Sequence[int], clients: int, alpha: float, chance: np.random.Generator | np.random.RandomState | None = None
) -> list[list[int]]:
    """Return the rows by client and label where each label is shared out by a draw from Dirichlet(alpha).

    A client that has its equal part of all rows gets none of the labels that follow. Rows are shuffled before each
    draw, which moves the generator on. NVFlare's CIFAR-10 examples do the same with NumPy's older generator.
    """
    chance = chance or np.random.default_rng(SEED)
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    while counts.sum(axis=1).min() < LEAST:
        counts[:] = 0
        for label, size in enumerate(sizes):
            chance.shuffle(np.arange(size))
            shares = chance.dirichlet(np.repeat(alpha, clients)) * (counts.sum(axis=1) < sum(sizes) / clients)
            ends: NDArray[np.int64] = (np.cumsum(shares / shares.sum()) * size).astype(np.int64)
            ends[-1] = size
            counts[:, label] = np.diff(ends, prepend=0)
    return counts.tolist()
