"""What scores are: name, direction, range, how they are written, and how sure they are on so many rows.

Tables, comparisons, reports and the page ask here. What a score rests on is the test rows of one client, or of the
server: an interval says how far another draw of as many rows could have moved it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

LEAST_ROWS = 30
"""On fewer, one that is right by chance moves the accuracy by more than three points: they decide nothing."""
FEWEST = 10
"""A score on fewer rows is marked "too few": it ranks nobody."""
WIDEST = 0.5
"""So is one whose interval spans more than this part of its range, such as a score of classes with two cases."""
ERROR = "score_error"
"""The figure beside each client's score that holds its standard error, where the number of rows does not give it."""


@dataclass(frozen=True)
class Measure:
    """One measure: what it is called, which way is better, what it can be, how it is written."""

    name: str
    less_is_better: bool = False
    low: float = -math.inf
    high: float = math.inf
    percent: bool = False
    """Whether it is written in per cent."""
    of_rows: bool = False
    """Whether it is the share of rows that are right, so that rows alone give its interval."""

    @property
    def bounded(self) -> bool:
        """Whether it has a least and a most value."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def factor(self) -> float:
        """What it is multiplied by to be written."""
        return 100.0 if self.percent else 1.0

    @property
    def heading(self) -> str:
        """Its name with its unit, for a column."""
        return f"{self.name} (%)" if self.percent else self.name

    @property
    def direction(self) -> str:
        """Which way is better, in words."""
        return "lower is better" if self.less_is_better else "higher is better"

    def show(self, value: float | None) -> str:
        """Write a value: 89.32%, 0.8421; "-" where there is none."""
        if value is None or math.isnan(value):
            return "-"
        return f"{value:.2%}" if self.percent else f"{value:.4g}"

    def show_interval(self, low: float, high: float) -> str:
        """Write an interval in the measure's unit: [75–96], [0.71–0.89], [−122 to −82]; [?] where nothing is known."""
        if math.isnan(low) or math.isnan(high):
            return "[?]"
        if self.percent:
            return f"[{100 * low:.0f}–{100 * high:.0f}]"
        ends = [(f"{end:,.0f}" if abs(end) >= 100 else f"{end:.2g}").replace("-", "−") for end in (low, high)]
        return f"[{(' to ' if low < 0 else '–').join(ends)}]"

    def interval(self, score: float, rows: float, error: float | None = None) -> tuple[float, float] | None:
        """Return the 95 % interval of a score on so many rows, NaN where these cannot say; None where nobody knows.

        A share of rows has Wilson's. Others have Student's t on their standard `error` (the jackknife's, from
        `learning.evaluation`), cut to the range. An error of 0, such as that of two perfect rows, says nothing about
        further rows: a bounded measure has Wilson's interval then, which no mean of values in its range can exceed.
        """
        if self.of_rows:
            return wilson(score, rows)
        if error is None:
            return None
        if math.isnan(error) or not rows > 1 or (error == 0 and not self.bounded):
            return (self.low, self.high) if self.bounded else (math.nan, math.nan)
        if error == 0:
            width = self.high - self.low
            low, high = wilson((score - self.low) / width, rows)
            return self.low + width * low, self.low + width * high
        half = students_t(rows - 1) * error
        return max(self.low, score - half), min(self.high, score + half)

    def too_few(self, rows: float, low: float, high: float) -> bool:
        """Whether a score with this interval rests on too few rows to rank whom it is about."""
        wide = high - low > WIDEST * (self.high - self.low) if self.bounded else math.isnan(low + high)
        return rows < FEWEST or wide


MEASURES: Mapping[str, Measure] = MappingProxyType(
    {
        "accuracy": Measure("accuracy", low=0.0, high=1.0, percent=True, of_rows=True),
        "balanced_accuracy": Measure("balanced accuracy", low=0.0, high=1.0, percent=True),
        "sensitivity": Measure("sensitivity", low=0.0, high=1.0, percent=True),
        "specificity": Measure("specificity", low=0.0, high=1.0, percent=True),
        "roc_auc": Measure("ROC AUC", low=0.0, high=1.0),
        "average_precision": Measure("average precision", low=0.0, high=1.0),
        "f1_score": Measure("F1", low=0.0, high=1.0),
        "brier": Measure("Brier score", less_is_better=True, low=0.0, high=1.0),
        "calibration_error": Measure("calibration error", less_is_better=True, low=0.0, high=1.0),
        "macro_f1": Measure("macro F1", low=0.0, high=1.0),
        "micro_f1": Measure("micro F1", low=0.0, high=1.0),
        "dice": Measure("mean Dice", low=0.0, high=1.0),
        "c_index": Measure("C-index", low=0.0, high=1.0),
        "integrated_brier": Measure("integrated Brier score", less_is_better=True, low=0.0),
        "mape": Measure("MAPE", less_is_better=True, low=0.0, percent=True),
        "mae": Measure("MAE", less_is_better=True, low=0.0),
        "rmse": Measure("RMSE", less_is_better=True, low=0.0),
        "minus_rmse": Measure("minus RMSE", high=0.0),
        "r2": Measure("R²", high=1.0),
    }
)
"""The measures by the name that figures have in a run's record."""
_BY_NAME = {measure.name: measure for measure in MEASURES.values()}


def measure_of(name: str) -> Measure:
    """Return a measure by its name, by that of its figure or by what a sweep calls it, such as server-mape.

    Of one that others named, such as ndcg@10, more is better.
    """
    short = name.rpartition(", ")[2]
    return _BY_NAME.get(short) or MEASURES.get(short.removeprefix("server-").replace("-", "_")) or Measure(name)


@dataclass(frozen=True)
class TaskMeasures:
    """How models of one task are measured."""

    score: str
    """Each client's score, the name of a measure for which more is better."""
    figure: str
    """The figure of the server's tests by which rules are recommended."""
    criterion: str
    """The criterion by which a model does well on the server's rows."""


TASKS: Mapping[str, TaskMeasures] = MappingProxyType(
    {
        "classes": TaskMeasures("accuracy", "accuracy", "VP"),
        "regression": TaskMeasures("minus RMSE", "rmse", "VE"),
        "survival": TaskMeasures("C-index", "c_index", "VC"),
        "segmentation": TaskMeasures("mean Dice", "dice", "VM"),
        "multi-label": TaskMeasures("macro F1", "macro_f1", "VL"),
    }
)


# The 95 % interval of every figure, and how it is written.


LEVEL = 0.95
Z = 1.959963984540054
"""95 % of normal numbers lie within this many deviations."""
UNKNOWN = "–"


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

    def __getitem__(self, name: str) -> Any:
        """Return a part by its name in JSON, as scripts of before documents were classes read it."""
        return getattr(self, name)


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


def wilson_difference(share: float, other: float, rows: float) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two accuracies, each on so many rows, from both Wilson intervals.

    Newcombe's (1998, method 10). On the same rows it is wider than need be: most are right or wrong for both.
    """
    (low, high), (least, most) = wilson(share, rows), wilson(other, rows)
    below, above = math.hypot(share - low, most - other), math.hypot(high - share, other - least)
    return share - other - below, share - other + above


def show_number(value: float, digits: int, *, signed: bool = False) -> str:
    """Write a number with a true minus sign; -0.0 is 0."""
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    return text.replace("-", "−") if float(text) else text.replace("-", "")


def show_estimate(
    value: Estimate | None,
    digits: int = 1,
    factor: float = 1.0,
    *,
    signed: bool = False,
    unit: str = "",
    between: str = " ± ",
) -> str:
    """Write a mean and half its interval: 94.5 ± 0.3; the mean alone for one seed, a dash where there is none."""
    if value is None or math.isnan(value.mean):
        return UNKNOWN
    mean = f"{show_number(value.mean * factor, digits, signed=signed)}{unit}"
    half = value.half * factor
    return mean if math.isnan(half) else f"{mean}{between}{show_number(half, digits)}"
