"""Tables of text as the readers of graphs and features see them: cells without types, one line for what is wrong."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from steelyard.data import files
from steelyard.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

MARKS = ("::", "\t", "|", ",", ";")
"""Separators that may stand between cells, the first that the first line holds counts."""


def read_text(path: Path, expected: str) -> str:
    """Return a file's text, unpacked if its name ends in .gz; bytes that are no UTF-8 are taken for Latin-1."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected {expected}")
    raw = files.read_bytes(path)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    if not text.strip():
        raise UserError(f"{path}: the file is empty; expected {expected}")
    return text


def read_cells(path: Path, expected: str, mark: str | None = None) -> pd.DataFrame:
    """Return a file as cells of text, rows by line and columns by number; cells that a line lacks are empty.

    `expected` says what the file should hold, for the error line. Columns are named 0, 1, ...; a header is a row.
    """
    # For speed of start: much of the package reads no tables.
    import pandas as pd

    text = read_text(path, expected)
    mark = mark or _mark(text.split("\n", 1)[0], path)
    if mark == "::":
        text, mark = text.replace("\t", " ").replace("::", "\t"), "\t"
    try:
        frame = pd.read_csv(
            io.StringIO(text),
            sep=mark,
            header=None,
            dtype=object,
            keep_default_na=False,
            na_filter=False,
            quoting=0 if mark in (",", ";") else 3,
            skip_blank_lines=False,
        )
    except (pd.errors.ParserError, pd.errors.EmptyDataError, ValueError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}; expected {expected}") from None
    frame = frame.map(str.strip)
    told = np.flatnonzero((frame != "").any(axis=1))
    if not len(told):
        raise UserError(f"{path}: the file is empty; expected {expected}")
    # Blank lines at the end are no rows.
    return frame.iloc[: int(told[-1]) + 1]


def _mark(first: str, path: Path) -> str:
    """Tell the separator from the first line; in a .csv, bars stand between the values of a cell."""
    marks = [mark for mark in MARKS if mark != "|" or ".csv" not in path.suffixes]
    return next((mark for mark in marks if mark in first), "\t")


def no_empty(path: Path, cells: pd.DataFrame, expected: str, first_line: int = 1) -> None:
    """Refuse a table in which a cell is empty, with the line of the first one."""
    empty = (cells == "").any(axis=1).to_numpy()
    if empty.any():
        line = int(np.flatnonzero(empty)[0])
        raise UserError(f"{path}: line {line + first_line}: an empty cell; expected {expected}")


def read_pairs(path: Path, expected: str, header: frozenset[str] = frozenset()) -> tuple[list[str], list[str]]:
    """Return the first and the last column of a table: item and entity, id and label.

    The first line is a header if it names its first column as one of `header`, or `name:type` as RecBole does.
    """
    cells = read_cells(path, expected)
    if cells.shape[1] < 2:
        raise UserError(f"{path}: {cells.shape[1]} column; expected {expected}")
    head = str(cells.iloc[0, 0])
    skip = 1 if head.endswith(":token") or head.lower() in header else 0
    cells = cells.iloc[skip:, [0, -1]]
    no_empty(path, cells, expected, 1 + skip)
    return cells.iloc[:, 0].tolist(), [bare(text) for text in cells.iloc[:, 1].tolist()]


def bare(text: str) -> str:
    """Return an IRI without the angle brackets that some files put around it."""
    return text[1:-1] if text.startswith("<") and text.endswith(">") else text


def read_labels(path: Path) -> Mapping[str, str]:
    """Return the names of entities: a table whose first column is an id and whose last is its name."""
    ids, names = read_pairs(path, "a table of an id and its name on each line")
    return dict(zip(map(bare, ids), names, strict=True))
