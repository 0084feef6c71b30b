"""What test rows add up to: sums from which the measures of a site, of all sites and of the server are computed alike.

Sums of sites add up to those of all sites, so that nobody sends single scores. Measures of the predicted classes, Brier
scores and errors of a regression come out as on the rows themselves. Scores are counted in bins of their log odds, two
rows of one bin as ties: ROC AUC differs from that of the rows by half the pairs that share a bin at most (`auc_bound`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BINS, REACH = 256, 8.0
"""Log odds from −8 to 8 are counted in so many bins; those beyond in the outermost."""
STEPS = 10
"""Bins of probabilities by which calibration is judged."""
SUM = "sum "
"""In a run's record the sums stand among the figures of each client: this word, which of how many, as sum 4/548."""
MOST_CLASSES = 1_000
NUMBERS = 6
"""Sums of a regression: rows, targets, their squares, absolute errors, squared ones, fourth powers."""


def cells_of(classes: int) -> int:
    """Return how many sums there are of so many classes; of 0, a regression."""
    return classes**2 + 2 + sides(classes) * (3 * STEPS + 2 * BINS) if classes else NUMBERS


def sides(classes: int) -> int:
    """Return how many classes are held against all others: of two the second alone."""
    return 1 if classes == 2 else classes


def classes_of(cells: int) -> int:
    """Return of how many classes so many sums are; ValueError where they are of none and of no regression."""
    found = next((classes for classes in (0, *range(2, MOST_CLASSES)) if cells_of(classes) >= cells), 0)
    if cells_of(found) != cells:
        raise ValueError(f"{cells} sums are of no number of classes")
    return found


@dataclass(frozen=True)
class Leading:
    """The measure that leads: clients are scored by it, and rules are compared by it."""

    name: str
    """As figures are called in a run's record."""
    threshold: float = 0.5
    """Above this probability the second of two classes is predicted."""


@dataclass(frozen=True, eq=False)
class Tally:
    """The sums of some rows, cells [..., n]; leading axes are models, sites, or none."""

    cells: Floats

    @property
    def classes(self) -> int:
        """Number of classes; 0 for a regression. ValueError where so many sums are of neither."""
        return classes_of(self.cells.shape[-1])

    @property
    def confusion(self) -> Floats:
        """[..., true class, predicted class]."""
        classes = self.classes
        return self._part(0, classes, classes)

    @property
    def squares(self) -> Floats:
        """[..., 2]: each row's Brier score, and its square."""
        return self._part(self.classes**2, 2)

    @property
    def calibration(self) -> Floats:
        """[..., class, 3, steps]: rows of other classes, of this class, and probabilities, by probability."""
        classes = self.classes
        return self._part(classes**2 + 2, sides(classes), 3, STEPS)

    @property
    def scores(self) -> Floats:
        """[..., class, 2, bins]: rows of other classes and of this class, by log odds."""
        classes = self.classes
        return self._part(classes**2 + 2 + sides(classes) * 3 * STEPS, sides(classes), 2, BINS)

    def _part(self, begin: int, *shape: int) -> Floats:
        return self.cells[..., begin : begin + math.prod(shape)].reshape(*self.cells.shape[:-1], *shape)


def tallied(
    outputs: Floats, labels: NDArray[np.int64] | Floats, sites: NDArray[np.intp], count: int, threshold: float = 0.5
) -> Floats:
    """Return the sums of each of `count` sites, from outputs [rows, classes] or predictions [rows] and their labels.

    One output is the log odds of the second of two classes, which is predicted above the threshold; of several classes
    the likeliest is.
    """
    if outputs.ndim == 1:
        gap = np.abs(outputs - labels)
        weights = np.stack([np.ones_like(gap), labels, labels**2, gap, gap**2, gap**4], axis=1)
        places, cells = np.broadcast_to(np.arange(NUMBERS), weights.shape), NUMBERS
    else:
        places, weights, cells = _of_classes(outputs, labels.astype(np.int64), threshold)
    found = np.bincount((sites[:, None] * cells + places).ravel(), weights.ravel(), minlength=count * cells)
    return found.astype(np.float64).reshape(count, cells)


def _of_classes(outputs: Floats, labels: NDArray[np.int64], threshold: float) -> tuple[NDArray[np.intp], Floats, int]:
    """Return which cells each row adds to, [rows, entries], how much, and how many cells there are."""
    classes = max(2, outputs.shape[1])
    if classes == 2:
        odds = outputs[:, -1:] - (outputs[:, :1] if outputs.shape[1] == 2 else 0.0)
        mine = labels[:, None] == 1
    else:
        # Of each class against the others together: less the greatest, no sum overflows.
        shifted = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        others = (shifted @ (1.0 - np.eye(classes))).clip(1e-300)
        odds = np.log(shifted.clip(1e-300)) - np.log(others)
        mine = labels[:, None] == np.arange(classes)
    chances = 0.5 * (1.0 + np.tanh(odds / 2))
    predicted = (chances[:, 0] > threshold).astype(np.int64) if classes == 2 else outputs.argmax(axis=1)
    # Half of Brier's own sum over classes; of two classes both have the same part in it.
    square = np.square(chances - mine).sum(axis=1) / (1 if classes == 2 else 2)
    step = np.minimum((chances * STEPS).astype(np.int64), STEPS - 1)
    bin = ((odds + REACH) * (BINS / (2 * REACH))).clip(0, BINS - 1).astype(np.int64)
    begin, side = classes**2 + 2, np.arange(sides(classes))
    places = [
        labels[:, None] * classes + predicted[:, None],
        np.broadcast_to([classes**2, classes**2 + 1], (len(labels), 2)),
        begin + (side * 3 + mine) * STEPS + step,
        begin + (side * 3 + 2) * STEPS + step,
        begin + len(side) * 3 * STEPS + (side * 2 + mine) * BINS + bin,
    ]
    one = np.ones((len(labels), 1))
    weights = [one, square[:, None], square[:, None] ** 2, *(np.ones_like(odds), chances, np.ones_like(odds))]
    return np.concatenate(places, axis=1), np.concatenate(weights, axis=1), cells_of(classes)


# Measures of sums; NaN where the rows say nothing.


def quotient(part: Floats | float, whole: Floats, otherwise: float = math.nan) -> Floats:
    """Return part / whole, something else (NaN) where there is nothing above 0 to divide by."""
    return np.divide(part, whole, out=np.full(np.broadcast(part, whole).shape, otherwise), where=whole > 0)


def mean_known(values: Floats) -> Floats:
    """Return the mean over the last axis of what is known; NaN where nothing is."""
    known = np.isfinite(values)
    return quotient(np.where(known, values, 0.0).sum(axis=-1), known.sum(axis=-1).astype(np.float64))


def _recall(counts: Floats) -> Floats:
    return quotient(np.diagonal(counts, axis1=-2, axis2=-1), counts.sum(axis=-1))


def _spared(counts: Floats) -> Floats:
    """Of each class: the share of other rows that are not taken for it."""
    whole, true, taken = counts.sum(axis=(-2, -1))[..., None], counts.sum(axis=-1), counts.sum(axis=-2)
    right = np.diagonal(counts, axis1=-2, axis2=-1)
    return quotient(whole - true - taken + right, whole - true)


def _f1(counts: Floats) -> Floats:
    both = counts.sum(axis=-1) + counts.sum(axis=-2)
    return quotient(2 * np.diagonal(counts, axis1=-2, axis2=-1), both)


def _of_second(each: Callable[[Floats], Floats]) -> Callable[[Floats], Floats]:
    """Return what it is of the second of two classes; of more classes the mean over them."""
    return lambda counts: each(counts)[..., 1] if counts.shape[-1] == 2 else mean_known(each(counts))


def _auc(scores: Floats) -> Floats:
    others, mine = scores[..., 0, :], scores[..., 1, :]
    below = others.cumsum(axis=-1) - others / 2
    return quotient((mine * below).sum(axis=-1), mine.sum(axis=-1) * others.sum(axis=-1))


def _precision(scores: Floats) -> Floats:
    """Σ (Rₙ − Rₙ₋₁) Pₙ over thresholds from the highest bin down, as scikit-learn defines average precision."""
    above = scores[..., ::-1].cumsum(axis=-1)
    mine = scores[..., 1, ::-1]
    precise = np.nan_to_num(quotient(above[..., 1, :], above.sum(axis=-2)))
    return quotient((mine * precise).sum(axis=-1), mine.sum(axis=-1))


def _off(calibration: Floats) -> Floats:
    """Σ |rows of the class − probabilities| / rows, over bins of probability."""
    gap = np.abs(calibration[..., 1, :] - calibration[..., 2, :]).sum(axis=-1)
    return quotient(gap, calibration[..., :2, :].sum(axis=(-2, -1)))


_BY_COUNTS: Mapping[str, Callable[[Floats], Floats]] = {
    "accuracy": lambda counts: quotient(np.trace(counts, axis1=-2, axis2=-1), counts.sum(axis=(-2, -1))),
    "balanced_accuracy": lambda counts: mean_known(_recall(counts)),
    "sensitivity": _of_second(_recall),
    "specificity": _of_second(_spared),
    "f1_score": _of_second(_f1),
}
_BY_SCORES = {"roc_auc": _auc, "average_precision": _precision}


def figures_of(tally: Tally) -> dict[str, Floats]:
    """Return every measure of the sums, by its name in `measures.MEASURES`."""
    if not tally.classes:
        return _of_numbers(tally.cells)
    rows = tally.confusion.sum(axis=(-2, -1))
    found = {name: figure(tally.confusion) for name, figure in _BY_COUNTS.items()}
    found |= {name: mean_known(figure(tally.scores)) for name, figure in _BY_SCORES.items()}
    return found | {
        "brier": quotient(tally.squares[..., 0], rows),
        "calibration_error": mean_known(_off(tally.calibration)),
    }


def _of_numbers(cells: Floats) -> dict[str, Floats]:
    rows, total, squares, absolute, squared, _ = np.moveaxis(cells, -1, 0)
    around = squares - quotient(total**2, rows)
    return {
        "mae": quotient(absolute, rows),
        "rmse": np.sqrt(quotient(squared, rows)),
        # Targets that are all the same leave only what rounding makes of 0.
        "r2": 1.0 - quotient(squared, np.where(around > 1e-12 * squares, around, 0.0)),
    }


def auc_bound(tally: Tally) -> Floats:
    """Return by how much bins can have moved ROC AUC: half the pairs of two classes that share a bin, of all pairs."""
    others, mine = tally.scores[..., 0, :], tally.scores[..., 1, :]
    return mean_known(quotient((others * mine).sum(axis=-1) / 2, mine.sum(axis=-1) * others.sum(axis=-1)))


# What leaves a node, and what its server believes.


def merged(cells: Floats, least: int) -> Floats:
    """Return sums [..., n] in which every bin that has rows has `least` of them or more, of all classes together.

    Neighbouring bins become one; use it where no answer may rest on fewer rows. A site with fewer has one bin.
    """
    found = cells.copy()
    if Tally(cells).classes:
        for each in found.reshape(-1, cells.shape[-1]):
            for table in (*Tally(each).calibration, *Tally(each).scores):
                _merge(table, least)
    return found


def _merge(table: Floats, least: int) -> None:
    """Merge columns of a table in place, each into the next until that has enough rows; the last join those before."""
    rows, full = table[:2].sum(axis=0), -1
    begin, last = 0, table.shape[1] - 1
    for end in range(last + 1):
        if rows[begin : end + 1].sum() >= least or end == last:
            whole = table[:, begin : end + 1].sum(axis=1)
            table[:, begin : end + 1] = 0.0
            full = end if whole[:2].sum() >= least or full < 0 else full
            table[:, full] += whole
            begin = end + 1


def least_class(cells: Floats) -> int:
    """Return how many rows the smallest class has that has some; all rows of a regression."""
    tally = Tally(cells)
    counts = tally.confusion.sum(axis=-1) if tally.classes else cells[..., :1]
    return int(counts[counts > 0].min(initial=np.inf)) if (counts > 0).any() else 0


def tally_fault(cells: Floats, rows: int) -> str:
    """Say why sums [models, n] cannot be those of so many rows; empty where they can."""
    try:
        tally = Tally(cells)
        classes = tally.classes
    except ValueError as error:
        return f"sums: {error}"
    counts = [cells[..., 0]]
    if classes:
        parts = (tally.confusion, tally.calibration[..., :2, :], tally.scores)
        counts = [part.sum(axis=(-2, -1)).reshape(len(cells), -1) for part in parts]
    sound = all(np.allclose(count, rows) for count in counts) and (not classes or bool((cells >= 0).all()))
    return "" if sound else f"sums: not those of {rows} rows"


# How sure they are.


def errors_of(cells: Floats) -> dict[str, float]:
    """Return the standard error of each measure of one site's sums [n]; NaN where it is not known.

    It is the jackknife's, over rows that are alike. Of several classes held against the others, whose errors go
    together in a way that sums do not tell, it is the mean over them, which is not too small.
    """
    tally = Tally(cells)
    if not tally.classes:
        return _errors_of_numbers(cells)
    counts = tally.confusion
    found = {name: _jackknife(figure, counts, counts, np.eye(counts.size)) for name, figure in _BY_COUNTS.items()}
    for name, figure in _BY_SCORES.items():
        found[name] = _mean([_jackknife(figure, mine, mine, np.eye(mine.size)) for mine in tally.scores])
    off: list[float] = []
    for mine in tally.calibration:
        means = np.nan_to_num(quotient(mine[2], mine[:2].sum(axis=0)))
        # A row takes its own probability with it; of those that are alike, their mean.
        parts = np.concatenate([np.eye(2 * STEPS), np.tile(np.diag(means), (2, 1))], axis=1)
        off.append(_jackknife(_off, mine, mine[:2], parts))
    rows, (total, squares) = float(counts.sum()), tally.squares
    return found | {"brier": _of_mean(rows, float(total), float(squares)), "calibration_error": _mean(off)}


def _errors_of_numbers(cells: Floats) -> dict[str, float]:
    rows, _, _, absolute, squared, fourth = cells.tolist()
    rmse = math.sqrt(squared / rows) if rows else math.nan
    return {
        "mae": _of_mean(rows, absolute, squared),
        # By the delta method.
        "rmse": _of_mean(rows, squared, fourth) / (2 * rmse) if rmse else 0.0,
    }


def _of_mean(rows: float, total: float, squares: float) -> float:
    return math.sqrt(max(squares - total**2 / rows, 0.0) / (rows * (rows - 1))) if rows > 1 else math.nan


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _jackknife(figure: Callable[[Floats], Floats], table: Floats, counts: Floats, parts: Floats) -> float:
    """Return the jackknife's error of a figure of a table, from which a row of each kind takes `parts`."""
    there = counts.ravel() > 0
    weights, rows = counts.ravel()[there], float(counts.sum())
    without = figure(table - parts[there].reshape(-1, *table.shape))
    if rows < 2 or not np.isfinite(without).all():
        return math.nan
    mean = float(weights @ without) / rows
    return math.sqrt((rows - 1) / rows * float(weights @ np.square(without - mean)))
