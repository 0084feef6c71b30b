"""Keeping a part of a data set: some of its rows, or a share of its people."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard import randomness
from steelyard.data.dataset import Dataset, Rows


def share_of_rows(owners: NDArray[np.str_] | None, count: int, share: float, seed: int) -> Rows:
    """Return which of `count` rows to keep, ascending: whole people drawn until the share is reached, else single rows.

    This is what LEAF's sampling fraction does for a split by user: a person's rows stay together.
    """
    wanted = max(1, round(share * count))
    chance = randomness.generator(seed, purpose="data/share")
    if owners is None:
        return np.sort(chance.permutation(count)[:wanted]).astype(np.int64)
    people, index, sizes = np.unique(owners, return_inverse=True, return_counts=True)
    order = chance.permutation(len(people))
    reached = int(np.searchsorted(np.cumsum(sizes[order]), wanted)) + 1
    return np.flatnonzero(np.isin(index.reshape(-1), order[:reached])).astype(np.int64)


def keep_rows(dataset: Dataset, rows: Rows) -> Dataset:
    """Return the data set with only these rows, in this order; the number of classes stays."""
    index = torch.from_numpy(rows)
    return replace(
        dataset,
        features=dataset.features[index],
        labels=dataset.labels[index],
        owners=None if dataset.owners is None else dataset.owners[rows],
        held_out=None if dataset.held_out is None else dataset.held_out[rows],
        marks={name: values[rows] for name, values in dataset.marks.items()},
        raw=None if dataset.raw is None else dataset.raw.of_rows(rows),
    )
