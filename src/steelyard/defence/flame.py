"""FLAME: the largest group of updates that point alike, clipped to the median length, with a little noise.

    kept: the more than half of the clients that join first as the cosine distance 1 − cos(u_a, u_b) grows
    Θ ← Θ + Σ_kept w_a min(1, S/‖u_a‖) u_a / Σ_kept w_a + N(0, (λS)²),   S the median of ‖u_a‖

T. D. Nguyen et al.: "FLAME: Taming Backdoors in Federated Learning" (USENIX Security 2022). The paper groups by HDBSCAN
with clusters of at least n/2 + 1; no two such fit side by side, so that what is left of it is single linkage, cut where
the first component is so large. λ is 0.001 in the paper's image experiments.

That always drops almost half of the clients, honest ones too. With a reach ρ > 1 clients go on joining up to ρ times
the distance at which the group became the majority: whoever is not clearly apart stays.
"""

from __future__ import annotations

import numpy as np

from steelyard.defence.geometry import lengths, shares
from steelyard.messages.updates import Floats


def largest_group(gram: Floats, reach: float = 1.0) -> np.ndarray:
    """Return the positions of the first component of more than half of the clients, ascending; all where it is tied.

    With a reach also those who join it up to that many times the distance at which it became so large.
    """
    count = len(gram)
    sizes = lengths(gram)
    scale = np.outer(sizes, sizes)
    away = 1.0 - np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)
    group = np.arange(count)
    pairs = np.argwhere(np.triu(np.ones((count, count), dtype=np.bool_), 1))
    kept, furthest = np.arange(count), np.inf
    for a, b in pairs[np.argsort(away[pairs[:, 0], pairs[:, 1]], kind="stable")]:
        if away[a, b] > furthest:
            break
        group[group == group[b]] = group[a]
        mine = np.flatnonzero(group == group[a])
        if 2 * len(mine) > count:
            kept = mine
            if reach <= 1:
                break
            furthest = min(furthest, reach * away[a, b])
    return kept


def flame(weights: Floats, gram: Floats, reach: float = 1.0) -> tuple[Floats, float]:
    """Return the coefficients, and the median length S that the noise is a share of."""
    sizes = lengths(gram)
    middle = float(np.median(sizes)) if len(sizes) else 0.0
    kept = largest_group(gram, reach)
    found = np.zeros(len(weights))
    cut = np.minimum(1.0, np.divide(middle, sizes, out=np.ones_like(sizes), where=sizes > 0))
    found[kept] = shares(weights[kept]) * cut[kept]
    return found, middle
