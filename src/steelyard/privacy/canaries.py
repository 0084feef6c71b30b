"""Does the guarantee hold? A lower bound on ε from what an attacker guesses right about canaries.

A canary is a client that an auditor plants: with probability 1/2 it takes part as one case of the guarantee says,
else as the other says. The attacker sees all that is released and says of the canaries that it is surest about which of
the two it was. A mechanism that is (ε, δ)-private limits how many of r such guesses can be right: about as many as r
coins show that fall right with probability e^ε/(1 + e^ε),

    P[at least v right] ≤ f(v) + 2mδ · max_i (f(v − i) − f(v))/i        f(v) = P[Bin(r, e^ε/(1 + e^ε)) ≥ v]

for m canaries, in one run or in several (T. Steinke, M. Nasr, M. Jagielski: "Privacy Auditing with One (1) Training
Run", NeurIPS 2023, theorem 5.2). A bound above the accounted ε shows a fault; one far below says only that this attack
is not the worst one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from steelyard.messages.updates import Floats

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
    coin = 1.0 / (1.0 + np.exp(-epsilon))
    whole = float(binom.sf(right - 1, guesses, coin))
    if right < 1:
        return 1.0
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, coin))
    slope = float((below / np.arange(1, right + 1)).max())
    return min(1.0, whole + 2.0 * canaries * delta * slope)
