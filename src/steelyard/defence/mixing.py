"""Nearest-neighbour mixing: every update becomes the mean of its n − f nearest ones, before a robust rule looks at it.

Y. Allouah, S. Farhadkhani, R. Guerraoui, N. Gupta, R. Pinot, J. Stephan: "Fixing by Mixing: A Recipe for Optimal
Byzantine ML under Heterogeneity" (AISTATS 2023). Honest clients with different data then look alike, hostile ones far
away are drawn in or left out.
"""

from __future__ import annotations

import numpy as np

from steelyard.defence.geometry import distances, hostile_count
from steelyard.messages import Floats


def mixing(gram: Floats, share: float) -> Floats:
    """Return the matrix M whose row a averages the n − f updates nearest to u_a, itself included: y = M u."""
    count = len(gram)
    kept = count - hostile_count(count, share)
    away = distances(gram)
    np.fill_diagonal(away, -1.0)  # itself first, also beside others that lie at the same point
    nearest = np.argsort(away, axis=1, kind="stable")[:, :kept]
    mixed = np.zeros((count, count))
    np.put_along_axis(mixed, nearest, 1.0 / max(kept, 1), axis=1)
    return mixed
