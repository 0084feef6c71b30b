"""SVD: matrix factorisation of ratings (thesis Eq. 2.4), r̃_ui = μ + b_u + b_i + q_iᵀ p_u.

μ is the mean of all ratings, b_u and b_i how far a user's and an item's own stray from it; the vectors are found by
alternating least squares on what that leaves. It predicts ratings: where all are 1, it has nothing to learn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from steelyard.base.logs import doing
from steelyard.base.randomness import generator
from steelyard.recommend.baselines.neighbours import matrix
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.lists import Scores
from steelyard.recommend.ranking import Floats


def svd(train: Interactions, seed: int = 1, factors: int = 20, decay: float = 0.1, epochs: int = 15) -> Scores:
    """Matrix factorisation of ratings (Eq. 2.4); use it where ratings differ and are to be predicted."""
    ratings = matrix(train, "kept").astype(np.float64)
    mean, of_users, of_items = baseline_predictor(ratings)
    left = ratings.copy()
    user = np.repeat(np.arange(ratings.shape[0]), np.diff(ratings.indptr))
    left.data -= mean + of_users[user] + of_items[ratings.indices]
    by_item = left.T.tocsr()
    items = generator(seed, 0, "", "svd baseline").normal(0.0, 0.1, (ratings.shape[1], factors))
    vectors = np.zeros((ratings.shape[0], factors))
    for epoch in range(1, epochs + 1):
        with doing(f"epoch {epoch} of {epochs}"):
            vectors = solve(left, items, decay)
            items = solve(by_item, vectors, decay)

    def scores(users: Codes) -> Floats:
        return mean + of_users[users][:, None] + of_items + vectors[users] @ items.T

    return scores


def baseline_predictor(ratings: Any) -> tuple[float, Floats, Floats]:
    """Return μ, b_u and b_i: the mean, and how far users and then items stray from it on average."""
    mean = float(ratings.data.mean()) if ratings.nnz else 0.0
    strayed = ratings.copy()
    strayed.data -= mean
    of_users = _row_means(strayed)
    strayed.data -= np.repeat(of_users, np.diff(strayed.indptr))
    return mean, of_users, _row_means(strayed.T.tocsr())


def solve(left: Any, others: Floats, decay: float) -> Floats:
    """Return for each row the vector v that minimises Σ (e - vᵀ q)² + decay · n · |v|² over its n entries."""
    found = np.zeros((left.shape[0], others.shape[1]))
    ridge = decay * np.eye(others.shape[1])
    for row in np.flatnonzero(np.diff(left.indptr)):
        entries = slice(left.indptr[row], left.indptr[row + 1])
        theirs = others[left.indices[entries]]
        found[row] = np.linalg.solve(theirs.T @ theirs + len(theirs) * ridge, theirs.T @ left.data[entries])
    return found


def _row_means(values: Any) -> Floats:
    sums = np.asarray(values.sum(axis=1), dtype=np.float64).reshape(-1)
    return sums / np.maximum(np.diff(values.indptr), 1)
