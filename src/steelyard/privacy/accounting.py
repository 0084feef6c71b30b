"""What releases cost together: ε at δ of everything that was released about a client, and the noise for a budget.

Plain Gaussian releases add up exactly: k of them with noise z are one with z/√k (Balle and Wang's δ). With sampled
cohorts the privacy loss is added up by Google's dp-accounting: as privacy loss distributions (pld; `losses` says whose)
or as Rényi divergences (rdp). Each is bounded by how often a client can have been in a cohort, so that neither is far
off where the other is good. Laplace noise, and mechanisms that are ε-private by themselves (exponential, randomised
response), are added up by the same library; the latter cost no more than a coin that lies as often as ε lets it (P.
Kairouz, S. Oh, P. Viswanath: "The Composition Theorem for Differential Privacy", ICML 2015).
Noise is always counted in units of the longest part that one client can have in a sum.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from steelyard.base.errors import UserError
from steelyard.privacy.losses import farthest, fixed_losses, poisson_losses, pure_losses, repeated
from steelyard.privacy.mechanisms import gaussian_epsilon
from steelyard.privacy.requirements import check_accounting

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

AccountantName = Literal["pld", "rdp"]
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


_Cost = tuple[float, float]
"""A noise, and what it costs."""
Spending = Mapping[Release, int]
"""How many times each release was made."""


def spent(spending: Spending, delta: float, accountant: AccountantName = "pld", *, coarse: bool = False) -> float:
    """Return the ε that these releases have cost at δ; 0 for none. `coarse` is faster and never too low."""
    counted = {release: count for release, count in spending.items() if count > 0}
    if not counted:
        return 0.0
    if all(release.exact for release in counted) and accountant == "pld":
        return gaussian_epsilon(delta, together(counted))
    return _spent(tuple(sorted(counted.items())), delta, accountant, COARSE if coarse else FINE)


def together(spending: Spending) -> float:
    """Return the noise of one plain Gaussian release that costs as much as all these: 1/z² = Σ k/z_k²."""
    return 1.0 / math.sqrt(sum(count / release.distance_noise**2 for release, count in spending.items()))


@lru_cache(maxsize=4096)
def _spent(counted: Counted, delta: float, accountant: AccountantName, fine: float) -> float:
    check_accounting()
    if all(release.exact for release, _ in counted):
        return _by_rdp(counted, delta)  # by pld they are in closed form, in `spent`
    # Every bound here is never too low, so the least of them holds.
    bound = _by_taking_part(counted, delta)
    if accountant == "rdp":
        return min(bound, _by_rdp(counted, delta))
    return min(bound, _by_losses(counted, delta, fine)) if bound else 0.0


def _by_losses(counted: Counted, delta: float, fine: float) -> float:
    reaches = [
        farthest(release.distance_noise, release.rate) if release.mechanism == "gaussian" else 1.0 / release.noise
        for release, _ in counted
    ]
    bound, reach = math.inf, 2.0 * _by_taking_part(counted, 1e-15)
    if reach > max(fine * _MOST_STEPS, 10.0 * max(reaches)):
        # Rényi divergences know better how far many small losses reach together; they take seconds.
        bound, reach = _by_rdp(counted, delta), min(reach, 2.0 * _by_rdp(counted, 1e-15))
    reach = max(reach, *reaches)
    if reach > _FARTHEST:
        return bound
    step = max(reach / _MOST_STEPS, min(fine, min(reaches) / _LEAST_STEPS))
    total: Any = None
    for release, count in counted:
        mine = repeated(_losses(release, step), count)
        total = mine if total is None else total.compose(mine)
    return min(bound, float(total.get_epsilon_for_delta(delta)))


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


def _by_rdp(counted: Counted, delta: float) -> float:
    import numpy as np
    from dp_accounting.rdp import compute_epsilon  # Late for speed of start.

    orders = _orders()
    divergences = np.sum([count * np.asarray(_rdp(release)) for release, count in counted], axis=0)
    with _without_warnings():
        epsilon, _ = compute_epsilon(orders, divergences, delta)
    return float(epsilon)


@contextmanager
def _without_warnings() -> Generator[None]:
    """Keep back what dp-accounting says of single orders: one that it leaves out only makes ε grow."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _orders() -> list[float]:
    # The orders that dp-accounting takes by default.
    from dp_accounting.rdp import RdpAccountant  # Late for speed of start.

    return list(RdpAccountant().orders)


@lru_cache(maxsize=64)
def _rdp(release: Release) -> tuple[float, ...]:
    import dp_accounting as dp  # Late for speed of start.

    event: Any = dp.GaussianDpEvent(release.distance_noise)
    if release.mechanism == "laplace":
        event = dp.LaplaceDpEvent(release.noise)
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    if release.mechanism == "pure":
        # With this probability a fair coin is released in place of the truth.
        event = dp.RandomizedResponseDpEvent(2.0 / (1.0 + math.exp(min(1.0 / release.noise, 700.0))), 2)
        relation = dp.NeighboringRelation.REPLACE_ONE
    elif release.sampling == "poisson":
        event = dp.PoissonSampledDpEvent(release.rate, event)
    elif release.sampling == "fixed":
        # Only the ratio of the two numbers counts.
        chosen = min(10**9, math.ceil(release.rate * 10**9))
        event = dp.SampledWithoutReplacementDpEvent(10**9, chosen, event)
        relation = dp.NeighboringRelation.REPLACE_ONE
    accountant = dp.rdp.RdpAccountant(neighboring_relation=relation)
    with _without_warnings():
        accountant.compose(event)
    if release.mechanism != "gaussian":
        return tuple(accountant.rdp.tolist())
    # Sampling never makes a release dearer: the divergence of the plain one, α/(2z²), bounds each.
    plain = [order / (2.0 * release.distance_noise**2) for order in _orders()]
    return tuple(min(pair) for pair in zip(accountant.rdp.tolist(), plain, strict=True))


def noise_for(
    epsilon: float,
    delta: float,
    releases: Iterable[tuple[Release, int]],
    accountant: AccountantName = "pld",
    beside: Spending | None = None,
) -> float:
    """Return the least noise multiplier with which these releases keep to (ε, δ); their own noise is not looked at.

    `beside` is what else is released, with its noise as it is.
    Found from above, so that the result keeps to the budget: exactly where no cohort is sampled, else to within some
    ten-thousandths, with the coarse steps.
    """
    asked = list(releases)

    def cost(noise: float) -> float:
        spending = Counter(beside or {})
        for release, count in asked:
            spending[replace(release, noise=noise)] += count
        return spent(spending, delta, accountant, coarse=True)

    if epsilon <= 0:
        raise UserError(f"epsilon: got {epsilon:g}; allowed: numbers above 0")
    # Plain releases are counted exactly and at once; distributions of losses take seconds and round by more than this.
    exact = accountant == "pld" and all(release.exact for release, _ in [*asked, *(beside or {}).items()])
    low, high = _between(cost, epsilon, delta)
    return _narrowed(cost, epsilon, low, high, 1 + 1e-9 if exact else 1.0002)


_LEAST_NOISE = 0.01
"""Less is no noise to speak of, and is not looked for."""


def _between(cost: Callable[[float], float], epsilon: float, delta: float) -> tuple[_Cost, _Cost]:
    """Return a noise that costs too much and one, twice as much, that does not, each with its cost."""
    low = high = (1.0, cost(1.0))
    while high[1] > epsilon:
        if high[0] * 2 > 1e6:
            raise UserError(
                f"epsilon: {epsilon:g} at delta {delta:g} needs more noise than any model survives; allowed: a larger ε"
            )
        low, high = high, (high[0] * 2, cost(high[0] * 2))
    while low[1] <= epsilon:
        if low[0] / 2 <= _LEAST_NOISE:
            return (_LEAST_NOISE, math.inf), low
        low, high = (low[0] / 2, cost(low[0] / 2)), low
    return low, high


def _narrowed(cost: Callable[[float], float], epsilon: float, low: _Cost, high: _Cost, apart: float) -> float:
    """Return the noise of `high` once it is at most `apart` times that of `low`.

    Costs are nearly a power of the noise, so a straight line through the logarithms of the two leads close to the one
    sought: a few costs instead of the twenty that halving takes, and none of them far from it, where they take longest.
    """
    tried = 0
    while high[0] / low[0] > apart:
        at = math.sqrt(low[0] * high[0])
        if tried < 8 and high[1] > 0 and low[1] < math.inf:
            part = math.log(low[1] / epsilon) / math.log(low[1] / high[1])
            at = low[0] * (high[0] / low[0]) ** part * apart**0.2  # a little above: it keeps to the budget then
            # Close to an end that is known: the other end goes to just within reach of it.
            if high[0] / at < apart:
                at = high[0] / apart**0.95
            elif at / low[0] < apart:
                at = low[0] * apart**0.95
        found = (at, cost(at))
        low, high = (low, found) if found[1] <= epsilon else (found, high)
        tried += 1
    return high[0]
