"""The one reader of delimited files: which sign divides cells, which bytes are text, one error line for what is wrong.

`read_delimited` gives typed columns under a header, for tables to learn from; `read_cells` gives every cell as text,
for interactions, item tables and knowledge graphs. Both parse by `parse`.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import warnings
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.base.errors import UserError, listed
from steelyard.data import files

if TYPE_CHECKING:
    import pandas

EMPTY = ("", "?", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "<NA>", "#N/A")
"""Cells that say that nothing was recorded; in the owner's column only the empty cell does, since NA may be a name."""
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
TABLE = "a whole table, such as a .csv or .parquet file"
_HEAD = 1 << 16
_LINES, _LONGEST = 3, 1 << 25
"""A wide table has few lines in its first 64 KB: so many are read, of at most so many characters each."""
_COMMA_NUMBER = re.compile(r"[+-]?\d+,\d+(e[+-]?\d+)?", re.IGNORECASE)
_POINT_NUMBER = re.compile(r"[+-]?\d+\.\d+(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Form:
    """How a CSV file is written."""

    columns: list[str]
    delimiter: str
    decimal: str


def read_delimited(path: Path, owner: str | None, named: set[str]) -> pandas.DataFrame:
    """Return the table of a file, every cell that says nothing as missing; `named` are the columns that settings name.

    Use it for files of any size: only the first lines are looked at in Python, pandas reads the rest.
    """
    form = recognise(path, named)
    # For speed of start: much of the package reads no tables.
    import pandas

    empty = {name: [""] if name == owner else list(EMPTY) for name in form.columns}
    # header=0 replaces the file's own names, so that spaces around them are gone.
    options: dict[str, Any] = {"names": form.columns, "header": 0, "sep": form.delimiter, "decimal": form.decimal}
    frame = parse(
        path,
        path,
        TABLE,
        **options,
        encoding="utf-8-sig",
        skipinitialspace=True,
        keep_default_na=False,
        na_values=empty,
        low_memory=False,
    )
    if not isinstance(frame.index, pandas.RangeIndex):
        raise UserError(f"{path}: rows have more cells than there are column names; expected one cell per column")
    if frame.empty:
        raise UserError(f"{path}: holds column names and no rows; expected at least one row")
    # pandas reads a wide table column by column, and warns when a column is added to what that leaves.
    return frame.copy()


_BROKEN = (OSError, EOFError, zlib.error, zipfile.BadZipFile, UnicodeError)


def parse(path: Path, source: Path | io.StringIO, expected: str, **options: Any) -> pandas.DataFrame:
    """Let pandas read delimited text; what it cannot read is one line that ends in what was expected."""
    # For speed of start: much of the package reads no tables.
    import pandas

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            return pandas.read_csv(source, **options)
    except (*_BROKEN, ValueError, pandas.errors.ParserError, pandas.errors.ParserWarning) as problem:
        raise unreadable(path, problem, expected) from None


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


def read_cells(
    path: Path, expected: str, separator: str | None = None, *, columns: int | None = None, strip: bool = True
) -> pandas.DataFrame:
    """Return a file as cells of text, rows by line and columns by number; cells that a line lacks are empty.

    `expected` says what the file should hold, for the error line. Columns are named 0, 1, ...; a header is a row.
    """
    text = read_text(path, expected)
    separator = separator or separator_of(text.split("\n", 1)[0], path) or "\t"
    if separator == "::":
        text, separator = text.replace("\t", " ").replace("::", "\t"), "\t"
    frame = parse(
        path,
        io.StringIO(text.rstrip("\r\n")),
        expected,
        sep=separator,
        header=None,
        dtype=object,
        keep_default_na=False,
        na_filter=False,
        quoting=csv.QUOTE_MINIMAL if separator in (",", ";") else csv.QUOTE_NONE,
        skip_blank_lines=False,
    )
    if strip:
        frame = frame.map(str.strip)
    # Blank lines at the end are no rows.
    filled = len(frame)
    while filled and not any(str(cell).strip() for cell in frame.iloc[filled - 1]):
        filled -= 1
    if not filled:
        raise UserError(f"{path}: the file is empty; expected {expected}")
    if columns is not None and frame.shape[1] != columns:
        raise UserError(f"{path}: {frame.shape[1]} columns; expected {expected}")
    return frame.iloc[:filled]


def separator_of(first: str, path: Path) -> str | None:
    """Return what divides the cells of a file by its first line: `::`, a tab, or the commonest of comma, ; and |.

    In a .csv a bar stands between the values of a cell, unless there is neither comma nor semicolon.
    """
    first = re.sub(r'"[^"]*"', "", first)  # a mark inside quotes divides nothing
    for mark in ("::", "\t"):
        if mark in first:
            return mark
    marks = [mark for mark in (",", ";", "|") if mark in first]
    if ".csv" in path.suffixes and len(marks) > 1:
        marks = [mark for mark in marks if mark != "|"]
    return max(marks, key=first.count, default=None)


def recognise(path: Path, named: set[str]) -> Form:
    """Find out how a CSV file is written from its beginning; what cannot be a table with a header is refused."""
    head, whole = _head(path)
    if not head.strip():
        raise UserError(f"{path}: is empty; expected a line of column names and a row for each sample")
    if "\0" in head:
        raise UserError(f"{path}: is not a text file; expected a .csv in UTF-8, or a .parquet file")
    first = next(line for line in head.splitlines() if line.strip())
    delimiter = separator_of(first.replace("::", ""), path)
    if delimiter is None:
        raise UserError(
            f"{path}: the first line {first[:40]!r} has one column only; expected names with "
            f"{listed(DELIMITERS.values())} between them"
        )
    lines = [line for line in csv.reader(io.StringIO(head, newline=""), delimiter=delimiter) if line]
    lines = lines if whole or len(lines) < 2 else lines[:-1]
    columns = [name.strip() for name in lines[0]]
    _check_header(path, columns, named)
    for number, line in enumerate(lines[1:], start=1):
        if len(line) != len(columns):
            raise UserError(
                f"{path}: row {number} has {len(line)} cells; expected {len(columns)}, one for each column name "
                f"(the {DELIMITERS[delimiter]} divides cells)"
            )
    return Form(columns, delimiter, _decimal(delimiter, lines[1:]))


def _head(path: Path) -> tuple[str, bool]:
    """Return the beginning of a file, some lines at least, however wide; and whether that is all of it."""
    try:
        packed = path.suffix.lower() == ".gz"
        with (gzip.open if packed else open)(path, "rt", encoding="utf-8-sig", newline="") as content:
            head = content.read(_HEAD)
            if head.count("\n") < _LINES:
                head += "".join(content.readline(_LONGEST) for _ in range(_LINES))
            return head, not content.read(1)
    except _BROKEN as problem:
        raise unreadable(path, problem) from None


def unreadable(path: Path, problem: Exception, expected: str = TABLE) -> UserError:
    """Return the one line about a file that cannot be read."""
    if isinstance(problem, UnicodeError):
        return UserError(f"{path}: is not UTF-8 text; expected a .csv saved as UTF-8, or a .parquet file")
    reason = (str(problem).splitlines() or [type(problem).__name__])[0].removeprefix("Error tokenizing data. C error: ")
    return UserError(f"{path}: cannot be read as a table ({reason.strip()}); expected {expected}")


def _check_header(path: Path, columns: list[str], named: set[str]) -> None:
    numbers = [name for name in columns if _is_number(name)]
    if 2 * len(numbers) > len(columns) and not named <= set(columns):
        raise UserError(
            f"{path}: the first line holds numbers such as '{numbers[0]}', not column names; "
            "expected a first line of names"
        )
    for name, count in Counter(columns).items():
        if not name:
            raise UserError(f"{path}: column {columns.index('') + 1} has no name; expected a name for each column")
        if count > 1:
            raise UserError(f"{path}: names column '{name}' {count} times; expected each name once")


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "."))
    except ValueError:
        return False
    return True


def _decimal(delimiter: str, lines: list[list[str]]) -> str:
    """Return the decimal sign: a comma only where cells such as 1,5 stand and none such as 1.5."""
    if delimiter == ",":
        return "."
    cells = [cell.strip() for line in lines for cell in line]
    comma = any(_COMMA_NUMBER.fullmatch(cell) for cell in cells)
    return "," if comma and not any(_POINT_NUMBER.fullmatch(cell) for cell in cells) else "."
