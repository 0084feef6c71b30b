"""Noise on a lattice, so that no trailing bit of a floating-point number tells what the noise was added to.

A sum of a secret float and a noise float lies on a grid whose fineness follows from the secret, and that has been used
to take noise away (I. Mironov: "On Significance of the Least Significant Bits for Differential Privacy", CCS 2012).
Here the secret is first brought to multiples of a step g that is public, and the noise is rounded to multiples of g:

    g · (trunc(x/g) + round(N/g))  =  g · round((g·trunc(x/g) + N)/g)

which is a rounding of the Gaussian (or Laplace) mechanism on a secret that lies on the lattice, so it costs nothing.
Integers below 2⁵³ are exact in float64. The step is 2⁻¹⁶ of the noise's scale or less: coarse against the error of the
noise's own float64 computation (2⁻⁵⁰), fine against the noise.
"""

from __future__ import annotations

import math

FINENESS = 16
"""The step is at most the noise's scale over 2 to this power."""


def step(scale: float) -> float:
    """Return the lattice's step for noise of a scale: a power of two, so that dividing by it is exact."""
    return 2.0 ** (math.floor(math.log2(scale)) - FINENESS)
