"""Shapley values: what each player of a game adds, on average over all orders in which they could come.

    φᵢ = Σ_{S∌i} |S|!(n−|S|−1)!/n! · (v(S ∪ {i}) − v(S))

They are worked out exactly for up to twelve players (4,096 coalitions), and above that from random orders, each taken
forwards and backwards, with an interval. A coalition is worth whatever the caller says: the fall of a loss, in a round
of a federation. Everybody who needs such values takes them from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from steelyard.base.measures import Z
from steelyard.messages.updates import Floats

EXACT = 12
"""Up to so many players all coalitions are asked for."""
ORDERS = 32
"""How many random orders are taken above that, each also backwards."""

Coalitions = NDArray[np.bool_]
"""[coalitions, players]: who is in which."""


@dataclass(frozen=True, eq=False)
class Values:
    """What each player adds, with a 95 % interval; the two ends are the value itself where it is exact.

    [players], or [players, k] for a game with k worths of each coalition.
    """

    values: Floats
    low: Floats
    high: Floats
    tests: int
    """How many coalitions were asked for."""

    @property
    def exact(self) -> bool:
        """Whether all coalitions were asked for."""
        return bool((self.low == self.high).all())


def shapley_values(
    players: int,
    worth: Callable[[Coalitions], Floats],
    chance: Callable[[], np.random.Generator],
    *,
    exact: int = EXACT,
    orders: int = ORDERS,
) -> Values:
    """Return what each player adds; `worth` is asked once for all coalitions, and `chance` if there are too many.

    It returns one number for each coalition, or a row of them: the values are then those of each column's game.
    """
    if players <= exact:
        found = _exact(players, worth)
        return Values(found, found, found, 2**players)
    return _sampled(players, worth, chance(), orders)


def _exact(players: int, worth: Callable[[Coalitions], Floats]) -> Floats:
    numbers = np.arange(2**players)
    inside = (numbers[:, None] >> np.arange(players)) & 1 == 1
    worths = worth(inside)
    sizes = inside.sum(axis=1)
    # |S|!(n−|S|−1)!/n! for every size of S.
    shares = np.array([1.0 / (players * comb(players - 1, size)) for size in range(players)])
    found = np.zeros((players, *worths.shape[1:]))
    for player in range(players):
        without = numbers[~inside[:, player]]
        size = sizes[without]
        found[player] = shares[size] @ (worths[without + (1 << player)] - worths[without])
    return found


def _sampled(players: int, worth: Callable[[Coalitions], Floats], chance: np.random.Generator, orders: int) -> Values:
    drawn = np.stack([chance.permutation(players) for _ in range(orders)])
    both = np.concatenate([drawn, drawn[:, ::-1]])
    # Row k of an order has its first k players; the same coalition is asked for once, however often it comes.
    place = np.argsort(both, axis=1)
    inside = place[:, None, :] < np.arange(players + 1)[None, :, None]
    distinct, where = np.unique(inside.reshape(-1, players), axis=0, return_inverse=True)
    worths = worth(distinct)[where.reshape(len(both), players + 1)]
    added = np.diff(worths, axis=1)[np.arange(len(both))[:, None], place]
    pairs = (added[:orders] + added[orders:]) / 2
    values = pairs.mean(axis=0)
    error = Z * pairs.std(axis=0, ddof=1) / np.sqrt(orders) if orders > 1 else np.full_like(values, np.inf)
    return Values(values, values - error, values + error, len(distinct))
