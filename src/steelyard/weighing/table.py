"""Weighing a table of clients on paper: a CSV in, scores and weights out."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from steelyard.errors import UserError, brief
from steelyard.settings import LARGEST_REAL, parse, validated
from steelyard.weighing.rule import Rule, WeighingSettings
from steelyard.weighing.weights import normalise, to_weights


def read_table(path: Path) -> tuple[list[str], list[str], np.ndarray]:
    """Read (clients, criteria, values [clients, criteria]) from a CSV; each fault is named with its line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; allowed: a CSV with a header") from None
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: cannot be read: {reason}; allowed: a CSV with a header") from error
    if rows and len(rows[0]) == 1 and any(mark in rows[0][0] for mark in ";\t|"):
        raise UserError(
            f"{path}: the header {brief(rows[0][0])} has no commas; allowed: commas between cells, a point in numbers "
            "(not the semicolons, tabs or decimal commas of some spreadsheets)"
        )
    if len(rows) < 2 or len(rows[0]) < 2:
        raise UserError(f"{path}: no table; allowed: a header with a client column and criteria, then a row per client")
    header = [cell.strip() for cell in rows[0]]
    if len(set(header)) != len(header) or "" in header:
        raise UserError(f"{path}: header {','.join(header)}; allowed: each column named, each name once")
    if all(_is_number(name) for name in header[1:]):
        raise UserError(f"{path}: the first line {brief(','.join(header))} holds numbers; allowed: a header of names")
    named = [column for column, name in enumerate(header) if name.lower() == "client"]
    client_column = named[0] if named else 0
    criteria = [name for column, name in enumerate(header) if column != client_column]
    clients: list[str] = []
    values: list[list[float]] = []
    for line, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise UserError(f"{path}, row {line}: {len(row)} cells; allowed: {len(header)}, as in the header")
        client = row[client_column].strip()
        if not client:
            raise UserError(f"{path}, row {line}: the client has no name; allowed: a name for each client")
        if client in clients:
            raise UserError(f"{path}, row {line}: names client '{client}' twice; allowed: each client once")
        clients.append(client)
        values.append(
            [_cell(path, line, header[column], cell) for column, cell in enumerate(row) if column != client_column]
        )
    return clients, criteria, np.array(values)


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
            f"{path}, row {line}, {column}: got {brief(text.strip())}; allowed: a number from 0 to 1e30, true or false"
        )
    return value


@dataclass(frozen=True)
class RuleOptions:
    """A rule as options of the command line give it."""

    score: str = "prioritized"
    priority: str | None = None
    weights: str | None = None
    quantifier: str | None = None
    capacity: Path | None = None
    power: float | None = None

    def named(self) -> list[str]:
        """Return the criteria that the priority names; none without one."""
        return [part.strip() for part in self.priority.split(">")] if self.priority else []

    def settings(self, criteria: Sequence[str], normalise: str = "share") -> WeighingSettings:
        """Return the rule over these criteria, checked."""
        given = {
            "criteria": list(criteria),
            "score": self.score,
            "priority": self.priority,
            "weights": None if self.weights is None else _numbers(self.weights),
            "quantifier": self.quantifier,
            "capacity": None if self.capacity is None else read_capacity(self.capacity, "--capacity"),
            "power": self.power,
            "normalise": normalise,
        }
        return validated(WeighingSettings, {name: value for name, value in given.items() if value is not None}, "")


class WeighedClient(TypedDict):
    """One client of a table, weighed."""

    client: str
    score: float
    weight: float


class Flags(TypedDict):
    """What had to be made up for: criteria that are 0 for all, scores that are all 0."""

    zero_criteria: list[str]
    uniform: bool


class Weighed(TypedDict):
    """A table's clients weighed; what `steelyard weigh --format json` prints."""

    clients: list[WeighedClient]
    criteria: list[str]
    score: str
    flags: Flags


def weigh_file(path: Path, options: RuleOptions, *, normalised: bool) -> Weighed:
    """Score and weigh the clients of a CSV; returns the document that `steelyard weigh --format json` prints."""
    clients, criteria, values = read_table(path)
    settings = options.settings(criteria)
    zero: list[str] = []
    if normalised:
        values, silent = normalise(values)
        zero = [name for name, is_zero in zip(criteria, silent, strict=True) if is_zero]
    elif values.max() > 1:
        raise UserError(f"{path}: holds {values.max():g}; allowed: values from 0 to 1, or --normalise for raw measures")
    scores = Rule(settings).score(values)
    shares, uniform = to_weights(scores)
    rows: list[WeighedClient] = [
        {"client": client, "score": float(found), "weight": float(share)}
        for client, found, share in zip(clients, scores, shares, strict=True)
    ]
    flags: Flags = {"zero_criteria": zero, "uniform": uniform}
    return {"clients": rows, "criteria": criteria, "score": settings.score, "flags": flags}


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.replace(" ", "").split(",")]
    except ValueError:
        raise UserError(f"--weights: got '{text}'; allowed: numbers with commas, such as 0.5,0.3,0.2") from None


def read_capacity(path: Path, option: str) -> dict[str, Any]:
    """Read the capacity of a Choquet integral from a TOML file; `option` is who asks, for the error line."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise UserError(f"{option}: {path} is not UTF-8 text; allowed: a TOML file") from None
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read: {error.strerror}; allowed: a TOML file") from error
