"""Bucketing: updates are shuffled into buckets of s, and each bucket counts as one update, its mean.

    y_b = Σ_{a in b} w_a u_a / Σ_{a in b} w_a        w_b = Σ_{a in b} w_a

S. P. Karimireddy, L. He, M. Jaggi: "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing" (ICLR 2022).
Buckets differ less from each other than clients do, by √s, so that a robust rule after it drops fewer honest ones; but
a bucket with one hostile client is hostile, so f of n become f of n/s. The paper's weights are equal.
"""

from __future__ import annotations

import numpy as np

from steelyard.messages.updates import Floats


def buckets(weights: Floats, size: int, chance: np.random.Generator) -> tuple[Floats, Floats]:
    """Return M whose rows average the clients of each bucket, y = M u, and the weights of the buckets."""
    count = len(weights)
    order = chance.permutation(count)
    rows = -(-count // size)
    member = np.zeros((rows, count))
    member[np.arange(count) // size, order] = 1.0
    totals = member @ weights
    # Where nobody in a bucket has weight it has none either; its mean is then that of all in it.
    inside = np.where(totals[:, None] > 0, member * weights, member)
    return inside / inside.sum(axis=1, keepdims=True), totals
