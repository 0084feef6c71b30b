"""The run's measures on new rows, with intervals: of all rows, and by a column of sites or groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import UserError, counted, first_names
from steelyard.base.tallies import Tally, errors_of, figures_of, tallied
from steelyard.data.cells import parse_numbers, plain_texts
from steelyard.data.columns import refuse_any, times_of, yes_or_no
from steelyard.data.new_rows import NewRows, site_column
from steelyard.data.preparation import Target
from steelyard.data.tables import Table
from steelyard.learning import evaluation
from steelyard.models.document import Figure, Group, Tested
from steelyard.models.predicting import Given, Predictor

Labels = str | Sequence[Any] | NDArray[Any] | None
"""The column, or the array of an .npz file, that holds what is to be predicted; or that itself, one for each row."""


def measured(
    predictor: Predictor, given: Given, label: Labels = None, *, by: str | None = None, site: str | None = None
) -> Tested:
    """Return a model's measures on rows whose labels are known: of a run's tests, and what these rows add up to."""
    rows = predictor.read(given, site)
    labels = labels_of(rows, predictor.preparation.target, label)
    outputs = predictor.outputs(rows.features)
    names = [] if rows.table is None else rows.table.names
    if by is not None and by not in names:
        raise UserError(f"--by: got '{by}', which is no column of these rows; allowed: {', '.join(names) or 'none'}")
    groups = [_group("all", predictor, outputs, labels)]
    if rows.table is not None and (by := by or site_column(rows.table, predictor.preparation)):
        texts = np.array(plain_texts(rows.table.frame[by].tolist()))
        for name in np.unique(texts).tolist():
            at = torch.from_numpy(np.flatnonzero(texts == name))
            groups.append(_group(name, predictor, outputs[at], labels[at]))
    return Tested(by=by, groups=groups, notes=list(rows.notes))


_FIRST = ("accuracy", "rmse", "c_index", "dice", "macro_f1")
"""Scores of tasks, which come first where a run has not chosen another measure."""


def _group(name: str, predictor: Predictor, outputs: torch.Tensor, labels: torch.Tensor) -> Group:
    figures, errors = _figures(predictor.preparation.target, outputs, labels, predictor.document.origin.threshold)
    lead = [measure for measure in (predictor.document.origin.measure, *_FIRST) if measure in figures]
    found = [
        Figure.of(short, figures[short], len(labels), errors.get(short)) for short in dict.fromkeys([*lead, *figures])
    ]
    return Group(name=name, rows=len(labels), figures=[figure for figure in found if figure.value is not None])


def _figures(
    target: Target, outputs: torch.Tensor, labels: torch.Tensor, threshold: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures of a task by their names in `MEASURES`, and the standard errors that are known."""
    if target.task not in ("classes", "regression"):
        predicted = evaluation.dice(outputs, labels) if target.task == "segmentation" else outputs[:, 0]
        predicted = outputs > 0 if target.task == "multi-label" else predicted
        found = evaluation.FIGURES[target.task](predicted[None], labels)
        figures = {name: float(value[0]) for name, value in found.items()}
        return figures, {next(iter(figures)): evaluation.ERRORS[target.task](predicted, labels)}
    values, everyone = outputs.double().numpy(), np.zeros(len(labels), dtype=np.intp)
    given = values if target.task == "classes" else values[:, 0]
    tally = Tally(tallied(given, labels.numpy(), everyone, 1, threshold)[0])
    figures = {name: float(value) for name, value in figures_of(tally).items()}
    if target.task == "classes":
        figures["macro_f1"] = float(evaluation.f1(tally.confusion).mean())
    else:
        figures["mape"] = float(evaluation.errors(outputs[:, 0], labels)["mape"])
    return figures, errors_of(tally.cells)


# Labels of new rows, by the names that they had in training.


def labels_of(rows: NewRows, target: Target, label: Labels) -> torch.Tensor:
    """Return the labels of rows as numbers: as given, or what the columns, folders or arrays say that they are from."""
    named = label if isinstance(label, str) else None
    if label is not named:
        values: Any = label
    elif rows.table is not None:
        return torch.from_numpy(_of_table(rows.table, target, named or target.label))
    elif rows.folders is not None and target.task == "classes":
        values = rows.folders.classes()
    elif rows.labels or (named or "y") in rows.arrays:
        values = rows.labels or rows.arrays[named or "y"]
    else:
        raise UserError(
            "--label: nothing says what these rows are; allowed: a table with a column of labels, images in a folder "
            "for each class, an .npz file with arrays x and y, texts in a .json file as LEAF writes them, or labels "
            "beside rows in Python"
        )
    values = np.asarray(values)
    if len(values) != len(rows.features):
        raise UserError(f"labels: got {len(values):,} for {counted(len(rows.features), 'row')}; allowed: one for each")
    if target.task == "classes":
        return torch.from_numpy(_numbers(values.tolist(), target, "labels"))
    if values.dtype.kind not in "biuf":
        raise UserError("labels: hold what is no number; expected numbers")
    if target.task == "segmentation":
        return torch.from_numpy(values.astype(np.uint8)).flatten(1)
    return torch.from_numpy(values.astype(np.float32))


def _of_table(table: Table, target: Target, label: str) -> NDArray[Any]:
    every = np.arange(len(table.frame))
    columns = [label] if target.task != "multi-label" else target.names
    for name in filter(None, (*columns, target.event)):
        if name not in table.names:
            raise UserError(f"--label: {table.path} has no column '{name}'; allowed: {', '.join(table.names)}")
    if target.task == "multi-label":
        found = [yes_or_no(table, "further_labels", name, every) for name in columns]
        return np.column_stack(found).astype(np.float32)
    cells: Any = table.frame[label]
    if target.task == "classes" and target.positive_above is None:
        refuse_any(table, label, np.flatnonzero(cells.isna().to_numpy()), "expected a label in every row")
        return _numbers(cells.tolist(), target, f"{table.path}: column '{label}'")
    numbers = parse_numbers(cells)
    refuse_any(table, label, np.flatnonzero(~np.isfinite(numbers)), "expected a number")
    if target.positive_above is not None:
        return (numbers > target.positive_above).astype(np.int64)
    if target.event is not None:
        numbers, _ = times_of(table, label, target.event, every, numbers)
    return numbers.astype(np.float32)


def _numbers(cells: Sequence[object], target: Target, where: str) -> NDArray[np.int64]:
    names = plain_texts(cells)
    number = {name: place for place, name in enumerate(target.names)}
    if strange := next((name for name in names if name not in number), None):
        raise UserError(f"{where} holds '{strange[:40]}'; allowed: the classes {first_names(target.names, 12)}")
    return np.array([number[name] for name in names], dtype=np.int64)
