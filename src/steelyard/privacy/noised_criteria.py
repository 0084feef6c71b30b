"""Criteria that are charged: cut at their bound, and released with noise of some times that bound."""

from __future__ import annotations

import numpy as np

from steelyard.messages import Floats
from steelyard.privacy import lattice
from steelyard.privacy.source import Source, normals


def noised(raw: Floats, bounds: Floats, noise: float, source: Source) -> Floats:
    """Return raw criteria [clients, criteria] as they may be released: cut to 0..bound, with noise, and cut again.

    Each number is a release of its own whose sensitivity is the bound: a client's value may be anything in the range.
    """
    released = np.empty_like(raw)
    for column, bound in enumerate(bounds.tolist()):
        if not np.isfinite(bound):
            released[:, column] = np.nan
            continue
        fine = lattice.step(noise * bound)
        # NaN would go through the noise, and show something of the data by being there.
        whole = np.trunc(np.clip(np.nan_to_num(raw[:, column], nan=0.0), 0.0, bound) / fine)
        drawn = np.rint(normals(source, len(raw)) * (noise * bound / fine))
        released[:, column] = np.clip((whole + drawn) * fine, 0.0, bound)
    return released
