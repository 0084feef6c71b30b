"""The grid on which numbers lie that CKKS is to add exactly: fine enough to learn, coarse beside the scheme's noise."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.errors import UserError
from steelyard.privacy.fixed_point import FEWEST_PLACES

MODULUS_BITS = 60
"""Bits of the modulus in which sums must fit."""
_HEADROOM = 2
_NOISE_BITS = 26
"""The step of the grid is this many bits above the scale's unit; noise of a thousand clients has about 18."""


@dataclass(frozen=True)
class Grid:
    """Where numbers may lie: multiples of 2^-places, in ciphertexts of scale 2^scale; both sides know it."""

    places: int
    scale: int
    bound: float

    @classmethod
    def of(cls, bound: float, clients: int) -> Grid:
        """Return the finest grid for sums of so many clients with |w·Δ| ≤ bound each."""
        scale = MODULUS_BITS - _HEADROOM - ceil(log2(max(1.0, bound * clients)))
        places = scale - _NOISE_BITS
        if places < FEWEST_PLACES:
            raise UserError(
                f"privacy.aggregation.bound: got {bound:g} with kind = 'ckks' and {clients} clients, which leaves "
                f"{max(places, 0)} binary places and needs {FEWEST_PLACES}; allowed: a smaller bound"
            )
        return cls(places, scale, bound)

    def onto(self, values: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Return numbers moved to the nearest point of the grid; those beyond the bound are refused (ValueError)."""
        if not (np.abs(values) <= self.bound).all():  # A comparison with NaN is false.
            raise ValueError(f"values: beyond the bound of {self.bound:g}; allowed: up to it")
        return np.rint(np.asarray(values, dtype=np.float64) * 2.0**self.places) * 2.0**-self.places
