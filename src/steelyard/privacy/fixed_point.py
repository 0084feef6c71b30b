"""Numbers that a cohort can add exactly: fixed-point numbers in a ring, and points of a grid for CKKS."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError

Words = NDArray[np.unsignedinteger[Any]]
"""Numbers modulo 2^bits; arrays of them add and subtract with the wrap-around that a ring has."""
FEWEST_PLACES = 8
"""With fewer binary places than these an update of ordinary size is mostly rounding."""
MODULUS_BITS = 60
"""Bits of the modulus in which sums must fit."""
_HEADROOM = 2
_NOISE_BITS = 26
"""The step of the grid is this many bits above the scale's unit; noise of a thousand clients has about 18."""


@dataclass(frozen=True)
class FixedPoint:
    """How a cohort writes its weighted updates: x as round(x · 2^places), modulo 2^bits.

    Make it with `of`; both sides compute the same one from what both know.
    """

    bits: int
    places: int
    bound: float
    clients: int

    @classmethod
    def of(cls, bits: int, bound: float, clients: int) -> FixedPoint:
        """Return the most precise encoding in which no sum overflows; refuses one that is left with no precision.

        Each of n clients sends |w·Δ| ≤ bound, since weights are at most 1, rounded to a step of 2^-places. Their sum
        is at most n·(bound·2^places + 1), and that must stay below 2^(bits-1), where negative numbers begin.
        """
        # In fractions: a float rounds 2^63 - 1 up, and then the largest sum is one too many.
        largest = Fraction(2 ** (bits - 1) - 1, clients) - 1
        places = max(1, largest // Fraction(bound)).bit_length() - 1
        if places < FEWEST_PLACES:
            wider = next((f"bits = {more}" for more in (32, 64) if more > bits), "a smaller cohort")
            raise UserError(
                f"privacy.aggregation.bound: got {bound:g} with bits = {bits} and {clients} clients, which leaves "
                f"{places} binary places and needs {FEWEST_PLACES}; allowed: {wider}, or a smaller bound"
            )
        # 52: beyond that a float has no digits to write.
        return cls(bits, min(places, 52), bound, clients)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Unsigned words of this many bits, little-endian."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def step(self) -> float:
        """The difference between neighbouring numbers; a client's rounding error is at most half of it."""
        return 2.0**-self.places

    def encode(self, values: NDArray[np.floating[Any]]) -> Words:
        """Return numbers as words; refuses (ValueError) what is beyond the bound or no number."""
        if not (np.abs(values) <= self.bound).all():  # A comparison with NaN is false.
            raise ValueError(f"values: beyond the bound of {self.bound:g}; allowed: up to it")
        scaled = np.rint(np.asarray(values, dtype=np.float64) * 2.0**self.places)
        return scaled.astype(np.int64).astype(self.dtype)

    def decode(self, words: Words) -> NDArray[np.float64]:
        """Return the numbers, negative ones too, that words of a sum stand for."""
        signed = words.astype(self.dtype).view(f"<i{self.bits // 8}")
        return signed * self.step


@dataclass(frozen=True)
class Grid:
    """Where numbers lie that CKKS adds: fine enough to learn, coarse beside the scheme's noise.

    Multiples of 2^-places, in ciphertexts of scale 2^scale; both sides know it."""

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
