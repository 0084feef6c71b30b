"""A cap on any client's weight: what lies above it is shared out among the others, in proportion to their weights."""

from __future__ import annotations

import numpy as np

from steelyard.messages import Floats

ROUNDING = 1e-12


def cap_of(clients: int, max_weight: float | None = None, max_shares: float | None = None) -> float:
    """Return the cap in a cohort of some clients: the smaller of a share of all weight and of so many times 1/n."""
    by_shares = np.inf if max_shares is None else max_shares / max(clients, 1)
    return float(min(1.0, np.inf if max_weight is None else max_weight, by_shares))


def capped(weights: Floats, cap: float) -> Floats:
    """Return weights of which none is above the cap, with the same sum 1; order among clients is kept.

    The surplus goes to those below the cap in proportion to their weights, again and again until none is above (in
    equal parts where they have none). A cap that cannot hold all weight, below 1/n, makes them equal.
    """
    found = np.asarray(weights, dtype=np.float64).copy()
    count = len(found)
    if not count or found.max() <= cap:
        return found
    if cap * count <= 1.0 + ROUNDING:
        return np.full(count, 1.0 / count)
    full = np.zeros(count, dtype=np.bool_)
    while (above := (found > cap) & ~full).any():
        full |= above
        rest, left = ~full, 1.0 - cap * full.sum()
        total = found[rest].sum()
        found[full] = cap
        # Shares first: left / total overflows where all that is left are weights near the smallest numbers.
        found[rest] = found[rest] / total * left if total > 0 else left / rest.sum()
    return np.minimum(found, cap)
