"""Cells as `[data.columns.NAME]` says they are meant: units, words for missing, limits of detection, spellings.

Rows that are left out are named here too. pandas is imported inside functions, for speed of start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError, counted, first_names, nearest
from steelyard.data.cells import emptied, limit_of, parse_numbers, plain
from steelyard.data.profile import repeats, row_marks
from steelyard.data.tables import Table, with_columns

if TYPE_CHECKING:
    from steelyard.data.sources.csv import ColumnSettings, Csv

BEYOND = "{} beyond limit"
"""The name of the column that marks cells beyond a limit of detection."""


def mended(table: Table, columns: Mapping[str, ColumnSettings], owner: str | None) -> Table:
    """Return a table with what settings say of single columns done; the file stays as it is."""
    frame, notes = table.frame, list(table.notes)
    for name, column in columns.items():
        if name not in table.names:
            raise UserError(
                f"data.columns: found no column '{name}' in {table.path}{nearest(name, table.names)}; "
                f"allowed: {first_names(table.names, 12)}"
            )
        cells = frame[name]
        if column.missing:
            cells = emptied(cells, [plain(text) for text in column.missing])
        if column.limits:
            cells, beyond = _limits(cells)
            frame = with_columns(frame, {BEYOND.format(name): beyond.astype(np.float64)})
            notes.append(f"{table.path.name}: '{name}' is beyond a limit of detection in {_rows(beyond)}")
        if column.synonyms:
            cells = _spelled(cells, column)
        if column.factor != 1 or column.offset != 0:
            cells = _converted(cells, column, None if owner is None else frame[owner])
        if column.range is not None:
            low, high = column.range
            numbers = parse_numbers(cells)
            outside = (numbers < low) | (numbers > high)
            notes.append(f"{table.path.name}: '{name}' is outside {low:g} to {high:g} in {_rows(outside)}")
            cells = cells.mask(outside)
        frame = frame.assign(**{name: cells})
    return replace(table, frame=frame, notes=tuple(notes)) if columns else table


def _rows(rows: NDArray[np.bool_]) -> str:
    return counted(int(rows.sum()), "row")


def _limits(cells: Any) -> tuple[Any, NDArray[np.bool_]]:
    """Return cells such as <5 as the number in them, and which those are."""
    if cells.dtype.kind in "iufb":
        return cells, np.zeros(len(cells), dtype=np.bool_)
    limits = np.array([limit_of(cell) if isinstance(cell, str) else np.nan for cell in cells.tolist()])
    beyond = ~np.isnan(limits)
    return cells.astype(object).mask(beyond, limits), beyond


def _spelled(cells: Any, column: ColumnSettings) -> Any:
    usual = {plain(other): value for value, others in column.synonyms.items() for other in others}
    texts = cells.map(lambda cell: usual.get(plain(str(cell)), cell), na_action="ignore")
    return texts.astype(object) if texts.dtype != cells.dtype else texts


def _converted(cells: Any, column: ColumnSettings, owners: Any) -> Any:
    """Return numbers in the unit that all sites have; what is no number stays, for the reader to refuse."""
    numbers = parse_numbers(cells)
    names = None if owners is None else owners.astype(str).str.strip()

    def of_rows(given: float | dict[str, float], usual: float) -> Any:
        if not isinstance(given, dict):
            return given
        if names is None:
            raise UserError("data.columns: got a table by site, and data.owner names no sites; allowed: one number")
        if unknown := [site for site in given if not (names == site).any()]:
            sites = [str(site) for site in names.unique()]
            raise UserError(
                f"data.columns: found no site '{unknown[0]}'{nearest(unknown[0], sites)}; allowed: {first_names(sites)}"
            )
        return names.map(given).fillna(usual).to_numpy(dtype=np.float64)

    changed = numbers * of_rows(column.factor, 1.0) + of_rows(column.offset, 0.0)
    return type(cells)(np.where(np.isnan(numbers), cells, changed), index=cells.index).infer_objects()


def left_out(table: Table, settings: Csv, inputs: Sequence[str]) -> tuple[NDArray[np.bool_], list[str]]:
    """Return which rows of a table the settings leave out for their label, or as copies, and what to note."""
    left, notes = np.zeros(len(table.frame), dtype=np.bool_), list[str]()
    labels = table.frame[settings.labels]
    if settings.unlabelled == "drop":
        left |= labels.isna().to_numpy()
        if settings.task == "survival":
            left |= parse_numbers(labels) <= 0
        if left.all():
            raise UserError(f"{table.path}: no row has a label in '{settings.labels}'; expected some")
        notes += [f"{table.path.name}: {_rows(left)} without a label left out"] if left.any() else []
    if settings.duplicates == "drop":
        columns = [table.frame[name] for name in (*inputs, settings.labels, *filter(None, [settings.event]))]
        copies = ~left & repeats(row_marks(columns))
        left |= copies
        notes += [f"{table.path.name}: {_rows(copies)} left out, there before"]
    return left, notes
