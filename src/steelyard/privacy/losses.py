"""Privacy losses of one noisy release about a sampled cohort, as a distribution that dp-accounting can add up.

Poisson cohorts (with or without one client) have the library's own losses. Cohorts of a fixed size (with one client, or
with another in its place) are ours: n of N clients are drawn without replacement, so with q = n/N the one client is
among them, and where it is not, somebody else is there instead. Either way one client in the place of another moves the
sum by at most twice the longest part. With P = N(1, (z/2)²) and Q = N(0, (z/2)²), in units of that distance,

    δ(ε) ≤ q · δ_PQ(ln(1 + (e^ε − 1)/q))        ε ≥ 0

(B. Balle, G. Barthe, M. Gaboardi: "Privacy Amplification by Subsampling", NeurIPS 2018, theorem 9). No smaller bound
holds: it is reached where all other clients send the longest update in one direction and the one client sends the
opposite. Since the relation is symmetric, what is below 0 follows from what is above it, and the whole curve is that of
one pair of distributions; such pairs add up over rounds that depend on one another (Y. Zhu, J. Dong, Y.-X. Wang:
"Optimal Accounting of Differential Privacy via Characteristic Function", AISTATS 2022, theorems 10 and 11). Taking the
larger of the two one-sided sums of Poisson cohorts instead would be too low (C. Lebeda, M. Regehr, G. Kamath, T.
Steinke: "Avoiding Pitfalls for Privacy Accounting of Subsampled Mechanisms under Composition", 2024).

dp-accounting is imported inside functions, for speed of start: it takes a second to load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from steelyard.messages.updates import Floats

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_TAIL, _FAR_TAIL = 8.5, 9.75
"""Deviations beyond which a normal number lies with less than 1e-17, and with less than 1e-22."""
_AT_ONCE = 1000


def farthest(noise: float, rate: float, tail: float = _TAIL) -> float:
    """Return the largest loss of one release that is counted; what lies beyond has a probability of about 1e-17."""
    plain = 0.5 / noise**2 + tail / noise
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + plain)) if rate < 1 else plain


def poisson_losses(noise: float, rate: float, step: float) -> PrivacyLossDistribution:
    """Return the losses of a release about a Poisson cohort, in multiples of `step`, never too small.

    As dp-accounting's own `from_gaussian_mechanism`, with all δ computed at once, which takes less time.
    """
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    most = math.ceil(farthest(noise, rate, _FAR_TAIL) / step)
    if rate >= 1:
        return PrivacyLossDistribution(_connected(step, -most, most, lambda epsilons: _gaussian_delta(epsilons, noise)))
    # The densities with and without the client have a ratio of at least 1 − q.
    least = min(most, math.ceil(-math.log1p(-rate) / step))
    return PrivacyLossDistribution(
        _connected(step, -least, most, lambda epsilons: poisson_delta(epsilons, noise, rate)),
        _connected(step, -most, least, lambda epsilons: poisson_delta(epsilons, noise, rate, added=True)),
    )


def poisson_delta(epsilons: Floats, noise: float, rate: float, *, added: bool = False) -> Floats:
    """Return δ at each ε, also below 0, of one release about a Poisson cohort with the client against one without.

    `added` is the other way round. With P = (1 − q) N(0, z²) + q N(1, z²) and Q = N(0, z²), what is left of P − e^ε Q,
    or of Q − e^ε P, is a multiple of the difference of the two normals, and δ the same multiple of theirs.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if added:
            part = -np.expm1(epsilons + math.log1p(-rate))
            found = np.where(part > 0, part * _gaussian_delta(epsilons + math.log(rate) - np.log(part), noise), 0.0)
        else:
            size = np.minimum(epsilons, 700.0)  # e^ε overflows beyond
            plain = np.where(epsilons < 700, np.log1p(np.expm1(size) / rate), epsilons - math.log(rate))
            found = np.where(epsilons > math.log1p(-rate), rate * _gaussian_delta(plain, noise), -np.expm1(epsilons))
    return np.clip(found, 0.0, 1.0)


def _connected(step: float, low: int, high: int, delta: Callable[[Floats], Floats]) -> PLDPmf:
    """Return the losses from `low` to `high` steps whose δ(ε) is this one at each step, and no less between."""
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap

    deltas = delta(step * np.arange(low, high + 1, dtype=np.float64))
    # Rounding may not make a curve rise that falls.
    falling = np.maximum.accumulate(deltas[::-1])[::-1]
    return create_pmf_pessimistic_connect_dots_fixed_gap(step, low, high, falling)


def pure_losses(noise: float, step: float, *, laplace: bool) -> PrivacyLossDistribution:
    """Return the losses of Laplace noise, or of anything that is ε-private with ε = 1/noise, never too small."""
    from dp_accounting.pld import privacy_loss_distribution as pld
    from dp_accounting.pld.common import DifferentialPrivacyParameters

    if laplace:
        return pld.from_laplace_mechanism(noise, value_discretization_interval=step)
    return pld.from_privacy_parameters(DifferentialPrivacyParameters(1.0 / noise), value_discretization_interval=step)


def fixed_losses(noise: float, rate: float, step: float) -> PrivacyLossDistribution:
    """Return the losses of a release about a cohort of a fixed size, in multiples of `step`, never too small.

    `noise` is in units of how far one client in another's place moves the sum: half of what it is per client.
    """
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    most = math.ceil(farthest(noise, rate) / step)
    return PrivacyLossDistribution(_connected(step, -most, most, lambda epsilons: fixed_delta(epsilons, noise, rate)))


def fixed_delta(epsilons: Floats, noise: float, rate: float) -> Floats:
    """Return δ at each ε, also below 0, of one release about a cohort of a fixed size; `noise` as in `fixed_losses`."""
    size = np.abs(epsilons)
    # ln(1 + (e^ε − 1)/q), without forming e^ε where that would overflow.
    with np.errstate(over="ignore"):
        plain = np.where(size < 700, np.log1p(np.expm1(np.minimum(size, 700.0)) / rate), size - math.log(rate))
    above = rate * _gaussian_delta(plain, noise)
    found = np.where(epsilons >= 0, above, -np.expm1(-size) + np.exp(-size) * above)
    return np.clip(found, 0.0, 1.0)


def _gaussian_delta(epsilons: Floats, noise: float) -> Floats:
    """Return δ of the Gaussian mechanism at each ε (Balle and Wang)."""
    near, far = 0.5 / noise - epsilons * noise, -0.5 / noise - epsilons * noise
    from scipy.special import log_ndtr

    return np.exp(log_ndtr(near)) * -np.expm1(np.minimum(0.0, epsilons + log_ndtr(far) - log_ndtr(near)))


def repeated(losses: PrivacyLossDistribution, count: int) -> PrivacyLossDistribution:
    """Return the losses of `count` releases.

    Many are put together in two steps: the library first raises the number of losses to the power of the count, as a
    whole number, which for millions of releases takes hours.
    """
    if count <= _AT_ONCE:
        return losses.self_compose(count)
    whole, rest = divmod(count, _AT_ONCE)
    found = losses.self_compose(_AT_ONCE).self_compose(whole)
    return found.compose(losses.self_compose(rest)) if rest else found
