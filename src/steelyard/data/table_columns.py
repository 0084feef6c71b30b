"""The input columns of a table: numbers with empty cells, and categories as 0/1 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steelyard.data.settings import DataSettings
from steelyard.errors import UserError, listed, nearest

if TYPE_CHECKING:
    import pandas

_MOST_LEVELS = 100
MOST_SHOWN = 12
LARGEST = 1e38
"""Above this a number may be infinite as float32."""


@dataclass(frozen=True, eq=False)
class Table:
    """A frame and where it came from."""

    path: Path
    frame: pandas.DataFrame

    @property
    def names(self) -> list[str]:
        return [str(name) for name in self.frame.columns]

    def cells(self, field: str, name: str) -> Any:
        """Return one column as a Series; `field` is the setting that named it, for the error line."""
        if name not in self.names:
            shown = self.names[:MOST_SHOWN]
            more = f" and {len(self.names) - len(shown)} more" if len(self.names) > len(shown) else ""
            raise UserError(
                f"data.{field}: found no column '{name}' in {self.path}{nearest(name, self.names)}; "
                f"allowed: {listed(shown)}{more}"
            )
        return self.frame[name]


@dataclass(frozen=True, eq=False)
class InputColumn:
    """One input: numbers with NaN for empty cells, or 0/1 columns of its levels."""

    empty: NDArray[np.bool_]
    numbers: NDArray[np.float64] | None
    levels: NDArray[np.float32] | None


def input_column(table: Table, name: str, settings: DataSettings) -> InputColumn:
    """Return one input column, as numbers or as a category; use it for every column that is no label, owner or so."""
    cells = table.cells("ignore", name)
    named = name in settings.levels or name in (settings.categories or ())
    codes = [plain(text) for text in settings.na_values.get(name, ())]
    words = {code for code in codes if not is_number(code)}
    if words:
        # A word for "not recorded" in a column of numbers is empty before the column's kind is judged.
        cells = cells.mask([isinstance(cell, str) and cell.strip() in words for cell in cells.tolist()])
    numbers = None if named else as_numbers(table, name, cells, guess=settings.categories is None)
    if numbers is not None:
        numbers[np.isin(numbers, [float(code) for code in codes if is_number(code)])] = np.nan
        empty = np.isnan(numbers)
        if empty.all():
            raise UserError(f"{table.path}: column '{name}' is empty in all rows; expected values, or data.ignore")
        return InputColumn(empty, numbers, None)
    return _category(table, name, cells, settings, named)


def parse_numbers(cells: Any) -> NDArray[np.float64]:
    """Return cells as numbers, NaN where a cell is empty or no number; true and false are 1 and 0."""
    # For speed of start: much of the package reads no tables.
    import pandas

    try:
        found: Any = pandas.to_numeric(cells, errors="coerce")
    except TypeError:
        # Cells that are lists or tables are no numbers, and no category either.
        return np.full(len(cells), np.nan)
    return np.array(found.to_numpy(dtype=np.float64, na_value=np.nan))


def as_numbers(table: Table, name: str, cells: Any, *, guess: bool) -> NDArray[np.float64] | None:
    """Return a column as numbers, or None for a column of text where that may be one (`guess`)."""
    there: NDArray[np.bool_] = cells.notna().to_numpy()
    numbers = parse_numbers(cells)
    bad = there & ~(np.abs(numbers) < LARGEST)
    if bad.any():
        if guess and 2 * int(bad.sum()) > int(there.sum()):
            return None
        row = int(np.flatnonzero(bad)[0])
        raise UserError(
            f"{table.path}: column '{name}' holds {str(cells.iloc[row])[:40]!r} in row {row + 1}; expected a number "
            "with a decimal point (or name the column in data.categories or data.ignore)"
        )
    return numbers


def _category(table: Table, name: str, cells: Any, settings: DataSettings, named: bool) -> InputColumn:
    # For speed of start: much of the package reads no tables.
    import pandas

    codes: NDArray[np.int64]
    found: Any
    try:
        codes, found = pandas.factorize(cells)
    except TypeError:
        raise UserError(
            f"{table.path}: column '{name}' holds lists or tables; expected one value in each cell (or name the column "
            "in data.ignore)"
        ) from None
    texts = [plain(str(value)) for value in found.tolist()]
    unknown = {plain(text) for text in settings.na_values.get(name, ())} | {""}
    levels = [plain(text) for text in settings.levels.get(name, ())] or sorted(set(texts) - unknown, key=in_order)
    if not named and len(levels) > _MOST_LEVELS:
        raise UserError(
            f"{table.path}: column '{name}' is text with {len(levels)} different values; expected at most "
            f"{_MOST_LEVELS} for a category (or name it in data.ignore or data.categories)"
        )
    if not levels:
        raise UserError(f"{table.path}: column '{name}' is empty in all rows; expected values, or data.ignore")
    index = {level: number for number, level in enumerate(levels)}
    for text in texts:
        if text not in index and text not in unknown:
            row = int(np.flatnonzero(codes == texts.index(text))[0]) + 1
            raise UserError(
                f"{table.path}: column '{name}' holds '{text[:40]}' in row {row}; "
                f"allowed by data.levels: {listed(levels)}"
            )
    # the last entry stands for factorize's -1, an empty cell.
    of_code = np.array([*(index.get(text, -1) for text in texts), -1])
    level = of_code[codes]
    flags = (level[:, None] == np.arange(len(levels))).astype(np.float32)
    return InputColumn(level < 0, None, flags)


def plain(text: str) -> str:
    """Return a cell's text so that 1, 1.0 and " 1" are the same."""
    text = text.strip()
    if not is_number(text):
        return text
    number = float(text)
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)


def is_number(text: str) -> bool:
    """Whether a text is a finite number."""
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def in_order(text: str) -> tuple[bool, float, str]:
    """Sort key of levels and labels: numbers by size, then words."""
    number = is_number(text)
    return not number, float(text) if number else 0.0, text


def class_note(title: str, levels: Sequence[object]) -> str:
    """Say which number each class got, for those that were words, negative or apart; the first few are named."""
    shown = ", ".join(f"{number} = {level}" for number, level in enumerate(levels[:MOST_SHOWN]))
    return f"{title}: {shown}{', ...' if len(levels) > MOST_SHOWN else ''}"
