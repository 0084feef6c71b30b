"""The 95 % interval of every figure: over seeds, over test rows, over whatever was drawn; and how it is written.

All tables, documents and pictures have theirs from here, so that two of them never say different things of one figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

LEVEL = 0.95
Z = 1.959963984540054
"""95 % of normal numbers lie within this many deviations."""
UNKNOWN = "–"


class EstimateJson(TypedDict):
    """A mean over seeds with its 95 % interval; `low` and `high` are NaN, in JSON null, for a single seed."""

    mean: float
    low: float
    high: float
    values: list[float]


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
    """Return mean ± t·s/√n over seeds; use it for every figure that several seeds have."""
    count = len(values)
    if not count:
        return Estimate(math.nan, math.nan, math.nan, ())
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.nan, math.nan, tuple(values))
    half = deviation(values) * half_per_deviation(count)
    return Estimate(mean, mean - half, mean + half, tuple(values))


def half_per_deviation(count: int) -> float:
    """Return t/√n: so many deviations wide is half the interval of a mean over n seeds, two or more."""
    return students_t(count - 1) / math.sqrt(count)


def students_t(freedom: float) -> float:
    """Return within how many standard errors 95 % lie, by Student's t with so many degrees of freedom."""
    # For speed of start: one seed needs no statistics, and scipy.special is a tenth of scipy.stats.
    from scipy import special

    return float(special.stdtrit(freedom, 0.5 + LEVEL / 2))


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample, with n - 1 in place of n; needs two values."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def wilson(share: float, rows: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of an accuracy measured on so many rows; sound for few rows, for 0 and for 1.

    Every accuracy of a client, a site or a part of the clients has its interval from here.
    """
    if not rows > 0:
        return 0.0, 1.0
    square = Z**2
    middle = (share + square / (2 * rows)) / (1 + square / rows)
    half = math.sqrt(square * (share * (1 - share) / rows + square / (4 * rows * rows))) / (1 + square / rows)
    return max(0.0, middle - half), min(1.0, middle + half)


def show_number(value: float, digits: int, *, signed: bool = False) -> str:
    """Write a number with a true minus sign; -0.0 is 0."""
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    return text.replace("-", "−") if float(text) else text.replace("-", "")


def show_estimate(
    value: EstimateJson | None,
    digits: int = 1,
    factor: float = 1.0,
    *,
    signed: bool = False,
    unit: str = "",
    between: str = " ± ",
) -> str:
    """Write a mean and half its interval: 94.5 ± 0.3; the mean alone for one seed, a dash where there is none."""
    if value is None or math.isnan(value["mean"]):
        return UNKNOWN
    mean = f"{show_number(value['mean'] * factor, digits, signed=signed)}{unit}"
    half = (value["high"] - value["low"]) / 2 * factor
    return mean if math.isnan(half) else f"{mean}{between}{show_number(half, digits)}"
