"""Measures of clients as people have them: mappings, frames, arrays or a CSV, checked as updates are."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from steelyard.base.errors import UserError, brief, path_of
from steelyard.base.settings import LARGEST_REAL
from steelyard.messages.updates import Floats

CLIENT = "client"


@dataclass(frozen=True, eq=False)
class Measures:
    """A table of clients: one row each, one column for each measure."""

    clients: tuple[str, ...]
    criteria: tuple[str, ...]
    values: Floats
    """[clients, criteria], finite and from 0 on."""


def read_measures(table: Any, named: Sequence[str]) -> Measures:
    """Return whatever form of table as measures; `named` are the columns of an array, which has no names itself."""
    if isinstance(table, str | Path):
        return read_table(path_of(table, "table", "a CSV with a header"))
    if hasattr(table, "to_frame") and len(named) == 1:  # A series of one measure, with clients as its index.
        table = table.to_frame(named[0])
    if hasattr(table, "columns") and hasattr(table, "to_dict"):
        return _from_frame(table)
    if isinstance(table, Mapping):
        return _from_mapping(table, named)
    rows = _rows(table)
    if rows and all(isinstance(row, Mapping) for row in rows):
        return _from_rows(rows)
    return _from_array(rows, named)


def _rows(table: Any) -> list[Any]:
    if not isinstance(table, str | bytes):
        with suppress(TypeError, RuntimeError):
            return list(table)
    raise UserError(
        f"table: got {brief(table)}; allowed: a mapping of clients to measures, a frame, an array, rows, or a CSV"
    )


def _from_frame(frame: Any) -> Measures:
    columns = [str(name) for name in frame.columns]
    if len(set(columns)) != len(columns):
        raise UserError(f"table: columns {', '.join(columns)}; allowed: each name once")
    own = next((name for name in frame.columns if str(name).lower() == CLIENT), None)
    clients = list(getattr(frame, "index", range(len(frame)))) if own is None else list(frame[own])
    kept = [name for name in frame.columns if own is None or name != own]
    cells = [list(frame[name]) for name in kept]
    rows = [[column[row] for column in cells] for row in range(len(clients))]
    return _checked(clients, [str(name) for name in kept], rows)


def _from_mapping(table: Mapping[object, Any], named: Sequence[str]) -> Measures:
    """Read {client: {measure: value}}, {client: value of the one measure that is named}, or columns {measure: [values]}
    with the clients in a column of their own.
    """
    if table and all(isinstance(row, Mapping) for row in table.values()):
        return _from_rows([{CLIENT: client, **row} for client, row in table.items()])
    if table and len(named) == 1 and not any(isinstance(value, Iterable) for value in table.values()):
        return _checked(list(table), named, [[value] for value in table.values()])
    columns = {str(name): _rows(column) for name, column in table.items()}
    own = next((name for name in columns if name.lower() == CLIENT), None)
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(f"table: columns of different lengths ({shown}); allowed: a value of each for every client")
    kept = [name for name in columns if name != own]
    count = next(iter(lengths.values()), 0)
    rows = [[columns[name][row] for name in kept] for row in range(count)]
    return _checked(list(range(count)) if own is None else columns[own], kept, rows)


def _from_rows(rows: list[Mapping[object, Any]]) -> Measures:
    criteria = [str(name) for name in rows[0] if str(name).lower() != CLIENT]
    clients: list[object] = []
    values: list[list[Any]] = []
    for number, row in enumerate(rows):
        cells = {str(name): value for name, value in row.items()}
        own = next((name for name in cells if name.lower() == CLIENT), None)
        clients.append(number if own is None else cells.pop(own))
        if set(cells) != set(criteria):
            odd = sorted(set(cells) ^ set(criteria))
            raise UserError(
                f"table: {odd[0]} is {'missing' if odd[0] in criteria else 'there'} for client {brief(clients[-1])} "
                "and not for others; allowed: the same measures for every client"
            )
        values.append([cells[name] for name in criteria])
    return _checked(clients, criteria, values)


def _from_array(rows: list[Any], named: Sequence[str]) -> Measures:
    try:
        shape = np.shape(rows)
    except (TypeError, ValueError, RuntimeError):
        raise UserError("table: rows of different lengths; allowed: an array [clients, criteria]") from None
    if len(shape) == 1 and len(named) == 1:
        rows, shape = [[cell] for cell in rows], (*shape, 1)
    if rows and (len(shape) != 2 or shape[1] != len(named)):
        raise UserError(
            f"table: an array of shape {shape}; allowed: ({len(rows)}, {len(named)}), a column for each criterion of "
            f"the rule: {', '.join(named)}"
        )
    return _checked(list(range(len(rows))), named, rows)


def _checked(clients: Sequence[object], criteria: Sequence[str], rows: Sequence[Sequence[Any]]) -> Measures:
    names = [str(client) for client in clients]
    if not names or not criteria:
        raise UserError("table: is empty; allowed: at least one client with one measure")
    for position, client in enumerate(clients, start=1):
        # Frames have marks of several kinds for a cell without a value.
        if not str(client).strip() or (not isinstance(client, str) and str(client) in ("None", "nan", "<NA>", "NaT")):
            raise UserError(f"table: client {position} has no name; allowed: a name for each client")
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"table: names client {brief(twice)} twice; allowed: each client once")
    values = [
        [number(f"table: client {brief(name)}, {criteria[at]}", cell) for at, cell in enumerate(rows[row])]
        for row, name in enumerate(names)
    ]
    return Measures(tuple(names), tuple(criteria), np.array(values))


def number(where: str, cell: object, most: float = LARGEST_REAL) -> float:
    """Return a measure as a number; `where` names it where it is none, or out of range."""
    allowed = f"allowed: a number from 0 to {f'{most:g}'.replace('+', '')}"
    try:
        # Of a complex number NumPy would take the real part, with a warning.
        value = float("complex" if isinstance(cell, complex | np.complexfloating) else cast("float", cell))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UserError(f"{where}: got {brief(cell)}; {allowed}") from None
    if not 0 <= value <= most:
        raise UserError(f"{where}: got {value:g}; {allowed}")
    return value


def read_table(path: Path) -> Measures:
    """Read a CSV of clients; each fault is named with its line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            numbered = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; allowed: a CSV with a header") from None
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: cannot be read: {reason}; allowed: a CSV with a header") from error
    rows = [row for _, row in numbered]
    if rows and len(rows[0]) == 1 and any(mark in rows[0][0] for mark in ";\t|"):
        raise UserError(
            f"{path}: the header {brief(rows[0][0])} has no commas; allowed: commas between cells, a point in numbers "
            "(not the semicolons, tabs or decimal commas of some spreadsheets)"
        )
    if len(rows) < 2 or len(rows[0]) < 2:
        raise UserError(
            f"{path}: holds no table; allowed: a header with a client column and criteria, then a row per client"
        )
    header = [cell.strip() for cell in rows[0]]
    if len(set(header)) != len(header) or "" in header:
        raise UserError(f"{path}: header {','.join(header)}; allowed: each column named, each name once")
    if all(_is_number(name) for name in header[1:]):
        raise UserError(f"{path}: the first line {brief(','.join(header))} holds numbers; allowed: a header of names")
    named = [column for column, name in enumerate(header) if name.lower() == "client"]
    if not named and all(_is_number(row[0]) for row in rows[1:] if row):
        raise UserError(
            f"{path}: has no column 'client', and '{header[0]}' holds numbers, not names; allowed: a column 'client'"
        )
    client_column = named[0] if named else 0
    criteria = [name for column, name in enumerate(header) if column != client_column]
    clients: dict[str, None] = {}
    values: list[list[float]] = []
    for line, row in numbered[1:]:
        if len(row) != len(header):
            raise UserError(f"{path}, line {line}: {len(row)} cells; allowed: {len(header)}, as in the header")
        client = row[client_column].strip()
        if not client:
            raise UserError(f"{path}, line {line}: the client has no name; allowed: a name for each client")
        if client in clients:
            raise UserError(f"{path}, line {line}: names client '{client}' twice; allowed: each client once")
        clients[client] = None
        values.append(
            [_cell(path, line, header[column], cell) for column, cell in enumerate(row) if column != client_column]
        )
    return Measures(tuple(clients), tuple(criteria), np.array(values))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _cell(path: Path, line: int, column: str, text: str) -> float:
    word = text.strip().lower()
    if word in ("true", "yes", "false", "no"):
        return 1.0 if word in ("true", "yes") else 0.0
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= LARGEST_REAL:
        raise UserError(
            f"{path}, line {line}, {column}: got {brief(text.strip())}; allowed: a number from 0 to 1e30, true or false"
        )
    return value
