"""The kinds of flaws that clients may have: in which ways, in what amounts, what they are aimed at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

FlawKind = Literal[
    "labels-flipped",
    "noisy",
    "blurred",
    "missing",
    "rows-repeated",
    "classes-missing",
    "few-steps",
    "stale",
    "own-model",
    "copy",
    "free-rider",
    "claims-size",
    "claims-criteria",
    "reversed",
    "gaussian",
    "alie",
    "ipm",
    "min-max",
    "adaptive",
    "boosted",
    "bias",
    "backdoor",
]

Way = Literal["uniform", "pairs", "class", "plain", "colluding", "all", "alie", "ipm", "drift", "pixels", "semantic"]

OMNISCIENT: frozenset[str] = frozenset({"alie", "ipm", "min-max", "adaptive"})
"""Attacks whose clients see the updates of all others of the cohort."""
NEEDS_CLASSES: frozenset[str] = frozenset({"labels-flipped", "classes-missing", "bias", "backdoor"})
"""Kinds that make no sense for a regression."""
WAYS: Mapping[str, tuple[str, ...]] = {
    "labels-flipped": ("uniform", "pairs", "class"),
    "free-rider": ("plain", "colluding"),
    "adaptive": ("all", "alie", "ipm", "drift"),
    "backdoor": ("pixels", "semantic"),
}
"""By kind: the ways that `how` may name, the default first."""
AIMED: frozenset[str] = frozenset({"backdoor", "bias"})
"""Kinds that have a `target`, beside labels flipped by class."""
CLAIMS: frozenset[str] = frozenset({"claims-size", "claims-criteria"})
"""Kinds that may begin in a later round."""


class Amount(NamedTuple):
    """What `amount` may be for one kind of flaw."""

    default: float
    allowed: str
    least: float
    most: float
    least_itself: bool = False
    """Whether the least is allowed itself."""
    most_itself: bool = True
    """Whether the most is allowed itself."""
    whole: bool = False

    def fits(self, value: float) -> bool:
        """Say whether a kind takes this amount."""
        above = value >= self.least if self.least_itself else value > self.least
        below = value <= self.most if self.most_itself else value < self.most
        return math.isfinite(value) and above and below and (not self.whole or value == int(value))


AMOUNTS: Mapping[str, Amount] = {
    "labels-flipped": Amount(1.0, "more than 0, at most 1 (share of its rows)", 0, 1),
    "noisy": Amount(1.0, "more than 0 (standard deviations)", 0, math.inf),
    "blurred": Amount(1.0, "more than 0, at most 100 (sigma in pixels)", 0, 100),
    "missing": Amount(0.5, "more than 0, at most 1 (share of the columns or pixels)", 0, 1),
    "rows-repeated": Amount(10, "1 or more (times each row is there)", 1, math.inf, least_itself=True),
    "classes-missing": Amount(0.5, "more than 0, less than 1 (share of its classes)", 0, 1, most_itself=False),
    "few-steps": Amount(0.1, "more than 0, at most 1 (share of its rows)", 0, 1),
    "stale": Amount(5, "a whole number from 1 (rounds)", 1, math.inf, least_itself=True, whole=True),
    "claims-size": Amount(10, "more than 0 (times its number of samples)", 0, math.inf),
    "claims-criteria": Amount(1000, "more than 0 (times what is true)", 0, math.inf),
    "reversed": Amount(1, "more than 0 (times its own update)", 0, math.inf),
    "gaussian": Amount(10, "more than 0 (times the size of its own update)", 0, math.inf),
    "alie": Amount(1.5, "more than 0 (standard deviations)", 0, math.inf),
    "ipm": Amount(2, "more than 0 (times the mean update)", 0, math.inf),
    "boosted": Amount(1, "more than 0 (1: as much as replaces the model)", 0, math.inf),
    "bias": Amount(1, "more than 0 (times the length of its own update)", 0, math.inf),
    "backdoor": Amount(0.5, "more than 0, at most 1 (share of its rows)", 0, 1),
}
"""By kind, for the kinds that have an amount."""
