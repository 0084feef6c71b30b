"""Multi-Krum: only the clients whose updates lie nearest to those of the others are combined.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer: "Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent" (NeurIPS 2017). With f hostile of n, a score is the mean squared distance to the n − f − 1 nearest, the
number of honest clients beside itself (the paper takes one fewer); the n − f best scores are kept, with their weights.
"""

from __future__ import annotations

import numpy as np

from steelyard.defence.geometry import distances, hostile_count, shares
from steelyard.messages import Floats


def chosen(gram: Floats, hostile: int) -> np.ndarray:
    """Return the positions of the n − f clients with the best scores, ascending; of equal ones the earlier."""
    count = len(gram)
    nearest = np.sort(np.square(distances(gram)), axis=1)[:, 1 : count - hostile]
    scores = nearest.mean(axis=1) if nearest.shape[1] else np.zeros(count)
    return np.sort(np.argsort(scores, kind="stable")[: count - hostile])


def multi_krum(weights: Floats, gram: Floats, share: float) -> Floats:
    """Return the coefficients: the weights of those chosen, brought back to a sum of 1; the others get 0."""
    kept = chosen(gram, hostile_count(len(gram), share))
    found = np.zeros(len(weights))
    found[kept] = shares(weights[kept])
    return found
