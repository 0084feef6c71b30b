"""Adaptive norm clipping: no update counts longer than a radius that follows the cohort.

    Θ ← Θ + Σ w_a · min(1, r/‖u_a‖) · u_a        r = the q-quantile of ‖u_a‖ over the cohort

Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan: "Can You Really Backdoor Federated Learning?" (2019) clips to a fixed
radius; G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy: "Differentially Private Learning with Adaptive Clipping"
(NeurIPS 2021) lets the radius follow a quantile of the lengths. Here the server sees the lengths, so it takes the
quantile itself; it is not weighted, since a client that claims a large weight must not move the radius.
"""

from __future__ import annotations

import numpy as np

from steelyard.messages import Floats


def radius_of(lengths: Floats, quantile: float = 0.5, smooth: float = 0.0, before: float | None = None) -> float:
    """Return this round's radius: r = q^(1−s) · r_before^s, with q the quantile of the lengths."""
    found = float(np.quantile(lengths, quantile)) if len(lengths) else 0.0
    if before is None or not smooth or found <= 0 or before <= 0:
        return found
    return float(found ** (1.0 - smooth) * before**smooth)


def factors(lengths: Floats, radius: float) -> Floats:
    """Return min(1, r/‖u_a‖) of every client; an update of length 0 stays."""
    return np.minimum(1.0, np.divide(radius, lengths, out=np.ones_like(lengths), where=lengths > 0))


def clipped(weights: Floats, lengths: Floats, radius: float) -> Floats:
    """Return the coefficients of the updates: the weights, each times how much of its update is left."""
    return weights * factors(lengths, radius)
