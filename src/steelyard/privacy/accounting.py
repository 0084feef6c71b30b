"""What releases cost together: ε at δ of everything that was told about a client, and the noise for a budget.

Plain Gaussian releases add up exactly: k of them with noise z are one with z/√k (Balle and Wang's δ). With sampled
cohorts the privacy loss is added up by Google's dp-accounting: as privacy loss distributions (pld) or as Rényi
divergences (rdp). Noise is always counted in units of the sensitivity of the release.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from steelyard.errors import UserError
from steelyard.privacy.mechanisms import gaussian_epsilon
from steelyard.privacy.requirements import check_accounting

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

AccountantName = Literal["pld", "rdp"]
Sampling = Literal["all", "poisson", "fixed"]

FINE, COARSE = 1e-4, 1e-3
"""Steps in which privacy losses are counted; the coarse one is ten times faster and says a little more than is true."""


_MOST_STEPS = 1e6
"""Losses that reach far, as of very little noise, are counted in coarser steps, so that they fit into memory."""
_FARTHEST = 1e5
"""Losses that reach farther are no promise at all, and are bounded by other means instead of counted."""


@dataclass(frozen=True, order=True)
class Release:
    """One noisy release: Gaussian noise of `noise` times its sensitivity, about a cohort drawn from all clients."""

    noise: float
    sampling: Sampling = "all"
    """all: the client is known to be in it; poisson: in it with probability `rate`; fixed: one of a fixed number."""
    rate: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether no sampling makes it cheaper."""
        return self.sampling == "all" or (self.sampling == "poisson" and self.rate >= 1.0)


Spending = Mapping[Release, int]
"""How many times each release was made."""


def spent(spending: Spending, delta: float, accountant: AccountantName = "pld", *, coarse: bool = False) -> float:
    """Return the ε that these releases have cost at δ; 0 for none. `coarse` is faster and never too low."""
    counted = {release: count for release, count in spending.items() if count > 0}
    if not counted:
        return 0.0
    if all(release.plain for release in counted) and accountant == "pld":
        return gaussian_epsilon(delta, together(counted))
    return _spent(tuple(sorted(counted.items())), delta, accountant, COARSE if coarse else FINE)


def together(spending: Spending) -> float:
    """Return the noise of one plain Gaussian release that costs as much as all these: 1/z² = Σ k/z_k²."""
    return 1.0 / math.sqrt(sum(count / release.noise**2 for release, count in spending.items()))


@lru_cache(maxsize=4096)
def _spent(counted: tuple[tuple[Release, int], ...], delta: float, accountant: AccountantName, fine: float) -> float:
    check_accounting()
    if accountant == "pld":
        if any(release.sampling == "fixed" for release, _ in counted):
            raise UserError(
                "privacy.budget.accountant: got 'pld' for cohorts of a fixed size, which it cannot add up; "
                "allowed: 'rdp', or rounds.sampling = 'poisson'"
            )
        total: Any = None
        reach = _reach(counted)
        if reach > _FARTHEST:
            # Both are never too low: sampling only makes a release cheaper.
            return min(gaussian_epsilon(delta, together(dict(counted))), _by_rdp(counted, delta))
        fine = max(fine, reach / _MOST_STEPS)
        for release, count in counted:
            mine = _loss(release, fine).self_compose(count)
            total = mine if total is None else total.compose(mine)
        return float(total.get_epsilon_for_delta(delta))
    return _by_rdp(counted, delta)


def _reach(counted: tuple[tuple[Release, int], ...]) -> float:
    """Return how far privacy losses reach, roughly: those of one release, or, by rdp, those of all together."""
    single = max(0.5 / release.noise**2 + 10.0 / release.noise for release, _ in counted)
    return max(single, 2.0 * _by_rdp(counted, 1e-15))


@lru_cache(maxsize=64)
def _loss(release: Release, fine: float) -> PrivacyLossDistribution:
    # Late for speed of start, as in all of this file: dp-accounting takes a second to load.
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    return from_gaussian_mechanism(release.noise, sampling_prob=release.rate, value_discretization_interval=fine)


def _by_rdp(counted: tuple[tuple[Release, int], ...], delta: float) -> float:
    import numpy as np
    from dp_accounting.rdp import compute_epsilon  # Late for speed of start.

    orders = _orders()
    divergences = np.sum([count * np.asarray(_rdp(release)) for release, count in counted], axis=0)
    epsilon, _ = compute_epsilon(orders, divergences, delta)
    return float(epsilon)


def _orders() -> list[float]:
    # The orders that dp-accounting takes by default.
    from dp_accounting.rdp import RdpAccountant  # Late for speed of start.

    return list(RdpAccountant().orders)


@lru_cache(maxsize=64)
def _rdp(release: Release) -> tuple[float, ...]:
    import dp_accounting as dp  # Late for speed of start.

    event: Any = dp.GaussianDpEvent(release.noise)
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    if release.sampling == "poisson":
        event = dp.PoissonSampledDpEvent(release.rate, event)
    elif release.sampling == "fixed":
        # Only the ratio of the two numbers counts. One client in the place of another moves a sum twice as far.
        chosen = min(10**9, math.ceil(release.rate * 10**9))
        event = dp.SampledWithoutReplacementDpEvent(10**9, chosen, dp.GaussianDpEvent(release.noise / 2))
        relation = dp.NeighboringRelation.REPLACE_ONE
    accountant = dp.rdp.RdpAccountant(neighboring_relation=relation)
    # Orders at which its series does not converge are left out, and said in a warning for each: ε only grows by that.
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        accountant.compose(event)
    finally:
        logger.setLevel(before)
    return tuple(accountant.rdp.tolist())


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
            spending[Release(noise, release.sampling, release.rate)] += count
        return spent(spending, delta, accountant, coarse=True)

    if epsilon <= 0:
        raise UserError(f"epsilon: got {epsilon:g}; allowed: numbers above 0")
    low, high = 0.01, 1.0
    while cost(high) > epsilon:
        low, high = high, high * 2
        if high > 1e6:
            raise UserError(f"epsilon: {epsilon:g} at delta {delta:g} needs noise beyond any use; allowed: more ε")
    # Plain releases are counted exactly and at once; distributions of losses take seconds and round by more than this.
    exact = accountant == "pld" and all(release.plain for release, _ in [*asked, *(beside or {}).items()])
    while high / low > (1 + 1e-9 if exact else 1.0002):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return high
