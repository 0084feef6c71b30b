"""Ranks of rules over scenes, and how far two mean ranks must lie apart (Demšar 2006; Nemenyi's test)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from steelyard.base.measures import LEVEL

LEAST_SCENES = 3
"""With fewer, ranks are too coarse for any two of them to lie apart."""


def mean_ranks(values: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean rank of each column over the rows; the highest value has rank 1, equal ones share theirs."""
    ranks = [_ranks(row) for row in values]
    return [math.fsum(row[column] for row in ranks) / len(ranks) for column in range(len(values[0]))]


def _ranks(row: Sequence[float]) -> list[float]:
    return [1 + sum(other > value for other in row) + (row.count(value) - 1) / 2 for value in row]


def critical_difference(rules: int, scenes: int) -> float | None:
    """Return how far the mean ranks of so many rules over so many scenes must lie apart to differ at 5 %."""
    if rules < 2 or scenes < LEAST_SCENES:
        return None
    return _studentised(rules) * math.sqrt(rules * (rules + 1) / (6 * scenes))


@functools.cache
def _studentised(rules: int) -> float:
    """Return the 95 % point of the studentised range of so many means, over √2."""
    # For speed of start: scipy.stats is large, and only an arena that has ended needs it.
    from scipy import stats

    return float(stats.studentized_range.ppf(LEVEL, rules, math.inf)) / math.sqrt(2)
