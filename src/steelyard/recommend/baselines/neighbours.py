"""User-kNN and item-kNN with cosine similarity (thesis §2.2.2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.lists import Scores
from steelyard.recommend.ranking import Floats

_BLOCK = 512
"""Rows whose similarities to all others are held at a time."""


def matrix(train: Interactions) -> Any:
    """Return the training interactions as a sparse matrix of ones, users × items."""
    # For speed of start: much of the package needs no SciPy.
    from scipy import sparse

    ones = np.ones(len(train), dtype=np.float32)
    shape = (len(train.users), len(train.items))
    found = sparse.csr_matrix((ones, (train.user, train.item)), shape=shape)
    found.data[:] = 1.0
    return found


def nearest(taken: Any, count: int) -> Any:
    """Return a sparse matrix whose row i holds the cosines of row i with its `count` nearest other rows.

    Equal cosines go by ascending number; rows that share nothing are no neighbours.
    """
    from scipy import sparse  # For speed of start, as above.

    sizes = np.asarray(taken.sum(axis=1), dtype=np.float64).reshape(-1)
    others = sparse.csr_array(taken, dtype=np.float64).T.tocsr()
    columns: list[Codes] = []
    values: list[Floats] = []
    for begin in range(0, taken.shape[0], _BLOCK):
        shared = sparse.csr_array(taken[begin : begin + _BLOCK], dtype=np.float64) @ others
        shared.sort_indices()
        for row in range(shared.shape[0]):
            entries = slice(shared.indptr[row], shared.indptr[row + 1])
            index = np.asarray(shared.indices[entries], dtype=np.int64)
            # Counts are whole, so equal cosines are equal to the last bit and ties are real.
            cosines = np.asarray(shared.data[entries]) / np.sqrt(sizes[begin + row] * sizes[index])
            cosines[index == begin + row] = -1.0  # nobody is her own neighbour
            best = np.argsort(-cosines, kind="stable")[: min(count, len(index) - 1)]
            columns.append(index[best])
            values.append(cosines[best])
    ends = np.concatenate([[0], np.cumsum([len(each) for each in columns])])
    joined = (np.concatenate([np.zeros(0), *values]), np.concatenate([np.zeros(0, np.int64), *columns]), ends)
    return sparse.csr_array(joined, shape=(taken.shape[0], taken.shape[0]))


def item_knn(train: Interactions, seed: int = 1, neighbours: int = 50) -> Scores:
    """Item-kNN: an item scores by its likeness to those of its own k nearest items that the user took (Eq. 2.3).

    With one kind of feedback, r = 1, the quotient of Eq. 2.3 is 1 for every item: it ranks by the numerator.
    """
    taken = matrix(train)
    alike = nearest(taken.T.tocsr(), neighbours).T.tocsr()

    def scores(users: Codes) -> Floats:
        return np.asarray((taken[users] @ alike).todense(), dtype=np.float64)

    return scores


def user_knn(train: Interactions, seed: int = 1, neighbours: int = 50) -> Scores:
    """User-kNN: an item scores by the likeness of those of the user's k nearest who took it (Eq. 2.2's numerator)."""
    taken = matrix(train)
    alike = nearest(taken, neighbours)

    def scores(users: Codes) -> Floats:
        return np.asarray((alike[users] @ taken).todense(), dtype=np.float64)

    return scores
