"""What releases cost together: ε at δ of everything that was released about a client, and the noise for a budget.

Plain Gaussian releases add up exactly: k of them with noise z are one with z/√k (Balle and Wang's δ). With sampled
cohorts the privacy loss is added up by Google's dp-accounting, as privacy loss distributions (pld; below says whose).
A second bound, by how often a client can have been in a cohort, is better where clients are drawn hardly ever. Laplace
noise, and mechanisms that are ε-private by themselves (exponential, randomised
response), are added up by the same library; the latter cost no more than a coin that lies as often as ε lets it (P.
Kairouz, S. Oh, P. Viswanath: "The Composition Theorem for Differential Privacy", ICML 2015).
Noise is always counted in units of the longest part that one client can have in a sum.

**Losses of one release about a sampled cohort.** Poisson cohorts (with or without one client) have the library's own
losses. Cohorts of a fixed size (with one client, or with another in its place) are ours: n of N clients are drawn
without replacement, so with q = n/N the one client is among them, and where it is not, somebody else is there instead.
Either way one client in the place of another moves the sum by at most twice the longest part. With P = N(1, (z/2)²) and
Q = N(0, (z/2)²), in units of that distance,

    δ(ε) ≤ q · δ_PQ(ln(1 + (e^ε − 1)/q))        ε ≥ 0

(B. Balle, G. Barthe, M. Gaboardi: "Privacy Amplification by Subsampling", NeurIPS 2018, theorem 9). No smaller bound
holds: it is reached where all other clients send the longest update in one direction and the one client sends the
opposite. Since the relation is symmetric, what is below 0 follows from what is above it, and the whole curve is that of
one pair of distributions; such pairs add up over rounds that depend on one another (Y. Zhu, J. Dong, Y.-X. Wang:
"Optimal Accounting of Differential Privacy via Characteristic Function", AISTATS 2022, theorems 10 and 11). Taking the
larger of the two one-sided sums of Poisson cohorts instead would be too low (C. Lebeda, M. Regehr, G. Kamath, T.
Steinke: "Avoiding Pitfalls for Privacy Accounting of Subsampled Mechanisms under Composition", 2024).

dp-accounting is imported inside functions, for speed of start: it takes a second to load.

**Canaries** are a lower bound on ε from what an attacker guesses right. A canary is a client that an auditor plants:
with probability 1/2 it takes part as one case of the guarantee says, else as the other says. The attacker sees all that
is released and says of the canaries that it is surest about which of the two it was. A mechanism that is (ε, δ)-private
limits how many of r such guesses can be right: about as many as r coins show that fall right with probability e^ε/(1 +
e^ε),

    P[at least v right] ≤ f(v) + 2mδ · max_i (f(v − i) − f(v))/i        f(v) = P[Bin(r, e^ε/(1 + e^ε)) ≥ v]

for m canaries, in one run or in several (T. Steinke, M. Nasr, M. Jagielski: "Privacy Auditing with One (1) Training
Run", NeurIPS 2023, theorem 5.2). A bound above the accounted ε shows a fault; one far below says only that this attack
is not the worst one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.messages.updates import Floats

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


Sampling = Literal["all", "poisson", "fixed"]
Mechanism = Literal["gaussian", "laplace", "pure"]
"""What a release is: Gaussian or Laplace noise, or anything that is ε-private with ε = 1/noise."""
Counted = tuple[tuple["Release", int], ...]

FINE, COARSE = 1e-4, 1e-3
"""Steps in which privacy losses are counted; the coarse one is ten times faster and says a little more than is true."""
_LEAST_STEPS = 2000.0
"""Losses of very much noise, or of very few clients, are counted in finer steps: many small roundings add up."""
_MOST_STEPS = 1e6
"""Losses that reach far, as of very little noise, are counted in coarser steps, so that they fit into memory."""
_FARTHEST = 1e5
"""Losses that reach farther guarantee nothing, and are bounded by other means instead of counted."""


@dataclass(frozen=True, order=True)
class Release:
    """One noisy release: noise of `noise` times one client's longest part, about a cohort of all clients."""

    noise: float
    sampling: Sampling = "all"
    """all: the client is known to be in it; poisson: in it with probability `rate`; fixed: one of a fixed number."""
    rate: float = 1.0
    mechanism: Mechanism = "gaussian"
    """Others than gaussian are never sampled: only what clients send of themselves is released so."""

    @property
    def plain(self) -> bool:
        """Whether no sampling makes it cheaper."""
        return self.sampling == "all" or self.rate >= 1.0

    @property
    def exact(self) -> bool:
        """Whether it adds up with its like in closed form: Gaussian noise without sampling."""
        return self.plain and self.mechanism == "gaussian"

    @property
    def distance_noise(self) -> float:
        """The noise in units of how far the two neighbouring cases of the guarantee can be apart.

        With or without a client they differ by its part; where cohorts have a fixed size, another client comes in its
        place, and the two parts may point in opposite directions: twice as far, so half the noise.
        """
        return self.noise / 2 if self.sampling == "fixed" else self.noise


Spending = Mapping[Release, int]
"""How many times each release was made."""


def spent(spending: Spending, delta: float, *, coarse: bool = False) -> float:
    """Return the ε that these releases have cost at δ; 0 for none. `coarse` is faster and never too low."""
    counted = {release: count for release, count in spending.items() if count > 0}
    if not counted:
        return 0.0
    if all(release.exact for release in counted):
        return gaussian_epsilon(delta, together(counted))
    return _spent(tuple(sorted(counted.items())), delta, COARSE if coarse else FINE)


def together(spending: Spending) -> float:
    """Return the noise of one plain Gaussian release that costs as much as all these: 1/z² = Σ k/z_k²."""
    return 1.0 / math.sqrt(sum(count / release.distance_noise**2 for release, count in spending.items()))


@lru_cache(maxsize=4096)
def _spent(counted: Counted, delta: float, fine: float) -> float:
    check_accounting()
    # Neither bound is ever too low, so the smaller one holds.
    bound = _by_taking_part(counted, delta)
    return min(bound, _by_losses(counted, delta, fine)) if bound else 0.0


def _by_losses(counted: Counted, delta: float, fine: float) -> float:
    reaches = [
        farthest(release.distance_noise, release.rate) if release.mechanism == "gaussian" else 1.0 / release.noise
        for release, _ in counted
    ]
    reach = max(2.0 * _by_taking_part(counted, 1e-15), *reaches)
    if reach > _FARTHEST:
        return math.inf
    step = max(reach / _MOST_STEPS, min(fine, min(reaches) / _LEAST_STEPS))
    total: Any = None
    for release, count in counted:
        mine = repeated(_losses(release, step), count)
        total = mine if total is None else total.compose(mine)
    return float(total.get_epsilon_for_delta(delta))


@lru_cache(maxsize=64)
def _losses(release: Release, step: float) -> PrivacyLossDistribution:
    if release.mechanism != "gaussian":
        return pure_losses(release.noise, step, laplace=release.mechanism == "laplace")
    made = fixed_losses if release.sampling == "fixed" else poisson_losses
    return made(release.distance_noise, release.rate, step)


def _by_taking_part(counted: Counted, delta: float) -> float:
    """Return a simple bound: but for δ/2, a client is in so many of the cohorts at most, and each is then plain.

    Whether a client is drawn depends on nobody's data, and divergences of mixtures are at most those of their parts.
    """
    from scipy.stats import binom  # Late for speed of start.

    share = delta / 2 / len(counted)
    most = {
        release: count if release.plain else int(binom.isf(share, count, release.rate)) for release, count in counted
    }
    taken = {release: count for release, count in most.items() if count}
    gaussian = {release: count for release, count in taken.items() if release.mechanism == "gaussian"}
    # What is ε-private without any δ adds its ε at most.
    pure = sum(count / release.noise for release, count in taken.items() if release not in gaussian)
    return pure + (gaussian_epsilon(delta / 2, together(gaussian)) if gaussian else 0.0)


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


def check_budget(epsilon: float, delta: float) -> None:
    """Refuse what is no ε above 0, or no δ between 0 and 1."""
    if not 0 < epsilon < math.inf:
        raise UserError(f"epsilon: got {epsilon:g}; allowed: numbers above 0")
    if not 0 < delta < 1:
        raise UserError(f"delta: got {delta:g}; allowed: numbers between 0 and 1")


def gaussian_noise(epsilon: float, delta: float) -> float:
    """Return the least σ/Δ₂ of the Gaussian mechanism for (ε, δ): the analytic calibration, for any ε > 0."""
    check_budget(epsilon, delta)
    return _least(lambda noise: gaussian_delta(epsilon, noise) <= delta)


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


INSTALL = "pip install 'steelyard[privacy]'"


def check_accounting() -> None:
    """Refuse a budget where the library that adds it up is missing."""
    if find_spec("dp_accounting") is None:
        raise UserError(f"privacy: a budget needs the package dp-accounting, which is not installed; {INSTALL}")


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


_SHARES = ((0.5, 0.5), (0.25, 0.25), (0.1, 0.1), (0.25, 0.0), (0.1, 0.0))
"""Of how many canaries the attacker says "in" and "out": all, the surer half, the surest, or "in" alone, since whoever
was never drawn into a cohort looks like one that is out."""


def lower_bound(inside: NDArray[np.bool_], scores: Floats, delta: float, confidence: float = 0.95) -> float:
    """Return what ε is at least, with this confidence, if canaries scored so; a higher score speaks for "in".

    How many guesses are made is not chosen by what they would show: all choices are tried, each with its part of the
    error that is allowed.
    """
    order = np.argsort(scores, kind="stable")
    error = (1.0 - confidence) / len(_SHARES)
    return max(_bound(inside[order], _counts(len(order), share), delta, error) for share in _SHARES)


def _counts(canaries: int, shares: tuple[float, float]) -> tuple[int, int]:
    return int(canaries * shares[0]), int(canaries * shares[1])


def _bound(ordered: NDArray[np.bool_], counts: tuple[int, int], delta: float, error: float) -> float:
    """Return the largest ε that so many right guesses refute, by halving; 0 where they refute none."""
    said_in, said_out = counts
    guesses = said_in + said_out
    right = int(ordered[len(ordered) - said_in :].sum()) + int((~ordered[:said_out]).sum())
    low, high = 0.0, 50.0
    if not guesses or chance(len(ordered), guesses, right, low, delta) > error:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if chance(len(ordered), guesses, right, middle, delta) <= error else (low, middle)
    return low


def chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return how likely so many right guesses are at most, if (ε, δ) is kept."""
    from scipy.stats import binom  # Late for speed of start.

    coin = 1.0 / (1.0 + np.exp(-epsilon))
    whole = float(binom.sf(right - 1, guesses, coin))
    if right < 1:
        return 1.0
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, coin))
    slope = float((below / np.arange(1, right + 1)).max())
    return min(1.0, whole + 2.0 * canaries * delta * slope)
