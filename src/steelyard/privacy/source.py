"""Where noise comes from: the operating system's cryptographic source, never a seed; and the lattice that it lies on.

Noise that can be computed again can be taken away again, so no stream of `randomness` may ever be noise, and a run with
differential privacy is not the same to the bit when it is repeated or resumed. Tests hand over a seeded source.

No trailing bit of a floating-point number may show what the noise was added to. A sum of a secret float and a noise
float lies on a grid whose fineness follows from the secret, and that has been used to take noise away (I. Mironov: "On
Significance of the Least Significant Bits for Differential Privacy", CCS 2012). Here the secret is first brought to
multiples of a step g that is public, and the noise is rounded to multiples of g:

    g · (trunc(x/g) + round(N/g))  =  g · round((g·trunc(x/g) + N)/g)

which is a rounding of the Gaussian (or Laplace) mechanism on a secret that lies on the lattice, so it costs nothing.
Integers below 2⁵³ are exact in float64. The step is 2⁻¹⁶ of the noise's scale or less: coarse against the error of the
noise's own float64 computation (2⁻⁵⁰), fine against the noise.
"""

from __future__ import annotations

import math
import os
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]

FINENESS = 16
"""The lattice's step is at most the noise's scale over 2 to this power."""
_FEW = np.uint64(1 << 40)
_PER_WORD = 2.0**-64
"""A word times this is a number below 1."""


def lattice_step(scale: float) -> float:
    """Return the lattice's step for noise of a scale: a power of two, so that dividing by it is exact."""
    return 2.0 ** (math.floor(math.log2(scale)) - FINENESS)


class Source(Protocol):
    """Something that gives random words; whoever draws noise takes one as an argument."""

    def words(self, count: int) -> Words:
        """Return `count` random 64-bit words that were never given before."""
        ...


class SystemSource:
    """The operating system's generator, asked anew for every word: nothing is kept that could give noise away."""

    def words(self, count: int) -> Words:
        return np.frombuffer(os.urandom(8 * count), dtype="<u8").astype(np.uint64)


def uniforms(source: Source, count: int) -> Floats:
    """Return uniform numbers in (0, 1), all 53 bits of the mantissa random however small the number is.

    Numbers that are multiples of 2⁻⁵³ would leave holes in the tails of what is made from them.
    """
    words = source.words(count)
    found = (words.astype(np.float64) + 0.5) * _PER_WORD
    small = np.flatnonzero(words < _FEW)
    if len(small):
        below = (source.words(len(small)).astype(np.float64) + 0.5) * _PER_WORD
        found[small] = (words[small].astype(np.float64) + below) * _PER_WORD
    return np.minimum(found, 1.0 - 2.0**-53)


def normals(source: Source, count: int) -> Floats:
    """Return standard normal numbers (Box and Muller's transform)."""
    pairs = (count + 1) // 2
    radius = np.sqrt(-2.0 * np.log(uniforms(source, pairs)))
    angle = (2.0 * np.pi) * uniforms(source, pairs)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def laplacians(source: Source, count: int) -> Floats:
    """Return Laplace numbers of scale 1: an exponential one with a random sign."""
    signs = np.where(source.words(count) & np.uint64(1), 1.0, -1.0)
    return -np.log(uniforms(source, count)) * signs


def chosen(source: Source, names: list[str], count: int) -> list[str]:
    """Return `count` of the names without repetition, ascending; use it for a secret cohort of a fixed size."""
    # Ties among 64-bit words are as good as impossible, and a stable order breaks them.
    order = np.argsort(source.words(len(names)), kind="stable")[:count]
    return [names[index] for index in sorted(order.tolist())]


def each_with(source: Source, names: list[str], probability: float) -> list[str]:
    """Return each of the names with this probability, by itself (Poisson sampling); the list may be empty."""
    drawn = uniforms(source, len(names))
    return [name for name, value in zip(names, drawn.tolist(), strict=True) if value < probability]
