"""What noise a budget asks for, or what a noise costs, before anything is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar, cast

from pydantic import Field

from steelyard.base.errors import UserError
from steelyard.base.settings import validated
from steelyard.privacy.accounting import Mechanism, Release, Spending, spent
from steelyard.privacy.settings import OWNERS_DELTA, BudgetSettings, Noise, PrivacySettings, check_delta


@dataclass(frozen=True)
class BudgetPlan:
    """A budget over some rounds and the noise that keeps to it."""

    noise_multiplier: float
    """Noise in units of the sensitivity: z of privacy.central.noise and privacy.local.noise."""
    epsilon: float
    """What it costs in the end; at most the budget."""
    epsilon_after_first: float
    budget: float | None
    delta: float
    rounds: int
    sampling: float
    sampled: str
    steps: int = 1
    """How many batches of samples a client takes in a round; 1 where its update is noised."""


class _Asked(BudgetSettings):
    noise: Noise | None = None
    sampling: Annotated[float, Field(gt=0, le=1)]


ResultT = TypeVar("ResultT")


def plan(
    *,
    epsilon: float | None,
    delta: float,
    rounds: int,
    sampling: float,
    noise: float | None = None,
    sampled: Literal["poisson", "fixed"] = "poisson",
    clients: int | None = None,
    accept_large_delta: bool = False,
    steps: int = 1,
    unit: str = "client",
) -> BudgetPlan:
    """Find the least noise for a budget, or, with `noise` given, what it costs.

    Of samples of one client, `clients` is their number, `unit` their name, and a round has several `steps`.
    """
    if (epsilon is None) == (noise is None):
        raise UserError("--epsilon, --noise: got both or none of the two; allowed: one of them")
    given = {"epsilon": epsilon, "delta": delta, "noise": noise, "sampling": sampling}
    _as_options(lambda: validated(_Asked, given, ""))
    if clients is not None and sampling * clients < 1:
        raise UserError(
            f"--sampling: got {sampling:g} of {clients:,} clients, which is less than one client a round; allowed: at "
            f"least {1 / clients:g}"
        )
    if not accept_large_delta:
        # A cohort has a client at least, so there are as many clients as cohorts would take to hold each of them once.
        check_delta("--delta", delta, clients or 1 / sampling, "--accept-large-delta", unit)

    def release(z: float) -> Release:
        return Release(z, sampled if sampling < 1 or sampled == "fixed" else "all", sampling)

    found = noise
    if found is None:
        found = _as_options(lambda: noise_for(epsilon or 0.0, delta, [(release(1.0), rounds * steps)]))
    return BudgetPlan(
        noise_multiplier=found,
        epsilon=spent({release(found): rounds * steps}, delta),
        epsilon_after_first=spent({release(found): steps}, delta),
        budget=epsilon,
        delta=delta,
        rounds=rounds,
        sampling=sampling,
        sampled=sampled,
        steps=steps,
    )


def _as_options(work: Callable[[], ResultT]) -> ResultT:
    """Return what the work gives; what is wrong is the option of the field's name."""
    try:
        return work()
    except UserError as error:
        raise UserError(f"--{error}") from None


def plain_noise(settings: PrivacySettings, rounds: int, criteria: int) -> float:
    """Return the least noise with which so many rounds keep to the budget, each with an update and so many criteria."""
    limit, given = settings.budget.epsilon, settings.criteria_noise
    assert limit is not None, "settings without noise and budget are refused"
    release, count = criteria_release(settings, given or 1.0), criteria * rounds
    asked = [(Release(1.0), rounds)] + ([(release, count)] if given is None and count else [])
    beside = {release: count} if given is not None and count else {}
    return noise_for(limit, settings.budget.delta, asked, beside)


def criteria_release(settings: PrivacySettings, noise: float) -> Release:
    """Return what releasing one criterion with so much noise is to the accountant."""
    kinds: dict[str, Mechanism] = {"gaussian": "gaussian", "laplace": "laplace"}
    return Release(noise, mechanism=kinds.get(settings.criteria_mechanism, "pure"))


def device_noise(settings: PrivacySettings, rounds: int, criteria: int) -> float:
    """Return a device's noise multiplier: the one given, or enough for a device that takes part in every round.

    A device cannot know how often it will be asked, and need not believe what a server says of it.
    """
    assert settings.local is not None
    charged = criteria if settings.criteria == "charged" else 0
    return settings.local.noise if settings.local.noise is not None else plain_noise(settings, rounds, charged)


def device_epsilon(settings: PrivacySettings, rounds: int, criteria: int, rules: int = 1) -> float:
    """Return the ε of so many rounds with an update and so many criteria each; criteria that are public cost nothing.

    For the owner of a device, who need not take the server's δ. Rules side by side ask for an update each, while noise
    that is found from a budget is found for one of them.
    """
    noise = device_noise(settings, rounds, criteria)
    times = rounds * rules
    charged = criteria * times if settings.criteria == "charged" else 0
    spending = Counter({Release(noise): times}) + Counter(
        {criteria_release(settings, settings.criteria_noise or noise): charged}
    )
    return spent(spending, OWNERS_DELTA)


_LEAST_NOISE, _MOST_NOISE = 0.01, 1e6
"""Less is no noise to speak of, and is not looked for; more leaves nothing of a model."""


def noise_for(
    epsilon: float,
    delta: float,
    releases: Iterable[tuple[Release, int]],
    beside: Spending | None = None,
) -> float:
    """Return the least noise multiplier with which these releases keep to (ε, δ); their own noise is not looked at.

    `beside` is what else is released, with its noise as it is. The result is within a billionth of the least, by coarse
    counts, and keeps to the budget.
    """
    import numpy as np  # Both late for speed of start.
    from scipy.optimize import brentq

    asked = list(releases)

    def excess(noise: float) -> float:
        spending = Counter(beside or {})
        for release, count in asked:
            spending[replace(release, noise=noise)] += count
        return spent(spending, delta, coarse=True) - epsilon

    high = 1.0
    while excess(high) > 0:
        high *= 2
        if high > _MOST_NOISE:
            raise UserError(
                f"epsilon: {epsilon:g} at delta {delta:g} needs more noise than any model survives; allowed: a larger ε"
            )
    low = high / 2
    while excess(low) <= 0:
        if low <= _LEAST_NOISE:
            return low
        low, high = low / 2, low
    step = 1e-9
    found = cast("float", brentq(excess, low, high, xtol=1e-15, rtol=np.float64(step)))
    while excess(found) > 0:  # the root is found from either side
        found, step = found * (1 + step), step * 2
    return found
