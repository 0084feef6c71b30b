"""Clipping to a length that noise can cover."""

from __future__ import annotations

import numpy as np

from steelyard.messages import Floats

SLACK = 1e-9
"""Updates are clipped to C less this share: norms of millions of numbers round, and the bound must hold."""


def clip_factors(lengths: Floats, clip: float) -> Floats:
    """Return by how much each update is shortened: min(1, C/‖u‖), a little less so that rounding cannot exceed C.

    Nothing shortens an update without a length (NaN, infinite): its factor is 0, and whoever calls leaves it out.
    """
    lengths = np.where(np.isfinite(lengths), lengths, np.inf)
    return np.minimum(1.0, np.divide(clip, lengths, out=np.ones_like(lengths), where=lengths > 0)) * (1.0 - SLACK)
