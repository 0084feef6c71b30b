"""The input columns of a table: numbers with empty cells, and categories as 0/1 columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError, listed
from steelyard.data.settings import DataSettings
from steelyard.data.sheets import MOST_SHOWN, Table

_MOST_LEVELS = 100
LARGEST = 1e38
"""Above this a number may be infinite as float32."""


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
    if codes and not named:
        # What means "not recorded" in a column of numbers is empty before the column's kind is judged.
        absent = np.isin(parse_numbers(cells), [_number(code) for code in codes])
        cells = cells.mask(absent | [isinstance(cell, str) and cell.strip() in codes for cell in cells.tolist()])
    numbers = None if named else as_numbers(table, name, cells, guess=settings.categories is None)
    if numbers is not None:
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
        words = there & np.isnan(numbers)
        if guess and 2 * int(words.sum()) > int(there.sum()):
            return None
        row = int(np.flatnonzero(words if words.any() else bad)[0])
        wanted = "a number with a decimal point (or name the column in data.categories or data.ignore)"
        if not words.any():
            wanted = "finite numbers (or say in data.na_values that it means: not recorded)"
        raise UserError(
            f"{table.path}: column '{name}' holds {str(cells.iloc[row])[:40]!r} in {table.row(row)}; expected {wanted}"
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
            row = int(np.flatnonzero(codes == texts.index(text))[0])
            raise UserError(
                f"{table.path}: column '{name}' holds '{text[:40]}' in {table.row(row)}; "
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
    return bool(np.isfinite(_number(text)))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def in_order(text: str) -> tuple[bool, float, str]:
    """Sort key of levels and labels: numbers by size, then words."""
    number = is_number(text)
    return not number, float(text) if number else 0.0, text


def numbered(names: Sequence[str], title: str) -> tuple[NDArray[np.int64], list[str]]:
    """Number classes in ascending order, numbers before words; also say what the numbers stand for, unless as named."""
    levels = sorted(set(names), key=in_order)
    number = {level: value for value, level in enumerate(levels)}
    natural = all(level == str(value) for level, value in number.items())
    return np.array([number[name] for name in names], dtype=np.int64), [] if natural else [class_note(title, levels)]


def class_note(title: str, levels: Sequence[object]) -> str:
    """Say which number each class got, for those that were words, negative or apart; the first few are named."""
    shown = ", ".join(f"{number} = {level}" for number, level in enumerate(levels[:MOST_SHOWN]))
    return f"{title}: {shown}{', ...' if len(levels) > MOST_SHOWN else ''}"


_TIME = re.compile(r"(^|_)(time|days|weeks|months|years|duration|survival|follow_?up|os|pfs|dfs|tte)(_|$)")
_EVENT = re.compile(r"(^|_)(event|status|deaths?|dead|died|deceased|censor(ed|ing)?|relapsed?|recurrence|vital)(_|$)")


def survival_pair(frame: Any, label: str | None = None) -> tuple[str, str] | None:
    """Return the columns that look like the time to an event and whether it came, one of them the label if named."""
    names = {str(name): re.sub(r"[^a-z]+", "_", str(name).lower()) for name in frame.columns}
    events = [name for name, plain in names.items() if _EVENT.search(plain) and frame[name].nunique() == 2]
    times = [name for name, plain in names.items() if _TIME.search(plain) and name not in events]
    times = [name for name in times if frame[name].nunique() > 2 and bool((parse_numbers(frame[name]) >= 0).any())]
    pairs = [(time, event) for time in times for event in events]
    return next((pair for pair in pairs if label is None or label in pair), None)


def survival_line(time: str, event: str) -> str:
    """Say how data of the time to an event is learnt as such."""
    return (
        f"'{time}' and '{event}' look like the time to an event; data.task = 'survival' with labels = '{time}' and "
        f"event = '{event}' learns both (Cox regression): here, what did not happen until then counts as never"
    )


def survival_note(table: Table, label: str, inputs: Sequence[str]) -> list[str]:
    """Return what to say where the label is one half of a time and an event: it is learnt, but not as such."""
    pair = survival_pair(table.frame, label)
    if pair is None:
        return []
    other = pair[0] if label == pair[1] else pair[1]
    leak = f"; the input '{other}' gives the answer away: name it in data.ignore" if other in inputs else ""
    return [f"{table.path.name}: {survival_line(*pair)}{leak}"]
