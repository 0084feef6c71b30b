"""Noise: where it comes from, the lattice that it lies on, and the mechanisms.

**The source** is the operating system's cryptographic one, never a seed.
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

**The mechanisms.** Laplace: scale Δ₁/ε (ε-DP; C. Dwork et al. 2006). Gaussian: the least σ with

    δ = Φ(Δ₂/2σ − εσ/Δ₂) − e^ε · Φ(−Δ₂/2σ − εσ/Δ₂)

(B. Balle, Y.-X. Wang: "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018), which holds for every ε;
the classic σ = Δ₂·√(2 ln(1.25/δ))/ε is larger, and proven for ε ≤ 1 only. Exponential: candidate r with
probability ∝ exp(ε·u(r)/2Δ_u) (F. McSherry, K. Talwar 2007). Randomised response: the true one of k values with
probability e^ε/(e^ε + k − 1), else any other (S. L. Warner 1965 for k = 2; P. Kairouz, S. Oh, P. Viswanath 2014). All
draw from a `Source`, noise on a lattice.
"""

from __future__ import annotations

import math
import os
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.messages.updates import Floats
from steelyard.privacy.accounting import check_budget, gaussian_noise

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


# ---- mechanisms


def gaussian(values: Floats, sensitivity: float, epsilon: float, delta: float, source: Source) -> Floats:
    """Return the values with Gaussian noise for (ε, δ); `sensitivity` bounds their L2 change by one client."""
    _check_sensitivity(sensitivity)
    noise = gaussian_noise(epsilon, delta)
    fine = lattice_step(noise * sensitivity / max(1.0, math.sqrt(values.size)))
    # Rounding to the lattice can move two neighbours apart by one step in each coordinate.
    scale = noise * (sensitivity + fine * math.sqrt(values.size))
    return _on_lattice(values, normals(source, values.size) * scale, fine)


def laplace(values: Floats, sensitivity: float, epsilon: float, source: Source) -> Floats:
    """Return the values with Laplace noise for ε; `sensitivity` bounds their L1 change by one client."""
    check_budget(epsilon, 0.5)
    _check_sensitivity(sensitivity)
    fine = lattice_step(sensitivity / epsilon / max(1, values.size))
    scale = (sensitivity + fine * values.size) / epsilon
    return _on_lattice(values, laplacians(source, values.size) * scale, fine)


def exponential(utilities: Floats, sensitivity: float, epsilon: float, source: Source) -> int:
    """Return the index of one candidate, drawn with probability ∝ exp(ε·u/2Δ): likely one of the best.

    `sensitivity` bounds what one client changes of any utility. Use it where the answer is a choice, not a number.
    """
    check_budget(epsilon, 0.5)
    _check_sensitivity(sensitivity)
    if not len(utilities) or not np.isfinite(utilities).all():
        raise UserError(
            "utilities: empty, or not all finite; allowed: a finite number for each of one or more candidates"
        )
    # Differences to the best only: the exponents are at most 0, and none overflows.
    powers = np.exp((utilities - utilities.max()) * (epsilon / (2.0 * sensitivity)))
    reached = np.cumsum(powers / powers.sum())
    return int(min(np.searchsorted(reached, uniforms(source, 1)[0], side="right"), len(utilities) - 1))


def randomised_response(values: NDArray[np.integer], levels: int, epsilon: float, source: Source) -> NDArray[np.int64]:
    """Return whole numbers from 0 to levels − 1 as their owners release them: the true one, or by chance another.

    Use it where each client answers a question for itself and nobody is trusted.
    """
    check_budget(epsilon, 0.5)
    if levels < 2 or (len(values) and not 0 <= values.min() <= values.max() < levels):
        raise UserError(f"values: not all from 0 to {levels - 1}, or fewer than 2 levels; allowed: one of the levels")
    others = (levels - 1) * math.exp(-epsilon)
    lies = uniforms(source, len(values)) < others / (1.0 + others)
    # 1 to levels − 1 further on, in a circle, is any of the other values, each as likely.
    further = 1 + np.floor(uniforms(source, len(values)) * (levels - 1)).astype(np.int64)
    return np.where(lies, (values + further) % levels, values)


def _on_lattice(values: Floats, noise: Floats, fine: float) -> Floats:
    flat = np.rint(values.ravel() / fine) + np.rint(noise / fine)
    return (flat * fine).reshape(values.shape)


def _check_sensitivity(sensitivity: float) -> None:
    if not 0 < sensitivity < math.inf:
        raise UserError(f"sensitivity: got {sensitivity:g}; allowed: numbers above 0")
