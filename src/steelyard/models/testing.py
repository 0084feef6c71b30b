"""The run's measures on new rows, with intervals: of all rows, and by a column of sites or groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.documents import Document
from steelyard.base.errors import UserError
from steelyard.base.measures import MEASURES
from steelyard.base.tallies import Tally, errors_of, figures_of, tallied
from steelyard.data.cells import parse_numbers, plain
from steelyard.data.columns import refuse_any, times_of, yes_or_no
from steelyard.data.new_rows import NewRows
from steelyard.data.preparation import Target
from steelyard.data.tables import Table
from steelyard.learning import evaluation
from steelyard.models.predicting import Given, Predictor


class Figure(Document):
    """One measure."""

    measure: str
    value: float
    low: float | None = None
    """Of its 95 % interval; None where nothing says how wide that is."""
    high: float | None = None


class Group(Document):
    """Rows that were tested together."""

    name: str
    """all, or what the rows have in the column."""
    rows: int
    figures: list[Figure]
    """The score first."""


class Tested(Document):
    """The answer of `steelyard test`."""

    by: str | None
    """The column of the groups."""
    groups: list[Group]
    """All rows first."""
    notes: list[str]
    """What of the rows is not as it was in training."""


def measured(
    predictor: Predictor, given: Given, label: str | None = None, *, by: str | None = None, site: str | None = None
) -> Tested:
    """Return a model's measures on rows whose labels are known: of a run's tests, and what these rows add up to."""
    rows = predictor.read(given, site)
    labels = labels_of(rows, predictor.preparation.target, label)
    outputs = predictor.outputs(rows.features)
    by = _column(rows, by, predictor.preparation.owner)
    groups = [_group("all", predictor, outputs, labels)]
    for name, chosen in _groups(rows, by):
        at = torch.from_numpy(np.flatnonzero(chosen))
        groups.append(_group(name, predictor, outputs[at], labels[at]))
    return Tested(by=by, groups=groups, notes=list(rows.notes))


def _column(rows: NewRows, by: str | None, owner: str | None) -> str | None:
    """Return the column of the groups: the one that is asked for, or the one that named the sites in training."""
    names = [] if rows.table is None else rows.table.names
    if by is not None and by not in names:
        raise UserError(f"--by: got '{by}', which is no column of these rows; allowed: {', '.join(names) or 'none'}")
    return by or (owner if owner in names else None)


def _groups(rows: NewRows, column: str | None) -> list[tuple[str, NDArray[np.bool_]]]:
    """Return which rows each group has."""
    if column is None or rows.table is None:
        return []
    texts = np.array([plain(str(cell)) for cell in rows.table.frame[column].tolist()])
    return [(str(name), texts == name) for name in np.unique(texts)]


def _group(name: str, predictor: Predictor, outputs: torch.Tensor, labels: torch.Tensor) -> Group:
    target = predictor.preparation.target
    figures, errors = _figures(target, outputs, labels)
    if target.task in ("classes", "regression"):
        further, sure = _summed(target, outputs, labels, predictor.threshold)
        own = predictor.threshold == 0.5  # else the run's own accuracy goes by another class than is predicted
        figures = {**further, **figures} if own else {**figures, **further}
        errors = {**sure, **errors}
    lead = [measure for measure in (predictor.measure, *_FIRST) if measure in figures]
    found: list[Figure] = []
    for short in dict.fromkeys([*lead, *figures]):
        measure = MEASURES[short]
        if np.isnan(figures[short]):
            continue
        ends = measure.interval(figures[short], len(labels), errors.get(short))
        low, high = (None, None) if ends is None or np.isnan(ends).any() else ends
        found.append(Figure(measure=measure.name, value=figures[short], low=low, high=high))
    return Group(name=name, rows=len(labels), figures=found)


_FIRST = ("accuracy", "rmse", "c_index", "dice", "macro_f1")
"""Scores of tasks, which come first where a run has not chosen another measure."""


def _figures(
    target: Target, outputs: torch.Tensor, labels: torch.Tensor
) -> tuple[dict[str, float], dict[str, float | None]]:
    """Return the figures of a task by their names in `MEASURES`, and the standard error of its score."""
    if target.task == "classes":
        counts = evaluation.confusion(evaluation.predictions(outputs, len(target.names)), labels, len(target.names))
        found = {"accuracy": float(evaluation.accuracy(counts)), "macro_f1": float(evaluation.f1(counts).mean())}
        return found, {}
    if target.task == "regression":
        values = outputs[:, 0]
        found = {name: float(value) for name, value in evaluation.errors(values, labels).items()}
        return found, {"rmse": evaluation.rmse_error(values, labels)}
    if target.task == "segmentation":
        predicted = evaluation.dice(outputs, labels)
    else:
        predicted = outputs > 0 if target.task == "multi-label" else outputs[:, 0]
    figures = {
        name: float(value[0]) for name, value in evaluation.FIGURES[target.task](predicted[None], labels).items()
    }
    return figures, {next(iter(figures)): evaluation.ERRORS[target.task](predicted, labels)}


def _summed(
    target: Target, outputs: torch.Tensor, labels: torch.Tensor, threshold: float
) -> tuple[dict[str, float], dict[str, float | None]]:
    """Return the measures that sums of rows give, with their standard errors."""
    values = outputs.double().numpy()
    given = values if target.task == "classes" else values[:, 0]
    everyone = np.zeros(len(labels), dtype=np.intp)
    cells = tallied(given, labels.numpy(), everyone, 1, threshold)[0]
    figures = {name: float(value) for name, value in figures_of(Tally(cells)).items()}
    known = {name: error for name, error in errors_of(cells).items() if name in figures}
    return figures, {name: None if np.isnan(error) else error for name, error in known.items()}


# Labels of new rows, by the names that they had in training.


def labels_of(rows: NewRows, target: Target, label: str | None) -> torch.Tensor:
    """Return the labels of rows as numbers: what the columns, folders or arrays say that they were read from."""
    if rows.table is not None:
        return torch.from_numpy(_of_table(rows.table, target, label or target.label))
    if rows.folders is not None and target.task == "classes":
        return torch.from_numpy(_numbers(rows.folders.classes().tolist(), target, str(rows.folders.path)))
    if rows.labels and len(rows.labels) == len(rows.features):
        return torch.from_numpy(_numbers(list(rows.labels), target, "y"))
    if (label or "y") in rows.arrays:
        values = rows.arrays[label or "y"]
        if target.task == "classes":
            return torch.from_numpy(_numbers([plain(str(value)) for value in values.tolist()], target, "y"))
        if target.task == "segmentation":
            return torch.from_numpy(values.astype(np.uint8)).flatten(1)
        return torch.from_numpy(values.astype(np.float32))
    raise UserError(
        "--label: nothing says what these rows are; allowed: a table with a column of labels, images in a folder for "
        "each class, an .npz file with arrays x and y, or texts in a .json file as LEAF writes them"
    )


def _of_table(table: Table, target: Target, label: str) -> NDArray[Any]:
    every = np.arange(len(table.frame))
    columns = [label] if target.task != "multi-label" else target.names
    if target.event is not None:
        columns = [*columns, target.event]
    if lacking := [name for name in columns if name not in table.names]:
        raise UserError(f"--label: {table.path} has no column '{lacking[0]}'; allowed: {', '.join(table.names)}")
    if target.task == "multi-label":
        found = [yes_or_no(table, "further_labels", name, every) for name in columns]
        return np.column_stack(found).astype(np.float32)
    cells: Any = table.frame[label]
    if target.task == "classes" and target.positive_above is None:
        refuse_any(table, label, np.flatnonzero(cells.isna().to_numpy()), "expected a label in every row")
        return _numbers([plain(str(cell)) for cell in cells.tolist()], target, f"{table.path}: column '{label}'")
    numbers = parse_numbers(cells)
    refuse_any(table, label, np.flatnonzero(~np.isfinite(numbers)), "expected a number")
    if target.positive_above is not None:
        return (numbers > target.positive_above).astype(np.int64)
    if target.event is not None:
        numbers, _ = times_of(table, label, target.event, every, numbers)
    return numbers.astype(np.float32)


def _numbers(names: list[str], target: Target, where: str) -> NDArray[np.int64]:
    number = {name: place for place, name in enumerate(target.names)}
    if strange := next((name for name in names if name not in number), None):
        raise UserError(f"{where} holds '{strange[:40]}'; allowed: the classes {', '.join(target.names[:12])}")
    return np.array([number[name] for name in names], dtype=np.int64)
