"""The run's measures on new rows, with intervals: of all rows, and by a column of sites or groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.documents import Document
from steelyard.base.errors import UserError
from steelyard.base.measures import MEASURES
from steelyard.data.cells import parse_numbers, plain
from steelyard.data.columns import refuse_any, times_of, yes_or_no
from steelyard.data.preparation import Target
from steelyard.data.tables import Table
from steelyard.learning import evaluation
from steelyard.models.predicting import Given, Predictor, Rows


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
    """Return a model's measures on rows whose labels are known."""
    rows, target = predictor.read(given, site), predictor.preparation.target
    labels = labels_of(rows, target, label)
    predicted = _predicted(predictor, rows, labels)
    groups = [_group("all", target, predicted, labels)]
    by = _column(rows, by, predictor.preparation.owner)
    for name, chosen in _groups(rows, by):
        at = torch.from_numpy(np.flatnonzero(chosen))
        groups.append(_group(name, target, predicted[at], labels[at]))
    return Tested(by=by, groups=groups, notes=list(rows.notes))


def _predicted(predictor: Predictor, rows: Rows, labels: torch.Tensor) -> torch.Tensor:
    """Return predictions as the measures take them: classes, values, risks, labels, or the Dice of each row."""
    outputs, target = predictor.outputs(rows.features), predictor.preparation.target
    if target.task == "segmentation":
        return evaluation.dice(outputs, labels)
    if target.task == "multi-label":
        return outputs > 0
    return evaluation.predictions(outputs, len(target.names))


def _column(rows: Rows, by: str | None, owner: str | None) -> str | None:
    """Return the column of the groups: the one that is asked for, or the one that named the sites in training."""
    names = [] if rows.table is None else rows.table.names
    if by is not None and by not in names:
        raise UserError(f"--by: got '{by}', which is no column of these rows; allowed: {', '.join(names) or 'none'}")
    return by or (owner if owner in names else None)


def _groups(rows: Rows, column: str | None) -> list[tuple[str, NDArray[np.bool_]]]:
    """Return which rows each group has."""
    if column is None or rows.table is None:
        return []
    texts = np.array([plain(str(cell)) for cell in rows.table.frame[column].tolist()])
    return [(str(name), texts == name) for name in np.unique(texts)]


def _group(name: str, target: Target, predicted: torch.Tensor, labels: torch.Tensor) -> Group:
    figures, error = _figures(target, predicted, labels)
    found: list[Figure] = []
    for place, (short, value) in enumerate(figures.items()):
        # The error is that of the score, which comes first.
        measure = MEASURES[short]
        ends = measure.interval(value, len(labels), error if place == 0 else None)
        low, high = (None, None) if ends is None or np.isnan(ends).any() else ends
        found.append(Figure(measure=measure.name, value=value, low=low, high=high))
    return Group(name=name, rows=len(labels), figures=found)


def _figures(target: Target, predicted: torch.Tensor, labels: torch.Tensor) -> tuple[dict[str, float], float | None]:
    """Return the figures of a task by their names in `MEASURES`, the score first, and the standard error of that."""
    if target.task == "classes":
        counts = evaluation.confusion(predicted, labels, len(target.names))
        return {"accuracy": float(evaluation.accuracy(counts)), "macro_f1": float(evaluation.f1(counts).mean())}, None
    if target.task == "regression":
        found = {name: float(value) for name, value in evaluation.errors(predicted, labels).items()}
        ordered = {name: found[name] for name in ("rmse", "mae", "mape") if not np.isnan(found[name])}
        return ordered, evaluation.rmse_error(predicted, labels)
    figures = evaluation.FIGURES[target.task](predicted[None], labels)
    error = evaluation.ERRORS[target.task](predicted, labels)
    return {name: float(values[0]) for name, values in figures.items() if name in MEASURES}, error


# Labels of new rows, by the names that they had in training.


def labels_of(rows: Rows, target: Target, label: str | None) -> torch.Tensor:
    """Return the labels of rows as numbers: what the columns, folders or arrays say that they were read from."""
    if rows.table is not None:
        return torch.from_numpy(_of_table(rows.table, target, label or target.label))
    if rows.folders is not None and target.task == "classes":
        return torch.from_numpy(_numbers(rows.folders.classes().tolist(), target, str(rows.folders.path)))
    if (label or "y") in rows.arrays:
        values = rows.arrays[label or "y"]
        if target.task == "classes":
            return torch.from_numpy(_numbers([plain(str(value)) for value in values.tolist()], target, "y"))
        if target.task == "segmentation":
            return torch.from_numpy(values.astype(np.uint8)).flatten(1)
        return torch.from_numpy(values.astype(np.float32))
    raise UserError(
        "--label: nothing says what these rows are; allowed: a table with a column of labels, images in a folder for "
        "each class, or an .npz file with arrays x and y"
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
