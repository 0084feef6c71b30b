"""The updates of a cohort as a robust rule sees them: their inner products, and sums of them.

Most robust rules only stretch, drop and add updates u_a = Θ_a − Θ, so all they need is the Gram matrix G = ⟨u_a, u_b⟩,
and their result is a vector of coefficients c: the new model is Θ + Σ c_a u_a. That costs one product, whatever
the number of steps a rule takes.
"""

from __future__ import annotations

import numpy as np

from steelyard.messages.updates import Floats


def distances(gram: Floats) -> Floats:
    """Return ‖u_a − u_b‖ of all pairs: [clients, clients]."""
    squares = np.diag(gram)
    return np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2.0 * gram, 0.0))


def lengths(gram: Floats) -> Floats:
    """Return ‖u_a‖ of every client."""
    return np.sqrt(np.maximum(np.diag(gram), 0.0))


def distances_to(gram: Floats, coefficients: Floats) -> Floats:
    """Return ‖u_a − v‖ of every client to the point v = Σ c_b u_b."""
    products = gram @ coefficients
    squares = np.diag(gram) - 2.0 * products + coefficients @ products
    return np.sqrt(np.maximum(squares, 0.0))


def hostile_count(clients: int, share: float) -> int:
    """Return how many of a cohort may be hostile: the share, rounded up, but always fewer than half."""
    return min(int(np.ceil(share * clients - 1e-9)), max(0, (clients - 1) // 2))


def shares(weights: Floats) -> Floats:
    """Return the weights divided by their sum; equal ones where all are 0."""
    total = weights.sum()
    return weights / total if total > 0 else np.full(len(weights), 1.0 / max(len(weights), 1))
