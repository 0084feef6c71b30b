"""How Flower's NIID-Bench baseline shared rows out for its table: the three "seeds" share one split, that of seed 42.

Its `main.py` calls `load_datasets` without a seed, so `dataset_seed` of the command line changes nothing and the
default of 42 always holds. Only the first model and the order of the batches differ between its runs. The table was
written on 4 October 2023 (commit d86024f), with NumPy's older generator; since 6 November (38ca0b8) the code draws
from `default_rng(42)`, which gives other clients than those of the table. What is computed here is how many rows of
each label every client had; which rows these are does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SEED = 42
LEAST = 10
"""Rows that each client must have, or the split is drawn again."""
Chance = np.random.Generator | np.random.RandomState


def of_the_table() -> Chance:
    """Return the generator behind the published table."""
    return np.random.RandomState(SEED)


def of_later_code() -> Chance:
    """Return the generator of the code since then."""
    return np.random.default_rng(SEED)


def label_table(sizes: Sequence[int], clients: int, each: int, chance: Chance) -> list[list[int]]:
    """Return the rows by client and label where each client has `each` labels, whose clients share them equally."""
    has = np.zeros((clients, len(sizes)), dtype=np.bool_)
    for client in range(clients):
        has[client, client % len(sizes)] = True
        while has[client].sum() < each:
            older = isinstance(chance, np.random.RandomState)
            has[client, chance.randint(0, len(sizes)) if older else chance.choice(len(sizes), 1)[0]] = True
    counts = np.zeros(has.shape, dtype=np.int64)
    for label, size in enumerate(sizes):
        holders = np.flatnonzero(has[:, label])
        counts[holders, label] = [len(part) for part in np.array_split(np.arange(size), len(holders))]
    return counts.tolist()


def dirichlet_table(sizes: Sequence[int], clients: int, alpha: float, chance: Chance) -> list[list[int]]:
    """Return the rows by client and label where each label is shared out by a draw from Dirichlet(alpha).

    A client that has its equal part of all rows gets none of the labels that follow. Rows are shuffled before each
    draw, which moves the generator on. NVFlare's CIFAR-10 examples do the same.
    """
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


def pairs_table(sizes: Sequence[int], clients: int, chance: np.random.RandomState) -> list[list[int]]:
    """Return the rows by client and label of PFLlib's "pathological" split: labels 0 and 1 for the first clients.

    The next clients have labels 2 and 3, and so on; all but the last of a label's clients draw a tenth to all of their
    equal part, and the last gets what is left.
    """
    holders = 2 * clients // len(sizes)
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    for label, size in enumerate(sizes):
        first = label // 2 * holders
        drawn = chance.randint(size // holders // 10, size // holders, holders - 1)
        counts[first : first + holders, label] = [*drawn, size - drawn.sum()]
    return counts.tolist()
