"""Cells of tables: those that are numbers, words that mean the same, values in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError

LARGEST = 1e38
"""Above this a number may be infinite as float32."""
MOST_SHOWN = 12
"""Of more names than this, an error line or a note lists the first ones."""
_LIMIT = re.compile(r"[<>≤≥]=?\s*([+-]?[\d.]+(?:[eE][+-]?\d+)?)")


def parse_numbers(cells: Any) -> NDArray[np.float64]:
    """Return cells as numbers, NaN where a cell is empty or no number; true and false are 1 and 0."""
    # For speed of start: much of the package reads no tables.
    import pandas

    if cells.dtype.kind not in "iufb":
        try:
            cells = pandas.to_numeric(cells, errors="coerce")
        except TypeError:
            # Cells that are lists or tables are no numbers, and no category either.
            return np.full(len(cells), np.nan)
        except OverflowError:
            # pandas reads whole numbers of any length, and hands them on.
            cells = pandas.to_numeric(cells.astype(str), errors="coerce")
    return cells.to_numpy(dtype=np.float64, na_value=np.nan)


def moments(numbers: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return of each column how many cells are not NaN, their mean and deviation; 0 where there are none."""
    there = ~np.isnan(numbers)
    count: NDArray[np.int64] = there.sum(axis=0)
    cells = np.maximum(count, 1)
    mean = np.where(there, numbers, 0.0).sum(axis=0) / cells
    return count, mean, np.sqrt(np.square(np.where(there, numbers - mean, 0.0)).sum(axis=0) / cells)


def emptied(cells: Any, codes: Sequence[str]) -> Any:
    """Return cells with those that mean "not recorded" as missing."""
    if not codes:
        return cells
    absent = np.isin(parse_numbers(cells), [number_of(code) for code in codes])
    if cells.dtype.kind not in "iufb":
        absent |= [isinstance(cell, str) and cell.strip() in codes for cell in cells.tolist()]
    return cells.mask(absent)


def plain(text: str) -> str:
    """Return a cell's text so that 1, 1.0 and " 1" are the same."""
    text = text.strip()
    if not is_number(text):
        return text
    number = float(text)
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)


def plain_texts(cells: Sequence[object]) -> list[str]:
    """Return the texts of many cells, of which few differ."""
    texts = list(map(str, cells))
    known = {text: plain(text) for text in set(texts)}
    return [known[text] for text in texts]


def is_number(text: str) -> bool:
    """Whether a text is a finite number."""
    return bool(np.isfinite(number_of(text)))


def number_of(text: str) -> float:
    """Return the number that a text is, NaN for other texts."""
    try:
        return float(text)
    except ValueError:
        return np.nan


def limit_of(text: str) -> float:
    """Return the number in a limit of detection such as <5, NaN for other texts."""
    found = _LIMIT.fullmatch(text.strip())
    return np.nan if found is None else number_of(found[1])


def in_order(text: str) -> tuple[bool, float, str]:
    """Sort key of levels and labels: numbers by size, then words."""
    number = is_number(text)
    return not number, float(text) if number else 0.0, text


# Labels that become classes 0, 1, 2, ...


MOST_CLASSES = 100_000


def numbered(names: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """Number classes in ascending order, numbers before words; also return their names."""
    levels = sorted(set(names), key=in_order)
    number = {level: value for value, level in enumerate(levels)}
    return np.array([number[name] for name in names], dtype=np.int64), levels


def class_numbers(values: NDArray[Any], where: object) -> tuple[NDArray[np.int64], list[str]]:
    """Return labels as 0, 1, 2, ..., and their names: whole numbers from 0 stay, words and negatives are numbered."""
    if values.dtype.kind not in "biufUS":
        raise UserError(f"{where}: data.labels are neither numbers nor text; expected classes")
    if values.dtype.kind == "f" and not bool((values == np.floor(values)).all() and np.isfinite(values).all()):
        raise UserError(
            f"{where}: data.labels holds fractions, nan or infinity; expected a class for every row, or for npz task = "
            "'regression'"
        )
    if values.dtype.kind not in "biuf":
        return numbered(values.astype(np.str_).tolist())
    whole = values.astype(np.int64)
    if whole.min(initial=0) < 0:
        return numbered(list(map(str, whole.tolist())))
    # More classes are refused as soon as the labels are a data set's.
    return whole, [str(number) for number in range(min(int(whole.max(initial=-1)), MOST_CLASSES) + 1)]


def marked(values: NDArray[Any], mark: str, column: str, where: object) -> NDArray[np.float64]:
    """Return values as 0/1 (anything above 0 is 1), turned round where the mark's column is "not NAME"."""
    if values.dtype.kind not in "biuf":
        raise UserError(f"data.marks.{mark}: column '{column}' of {where} is text; allowed: columns of numbers")
    return ((values > 0) != column.startswith("not ")).astype(np.float64)


def numbering(title: str, levels: Sequence[str]) -> list[str]:
    """Say what the numbers of classes stand for, the first few, unless they are as named."""
    if list(levels) == [str(number) for number in range(len(levels))]:
        return []
    shown = ", ".join(f"{number} = {level}" for number, level in enumerate(levels[:MOST_SHOWN]))
    return [f"{title}: {shown}{', ...' if len(levels) > MOST_SHOWN else ''}"]
