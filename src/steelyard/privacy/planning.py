"""What noise a budget asks for, or what a noise costs, before anything is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from steelyard.base.errors import UserError
from steelyard.privacy.accounting import AccountantName, Release, noise_for, spent
from steelyard.privacy.settings import LEAST_DELTA, check_delta


@dataclass(frozen=True)
class BudgetPlan:
    """A budget over some rounds and the noise that keeps to it."""

    noise_multiplier: float
    """Noise in units of the sensitivity: z of privacy.central.noise and privacy.local.noise."""
    epsilon: float
    """What it costs in the end, by the accountant; at most the budget."""
    epsilon_after_first: float
    budget: float | None
    delta: float
    rounds: int
    sampling: float
    sampled: str
    accountant: str
    epsilon_rdp: float
    """The same by Rényi divergences, for comparison with other tools."""


def plan(
    *,
    epsilon: float | None,
    delta: float,
    rounds: int,
    sampling: float,
    noise: float | None = None,
    sampled: Literal["poisson", "fixed"] = "poisson",
    accountant: AccountantName = "pld",
    clients: int | None = None,
    accept_large_delta: bool = False,
) -> BudgetPlan:
    """Find the least noise for a budget, or, with `noise` given, what it costs."""
    if (epsilon is None) == (noise is None):
        raise UserError("--epsilon, --noise: got both or none of the two; allowed: one of them")
    if not LEAST_DELTA <= delta < 1:
        raise UserError(f"--delta: got {delta:g}; allowed: numbers from {LEAST_DELTA:g} to below 1")
    if epsilon is not None and not 0 < epsilon <= 1e6:
        raise UserError(f"--epsilon: got {epsilon:g}; allowed: numbers above 0, up to 1e6")
    if noise is not None and not 1e-3 <= noise <= 1e6:
        raise UserError(f"--noise: got {noise:g}; allowed: numbers from 0.001 to 1e6")
    if not 0 < sampling <= 1:
        raise UserError(f"--sampling: got {sampling:g}; allowed: numbers above 0, up to 1")
    if clients is not None and sampling * clients < 1:
        raise UserError(
            f"--sampling: got {sampling:g} of {clients:,} clients, which is less than one client a round; allowed: at "
            f"least {1 / clients:g}"
        )
    if not accept_large_delta:
        # A cohort has a client at least, so there are as many clients as cohorts would take to hold each of them once.
        check_delta("--delta", delta, clients or 1 / sampling, "--accept-large-delta")

    def release(z: float) -> Release:
        return Release(z, sampled if sampling < 1 or sampled == "fixed" else "all", sampling)

    found = noise if noise is not None else _noise(epsilon or 0.0, delta, release(1.0), rounds, accountant)
    return BudgetPlan(
        noise_multiplier=found,
        epsilon=spent({release(found): rounds}, delta, accountant),
        epsilon_after_first=spent({release(found): 1}, delta, accountant),
        budget=epsilon,
        delta=delta,
        rounds=rounds,
        sampling=sampling,
        sampled=sampled,
        accountant=accountant,
        epsilon_rdp=spent({release(found): rounds}, delta, "rdp"),
    )


def _noise(epsilon: float, delta: float, release: Release, rounds: int, accountant: AccountantName) -> float:
    try:
        return noise_for(epsilon, delta, [(release, rounds)], accountant)
    except UserError as error:
        raise UserError(f"--{error}") from None  # what is wrong is the option of that name
