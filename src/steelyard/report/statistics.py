"""What can be said from a few seeds: means with intervals, paired tests, Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.report.documents import EstimateJson

LEVEL = 0.95
ALPHA = 0.05


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval (Student's t); the interval is nan for a single seed."""

    mean: float
    low: float
    high: float
    values: tuple[float, ...]

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    def as_json(self) -> EstimateJson:
        """Return it as documents hold it."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "values": list(self.values)}


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean ± t·s/√n over seeds."""
    count = len(values)
    if not count:
        return Estimate(math.nan, math.nan, math.nan, ())
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.nan, math.nan, tuple(values))
    # For speed of start: one seed needs no statistics, and scipy.special is a tenth of scipy.stats.
    from scipy import special

    half = float(special.stdtrit(count - 1, 0.5 + LEVEL / 2)) * _deviation(values) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, tuple(values))


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def paired_p(differences: Sequence[float]) -> float | None:
    """Return the two-sided p-value of a paired t-test on differences from the baseline; None for fewer than two.

    Differences that are all the same have no spread to test with: all 0 gives 1, else the exact p of a sign test, 2/2ⁿ,
    the least that n pairs can show without a model of their spread.
    """
    count = len(differences)
    if count < 2:
        return None
    mean, deviation = math.fsum(differences) / count, _deviation(differences)
    if deviation <= 1e-12 * max(1.0, abs(mean)):
        return 1.0 if abs(mean) <= 1e-12 else 2.0 / 2.0**count
    # For speed of start: one seed needs no statistics, and scipy.special is a tenth of scipy.stats.
    from scipy import special

    return float(2 * special.stdtr(count - 1, -abs(mean) / (deviation / math.sqrt(count))))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return Holm's step-down adjusted p-values: the i-th smallest times (n − i + 1), never falling, at most 1.

    Use it when one baseline is compared with many rules; entries without a test stay None and do not count.
    """
    tested = sorted((value, index) for index, value in enumerate(values) if value is not None)
    adjusted: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (value, index) in enumerate(tested):
        highest = max(highest, min(1.0, (len(tested) - rank) * value))
        adjusted[index] = highest
    return adjusted


def verdict(mean: float, adjusted: float | None) -> str:
    """Return better, worse, not distinguishable, or untested (a single seed); more is better."""
    if adjusted is None:
        return "untested"
    if adjusted < ALPHA and mean:
        return "better" if mean > 0 else "worse"
    return "not distinguishable"
