"""Tables as people keep them: one file, a folder of files, a pattern, several files; CSV, Parquet, Excel, SPSS, Stata.

`read_tables` gives typed columns under a header, several files joined by the names of their columns; `read_cells` gives
every cell as text, for interactions, item tables and knowledge graphs. pandas is imported inside functions, for speed
of start: much of the package reads no tables.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import re
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steelyard.base.errors import UserError, first_names, listed, nearest
from steelyard.data import files
from steelyard.data.cells import MOST_SHOWN, is_number
from steelyard.data.files import find, search_folders
from steelyard.data.sources.source import BY_FILE, is_pattern

if TYPE_CHECKING:
    import pandas


EMPTY = ("", "?", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "<NA>", "#N/A")
"""Cells that say that nothing was recorded; in the owner's column only the empty cell does, since NA may be a name."""
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
TABLE = "a whole table, such as a .csv or .parquet file"
_HEAD = 1 << 16
_AT_ONCE = 100_000
"""Rows that are read at once: a file as text takes several times the memory of its numbers."""
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
    options |= {"skipinitialspace": True, "keep_default_na": False, "na_values": empty, "low_memory": False}
    with _told_as_table(path, TABLE):
        parts: list[pandas.DataFrame] = list(pandas.read_csv(path, **options, chunksize=_AT_ONCE))
    if not isinstance(parts[0].index, pandas.RangeIndex):
        raise UserError(f"{path}: rows have more cells than there are column names; expected one cell per column")
    if parts[0].empty:
        raise UserError(f"{path}: holds column names and no rows; expected at least one row")
    # A column of which a part alone has words is text throughout.
    kinds = {name: {part[name].dtype for part in parts} for name in form.columns}
    mixed = [name for name, found in kinds.items() if len(found) > 1 and any(kind.kind not in "if" for kind in found)]
    if mixed:
        whole = parse(path, path, TABLE, **options, usecols=mixed, dtype=dict.fromkeys(mixed, str))
        parts = [part.drop(columns=mixed).join(whole) for part in parts]
    return below(parts)


def below(frames: list[pandas.DataFrame]) -> pandas.DataFrame:
    """Return frames one below the other, joined by the names of their columns; they are emptied meanwhile.

    A column is done after the other, so that two whole tables never lie in memory.
    """
    import pandas

    if len(frames) == 1:
        return frames[0].copy()  # in one piece: pandas warns when a column is added to a wide table in many
    first = {name: frame[name].dtype for frame in reversed(frames) for name in frame}
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for frame in frames for name in frame):
        kind = first[name] if first[name].kind == "O" else float
        cells = [frame.pop(name) if name in frame else pandas.Series(index=frame.index, dtype=kind) for frame in frames]
        columns[name] = pandas.concat(cells, ignore_index=True)
    return pandas.DataFrame(columns, copy=False)


_BROKEN = (OSError, EOFError, zlib.error, zipfile.BadZipFile, UnicodeError)


def parse(path: Path, source: Path | io.StringIO, expected: str, **options: Any) -> pandas.DataFrame:
    """Let pandas read delimited text; what it cannot read is one line that ends in what was expected."""
    # For speed of start: much of the package reads no tables.
    import pandas

    with _told_as_table(path, expected):
        return pandas.read_csv(source, **options)


@contextmanager
def _told_as_table(path: Path, expected: str) -> Generator[None]:
    import pandas

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            yield
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
        io.StringIO(text),
        expected,
        sep=separator,
        header=None,
        dtype=object,
        na_filter=False,
        quoting=csv.QUOTE_MINIMAL if separator in (",", ";") else csv.QUOTE_NONE,
        skip_blank_lines=False,
    )
    stripped = frame.map(str.strip)
    if strip:
        frame = stripped
    # Blank lines at the end are no rows.
    filled = stripped.index[stripped.ne("").any(axis=1)]
    if not len(filled):
        raise UserError(f"{path}: the file is empty; expected {expected}")
    if columns is not None and frame.shape[1] != columns:
        raise UserError(f"{path}: {frame.shape[1]} columns; expected {expected}")
    return frame.iloc[: filled[-1] + 1]


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
    numbers = [name for name in columns if is_number(name.replace(",", "."))]
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


def _decimal(delimiter: str, lines: list[list[str]]) -> str:
    """Return the decimal sign: a comma only where cells such as 1,5 stand and none such as 1.5."""
    if delimiter == ",":
        return "."
    cells = [cell.strip() for line in lines for cell in line]
    comma = any(_COMMA_NUMBER.fullmatch(cell) for cell in cells)
    return "," if comma and not any(_POINT_NUMBER.fullmatch(cell) for cell in cells) else "."


# Tables of several files and forms.


ORIGIN = "a table (.csv, .csv.gz, .parquet, .xlsx, .sav, .dta) with names of columns, or a folder of such files"
INCLUDED = Path(__file__).parent / "included"
_TEXT = (".csv", ".tsv", ".txt")
_PACKAGES = {
    **dict.fromkeys((".parquet", ".pq"), ("read_parquet", "pyarrow")),
    **dict.fromkeys((".xlsx", ".xlsm"), ("read_excel", "openpyxl")),
    ".xls": ("read_excel", "xlrd"),
    ".sav": ("read_spss", "pyreadstat"),
    ".dta": ("read_stata", "pandas"),
}
"""By the end of a file's name: what of pandas reads it, and the package that this needs."""


@dataclass(frozen=True, eq=False)
class Table:
    """A frame and where it came from."""

    path: Path
    frame: pandas.DataFrame
    notes: tuple[str, ...] = ()
    """What joining several files had to do."""
    starts: Mapping[str, int] | None = None
    """By file: its first row in the frame, ascending; None for one file."""
    added: tuple[str, ...] = ()
    """Columns that no file has: the one of their names."""

    @property
    def names(self) -> list[str]:
        return [str(name) for name in self.frame.columns]

    def row(self, number: int) -> str:
        """Say which row of which file a row of the frame is, counted from 1, for an error line."""
        if self.starts is None:
            return f"row {number + 1}"
        file, start = [(file, start) for file, start in self.starts.items() if start <= number][-1]
        return f"row {number - start + 1} of {file}"


def read_tables(paths: Sequence[Path], owner: str | None, named: Mapping[str, str]) -> Table:
    """Return what lies at these paths as one table, every cell that says nothing as missing.

    `named` are the columns that settings name, by field: each file must have them. With `owner` = "file" a column of
    that name says from which file a row is, unless the files have such a column themselves.
    """
    expanded = [_expanded(path) for path in paths]
    found = [file for files, _ in expanded for file in files]
    left = [name for _, others in expanded for name in others]
    wanted = {name for name in named.values() if name != BY_FILE}
    sheets = [(path, part, frame) for path in found for part, frame in _read(path, owner, wanted).items()]
    names = _sheet_names([(path, part) for path, part, _ in sheets])
    frames = [frame for _, _, frame in sheets]
    where = paths[0] if len(paths) == 1 else Path(_common(found))
    if len(frames) > 1:
        _check_columns(dict(zip(names, frames, strict=True)), named)
        if owner is None:
            raise UserError(
                f"data.owner: got nothing, and {where} is {len(frames)} tables; allowed: '{BY_FILE}' (each is one "
                f"client), or a column, such as {first_names([str(name) for name in frames[0]])}"
            )
    added = (BY_FILE,) if owner == BY_FILE and not any(BY_FILE in frame for frame in frames) else ()
    sizes = [len(frame) for frame in frames]
    notes, starts, place = list[str](), None, found[0]
    if len(frames) > 1:
        notes = [f"{where.name}: {len(frames)} tables joined by the names of their columns"]
        notes += _differences(dict(zip(names, frames, strict=True)))
        notes += [f"{where.name}: no tables, left out: {first_names(left)}"] if left else []
        starts, place = dict[str, int](), where
        for name, (path, _, _), end, size in zip(names, sheets, np.cumsum(sizes).tolist(), sizes, strict=True):
            starts[path.name if path.name not in starts else f"{path.name} ({name})"] = end - size
    frame = frames[0] if len(frames) == 1 else below(frames)
    if added:
        frame = with_columns(frame, {BY_FILE: np.repeat(np.array(names, dtype=object), sizes)})
    return Table(place, frame, tuple(notes), starts, added)


def with_columns(frame: pandas.DataFrame, columns: Mapping[str, Any]) -> pandas.DataFrame:
    """Return a frame with further columns; pandas warns where they are put one by one into a wide one."""
    import pandas

    return pandas.concat([frame, pandas.DataFrame(columns, index=frame.index)], axis=1)


def _differences(frames: Mapping[str, pandas.DataFrame]) -> list[str]:
    """Say once which columns some files lack; their cells are empty there."""
    having: dict[str, list[str]] = {}
    for name, frame in frames.items():
        for column in frame.columns:
            having.setdefault(str(column), []).append(name)
    parts = []
    for column, owners in having.items():
        lacking = [name for name in frames if name not in owners]
        if lacking:
            alike = [other for other in having if other != column and other.casefold() == column.casefold()]
            hint = f", is it '{alike[0]}'?" if alike else ""
            few = f"only in {first_names(owners)}" if len(owners) < len(lacking) else f"not in {first_names(lacking)}"
            parts.append(f"'{column}' ({few}{hint})")
    return [f"columns that are not in every table, empty there: {first_names(parts, MOST_SHOWN)}"] if parts else []


def _check_columns(frames: Mapping[str, pandas.DataFrame], named: Mapping[str, str]) -> None:
    for field, column in named.items():
        for name, frame in frames.items():
            if column not in frame.columns and column != BY_FILE:
                columns = [str(one) for one in frame.columns]
                raise UserError(
                    f"{field}: found no column '{column}' in the table '{name}'{nearest(column, columns)}; "
                    f"allowed: a column that every table has"
                )


def _expanded(path: Path) -> tuple[list[Path], list[str]]:
    """Return the files that a path means, and the names of those in a folder that are no tables."""
    if path.parts[:1] == (INCLUDED.name,):
        known = sorted(f"{INCLUDED.name}/{file.name}" for file in INCLUDED.glob("*.csv"))
        if path.as_posix() not in known:
            hint = nearest(path.as_posix(), known)
            raise UserError(f"data.path: got '{path}'{hint}; allowed: {listed(known)}, or a file")
        return [INCLUDED / path.name], []
    if is_pattern(path):
        bases = [Path()] if path.is_absolute() else search_folders()
        matches = next((found for base in bases if (found := glob.glob(str(base / path.expanduser())))), [])
        files = sorted(Path(match) for match in matches if Path(match).is_file())
        if files:
            return files, []
    place = find(path, ORIGIN)
    if not place.is_dir():
        return [place], []
    inside = sorted(file for file in place.iterdir() if not file.name.startswith("."))
    tables = [file for file in inside if file.is_file() and _suffix(file) in (*_TEXT, *_PACKAGES)]
    if not tables:
        ends = listed((*_TEXT, *_PACKAGES))
        raise UserError(f"data.path: the folder '{place}' holds no table ({ends}); expected {ORIGIN}")
    return tables, [file.name for file in inside if file not in tables]


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _common(paths: Sequence[Path]) -> str:
    return " ".join(path.name for path in paths[:2]) + (" ..." if len(paths) > 2 else "")


def _sheet_names(sheets: Sequence[tuple[Path, str]]) -> list[str]:
    """Return a name for each table: its file's, with the sheet of a workbook; with its folder where two are alike."""
    single = len({path for path, _ in sheets}) == 1
    names = [part if part and single else "-".join(filter(None, (_stem(path), part))) for path, part in sheets]
    if len(set(names)) < len(names):
        names = [f"{path.absolute().parent.name}-{name}" for name, (path, _) in zip(names, sheets, strict=True)]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"data.path: two tables would be client '{twice}'; allowed: each file once, by its own name")
    return names


def _stem(path: Path) -> str:
    return Path(path.stem).stem if path.suffix.lower() == ".gz" else path.stem


def _read(path: Path, owner: str | None, named: set[str]) -> dict[str, pandas.DataFrame]:
    """Return the tables of one file by the name of their sheet; one without sheets has the name ''."""
    kind = _PACKAGES.get(_suffix(path))
    if kind is None:
        return {"": read_delimited(path, owner, named)}
    import pandas

    reader, package = kind
    options: dict[str, Any] = {"sheet_name": None} if reader == "read_excel" else {}
    try:
        found: Any = getattr(pandas, reader)(path, **options)
    except ImportError:
        extra = f"pip install {package}" if package != "pyarrow" else "pip install 'steelyard[parquet]'"
        raise UserError(
            f"data.path: '{path}' needs {package}, which is not installed; allowed: `{extra}`, or a .csv"
        ) from None
    except Exception as problem:  # what other packages raise on a damaged file is of classes of their own
        raise unreadable(path, problem) from None
    sheets: dict[str, pandas.DataFrame] = found if isinstance(found, dict) else {"": found}
    filled = {str(name): frame for name, frame in sheets.items() if len(sheets) == 1 or not frame.empty}
    if not filled:
        raise UserError(f"{path}: holds no rows; expected at least one")
    return {name if len(filled) > 1 else "": tidy(frame, path, owner) for name, frame in filled.items()}


def tidy(frame: pandas.DataFrame, where: object, owner: str | None = None) -> pandas.DataFrame:
    """Return a frame with rows counted from 0, names as text, moments and durations in days, words for "empty" empty.

    Use it for frames that no CSV was read for: Parquet, or a frame that a user hands over; `where` begins the errors.
    """
    import pandas

    frame = frame.reset_index(drop=True)
    frame.columns = [str(name).strip() for name in frame.columns]
    for name, count in Counter(frame.columns).items():
        if count > 1:
            raise UserError(f"{where}: names column '{name}' {count} times; expected each name once")
    if not len(frame):
        raise UserError(f"{where}: holds no rows; expected at least one")
    changed: dict[str, Any] = {}
    for name in frame.columns:
        cells: Any = frame[name]
        if isinstance(cells.dtype, pandas.CategoricalDtype):
            cells = changed[name] = cells.astype(object)
        kind = cells.dtype
        if pandas.api.types.is_datetime64_any_dtype(kind):
            naive = cells.dt.tz_convert("UTC").dt.tz_localize(None) if getattr(kind, "tz", None) is not None else cells
            changed[name] = (naive - pandas.Timestamp(0)) / pandas.Timedelta(days=1)
        elif pandas.api.types.is_timedelta64_dtype(kind):
            changed[name] = cells / pandas.Timedelta(days=1)
        elif pandas.api.types.is_object_dtype(kind) or pandas.api.types.is_string_dtype(kind):
            empty = {"", *(() if name == owner else EMPTY)}
            words = [isinstance(cell, str) and cell.strip() in empty for cell in cells.tolist()]
            changed[name] = cells.mask(pandas.Series(words, dtype=bool))
    return frame.assign(**changed)
