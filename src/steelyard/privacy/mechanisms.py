"""The mechanisms: Laplace, Gaussian with analytic calibration, exponential, randomised response.

Laplace: scale Δ₁/ε (ε-DP; C. Dwork et al. 2006). Gaussian: the least σ with

    δ = Φ(Δ₂/2σ − εσ/Δ₂) − e^ε · Φ(−Δ₂/2σ − εσ/Δ₂)

(B. Balle, Y.-X. Wang: "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018), which holds for every ε;
the classic σ = Δ₂·√(2 ln(1.25/δ))/ε is larger, and proven for ε ≤ 1 only. Exponential: candidate r with
probability ∝ exp(ε·u(r)/2Δ_u) (F. McSherry, K. Talwar 2007). Randomised response: the true one of k values with
probability e^ε/(e^ε + k − 1), else any other (S. L. Warner 1965 for k = 2; P. Kairouz, S. Oh, P. Viswanath 2014). All
draw from a `Source`, noise on a lattice.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.privacy.source import Floats, Source, laplacians, lattice_step, normals, uniforms


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Return δ of the Gaussian mechanism whose noise is `noise` times its sensitivity, at ε (Balle and Wang, Thm 8)."""
    mean = 1.0 / noise
    from scipy.special import log_ndtr, ndtr  # For speed of start.

    second = math.exp(min(epsilon + float(log_ndtr(-mean / 2 - epsilon / mean)), 700.0))
    return max(0.0, float(ndtr(mean / 2 - epsilon / mean)) - second)


def gaussian_epsilon(delta: float, noise: float) -> float:
    """Return the least ε of the Gaussian mechanism at δ; composing k of them is one with noise/√k, exactly."""
    if gaussian_delta(0.0, noise) <= delta:
        return 0.0
    return _least(lambda epsilon: gaussian_delta(epsilon, noise) <= delta)


def gaussian_noise(epsilon: float, delta: float) -> float:
    """Return the least σ/Δ₂ of the Gaussian mechanism for (ε, δ): the analytic calibration, for any ε > 0."""
    _check(epsilon, delta)
    return _least(lambda noise: gaussian_delta(epsilon, noise) <= delta)


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
    _check(epsilon, 0.5)
    _check_sensitivity(sensitivity)
    fine = lattice_step(sensitivity / epsilon / max(1, values.size))
    scale = (sensitivity + fine * values.size) / epsilon
    return _on_lattice(values, laplacians(source, values.size) * scale, fine)


def exponential(utilities: Floats, sensitivity: float, epsilon: float, source: Source) -> int:
    """Return the index of one candidate, drawn with probability ∝ exp(ε·u/2Δ): likely one of the best.

    `sensitivity` bounds what one client changes of any utility. Use it where the answer is a choice, not a number.
    """
    _check(epsilon, 0.5)
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
    _check(epsilon, 0.5)
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


def _least(holds: Callable[[float], bool]) -> float:
    """Return the least number above 0 at which a condition that stays true once true holds; rounded up."""
    low, high = 0.0, 1.0
    while not holds(high):
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _check(epsilon: float, delta: float) -> None:
    if not 0 < epsilon < math.inf:
        raise UserError(f"epsilon: got {epsilon:g}; allowed: numbers above 0")
    if not 0 < delta < 1:
        raise UserError(f"delta: got {delta:g}; allowed: numbers between 0 and 1")


def _check_sensitivity(sensitivity: float) -> None:
    if not 0 < sensitivity < math.inf:
        raise UserError(f"sensitivity: got {sensitivity:g}; allowed: numbers above 0")
