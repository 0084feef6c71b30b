"""A paired test that may be looked at after every seed: betting on the sign of each difference.

If two rules do not differ, a difference is as likely d as −d, whatever its size (they are exchangeable within a seed).
Given |dᵢ|, the sign is then a fair coin, and with stakes βᵢ that only the past and |dᵢ| decide

    Wₙ = Π (1 + βᵢ sign dᵢ),   |βᵢ| < 1

is a martingale that begins at 1. By Ville's inequality it ever reaches 1/α with a chance of α at most, so 1/max W is a
p-value at any time: whoever stops when it is small enough makes no more false verdicts than were allowed. No normal
distribution is assumed, and no number of seeds in advance. The stakes are those that would be best if differences were
normal with the mean and variance of the past ones, βᵢ = tanh(m|dᵢ|/s²); half of the wealth is on each side.

Ramdas, Grünwald, Vovk and Shafer 2023, Game-theoretic statistics and safe anytime-valid inference, Statistical Science
38(4), https://doi.org/10.1214/23-STS894; Waudby-Smith and Ramdas 2024, Estimating means of bounded random variables by
betting, JRSS B 86(1), https://doi.org/10.1093/jrsssb/qkad009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST = 0.95
"""The most of the wealth that is staked on one sign, so that one of the other sign does not end it."""
FIRST = 0.5
"""The stake on the first difference, of which nothing is known."""


def anytime_p(differences: Sequence[float]) -> float:
    """Return a p-value of "no difference", two-sided, that holds however often it was looked at on the way.

    Use it where seeds are added until something is decided; `paired_p` is stronger where their number was fixed before.
    """
    up, down = _wealth(differences), _wealth([-value for value in differences])
    return 1.0 / max([1.0, *((one + other) / 2 for one, other in zip(up, down, strict=True))])


def anytime_equivalence_p(differences: Sequence[float], margin: float) -> float:
    """Return a p-value of "differs by the margin or more" that holds at any time: two one-sided tests, both to be won.

    It needs differences that lie about their middle symmetrically, with one peak.
    """
    above = _wealth([value + margin for value in differences])
    below = _wealth([margin - value for value in differences])
    return 1.0 / min(max([1.0, *above]), max([1.0, *below]))


def spent(level: float, number: int) -> float:
    """Return the level of the so manyth test of a row without end whose levels sum to `level`: level/(n(n + 1))."""
    return level / (number * (number + 1))


def _wealth(differences: Sequence[float]) -> list[float]:
    """Return the wealth after each difference of a player who bets that they are above 0."""
    wealth, total, squares = 1.0, 0.0, 0.0
    found: list[float] = []
    for count, value in enumerate(differences):
        stake = FIRST
        if count:
            mean = total / (count + 1)
            # The least variance keeps differences that were all the same from dividing by 0.
            variance = max(squares / count - mean * mean, 1e-12)
            stake = min(MOST, math.tanh(max(0.0, mean) * abs(value) / variance))
        wealth *= 1.0 + stake * ((value > 0) - (value < 0))
        found.append(wealth)
        total, squares = total + value, squares + value * value
    return found
