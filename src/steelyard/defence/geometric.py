"""The geometric median of the updates: the point with the least weighted sum of distances, by Weiszfeld's steps.

    β_a = w_a / max(ν, ‖u_a − z‖)        z ← Σ β_a u_a / Σ β_a        from the clipped mean

K. Pillutla, S. M. Kakade, Z. Harchaoui: "Robust Aggregation for Federated Learning" (IEEE TSP 2022), the smoothed
Weiszfeld algorithm. Half of the weight can be hostile, and a hostile update pulls no harder for being long. The start
is the mean of updates clipped to their median length: not 0, since a free rider's update is 0 and from a point where an
update lies the steps hardly move away; and not the mean, which a huge update takes too far to come back in a few steps.
"""

from __future__ import annotations

import numpy as np

from steelyard.defence.clipping import clipped, radius_of
from steelyard.defence.geometry import distances_to, lengths, shares
from steelyard.messages import Floats


def geometric_median(weights: Floats, gram: Floats, steps: int = 8, least_distance: float = 1e-6) -> Floats:
    """Return the coefficients of the geometric median after some steps."""
    sizes = lengths(gram)
    point = clipped(shares(weights), sizes, radius_of(sizes))
    for _ in range(steps):
        point = shares(weights / np.maximum(distances_to(gram, point), least_distance))
    return point
