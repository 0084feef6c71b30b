"""A run folder from files: what somebody's federation wrote down by round and client, as CSV or JSON lines."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from steelyard.adapters.recorder import ClientTest, Recorder
from steelyard.adapters.swarm import BEFORE, MEASURE, RULE, TESTED, digest_of
from steelyard.base.errors import UserError, brief, empty_folder, listed, one_line
from steelyard.base.files import csv_rows
from steelyard.base.logs import logger
from steelyard.base.settings import LARGEST_REAL
from steelyard.experiment.loading import FILE, SWARM
from steelyard.messages.updates import MOST_SAMPLES
from steelyard.weighing.rule import Rule, WeighingSettings
from steelyard.weighing.table import check_columns, column_criterion, number, read_words, weigh

_log = logger(__name__)
_ROUND, _CLIENT, _WEIGHT, _REASON, _SAMPLES = "round", "client", "weight", "reason", "samples"
_ACCURACY, _LOSS = "accuracy", "loss"
_OWN = (_ROUND, _CLIENT, _WEIGHT, _REASON, _SAMPLES, _ACCURACY, _LOSS)
"""Columns that are no criteria."""
_OF_SITES = (BEFORE, RULE, MEASURE, TESTED)
"""Further ones in the journals of a swarm's sites."""
_SIZE = "DS"
"""The criterion that is the number of samples."""
_LONGEST_REASON = 500
_NOT_SHOWN = "holds characters that cannot be shown; allowed: letters, digits, signs and blanks"


@dataclass(eq=False)
class _Round:
    """What a file holds of one round."""

    measures: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    weights: dict[str, float] = field(default_factory=dict[str, float])
    samples: dict[str, float] = field(default_factory=dict[str, float])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    tests: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    before: dict[str, float] = field(default_factory=dict[str, float])
    """Tests of the model of the round before."""
    rows: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])

    def has(self, client: str) -> bool:
        return client in self.measures or client in self.reasons


def import_files(paths: Sequence[Path], out: Path, by: str | None = None) -> int:
    """Write the rounds of files as a run folder and return how many there are; nothing is written where a row is wrong.

    Every row is one client in one round: the columns `round` and `client`, one column for each criterion, and
    where known `weight`, `reason` (why the client was left out), `samples`, `accuracy` and `loss` (its test of the
    new model). Without weights, the rule `by` weighs the clients. Files that the sites of a swarm wrote (`Site`) name
    their rule, and every round the one before it, to which it is held.
    """
    folder = empty_folder(out, "--out")
    columns, rounds = _read(paths)
    path, of_sites = _together(paths), _is_of_sites(columns)
    criteria = _criteria(columns)
    if not criteria and not of_sites:
        raise UserError(f"{path}: has no criteria; allowed: columns beside {listed(_OWN)}")
    if by is None and _WEIGHT not in columns:
        raise UserError(f"--by: missing, and {path} has no column {_WEIGHT}; allowed: a rule, such as '{criteria[0]}'")
    if of_sites:
        _check_sites(path, rounds)
        by = _of_all(path, rounds, RULE)
    elif by is not None and _WEIGHT in columns:
        _log.warning(f"--by: {path} has weights, which are kept; '{by}' is taken as the rule that they come from")
    settings = WeighingSettings(criteria=tuple(criteria), name="as imported")
    if by is not None:
        settings = _weigh(by, criteria, rounds, given=_WEIGHT in columns)
    rule = Rule(settings, [column_criterion(name) for name in settings.criteria])
    framework, measure = (SWARM, _of_all(path, rounds, MEASURE)) if of_sites else (FILE, _ACCURACY)
    recorder = Recorder(folder, rule, framework=framework, rounds=len(rounds), measure=measure)
    for one in rounds:
        recorder.write(
            one.weights,
            one.measures,
            samples=one.samples or None,
            reasons=one.reasons,
            tests={
                client: ClientTest(score, max(1, round(one.samples.get(client, 1.0))), loss)
                for client, (score, loss) in one.tests.items()
            },
        )
    recorder.finish()
    return len(rounds)


def _weigh(word: str, columns: Sequence[str], rounds: Sequence[_Round], *, given: bool) -> WeighingSettings:
    """Read the rule, and weigh the clients of all rounds by it unless the file gives their weights."""
    try:
        settings = read_words(word, columns)
        check_columns(columns, settings.criteria)
        for one in rounds:
            for measures in one.measures.values() if "EQ" in settings.criteria else ():
                measures.setdefault("EQ", 1.0)
            if not given and one.measures:
                found = weigh(one.measures, settings)
                one.weights = dict(zip(found.clients, found.weights.tolist(), strict=True))
    except UserError as error:
        raise UserError(f"--by: {str(error).removeprefix('rule: ')}") from None
    return settings


def _criteria(columns: Sequence[str]) -> list[str]:
    return [name for name in columns if name not in (*_OWN, *(_OF_SITES if _is_of_sites(columns) else ()))]


def _is_of_sites(columns: Sequence[str]) -> bool:
    return set(_OF_SITES) <= set(columns)


def _together(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _of_all(path: str, rounds: Sequence[_Round], column: str) -> str:
    """Return what a column of sites' journals has in every row."""
    found = sorted({str(row.get(column)) for one in rounds for row in one.rows})
    if len(found) > 1:
        raise UserError(f"{path}: has several in column {column}: {listed(found)}; allowed: the journals of one job")
    return found[0]


def _check_sites(path: str, rounds: Sequence[_Round]) -> None:
    """Refuse rounds that do not follow one another: each names the digest of the one before it."""
    digest = ""
    for at, one in enumerate(rounds, 1):
        if any(row[BEFORE] != digest for row in one.rows):
            raise UserError(
                f"{path}: round {at} follows another round {at - 1} than the one that is here; allowed: the "
                "journals of one job, as its sites wrote them"
            )
        digest = digest_of(one.rows)


def _read(paths: Sequence[Path]) -> tuple[list[str], list[_Round]]:
    """Return the columns of files, which must be the same in all, and their rounds in order."""
    rounds: dict[int, _Round] = {}
    columns: list[str] = []
    for file in paths:
        for line, row in _rows(file):
            columns = columns or list(row)
            _take(f"{file}, line {line}", row, columns, rounds)
    path = _together(paths)
    if not rounds:
        raise UserError(f"{path}: holds no rounds; allowed: a row for each client of each round")
    first, last = min(rounds), max(rounds)
    if first not in (0, 1):
        raise UserError(f"{path}: begins with round {first}; allowed: rounds from 1 on, or from 0 on")
    missing = next((n for n in range(first, last + 1) if n not in rounds), None)
    if missing is not None:
        raise UserError(f"{path}: round {missing} is missing; allowed: every round from {first} to {last}")
    for number_, one in rounds.items():
        total = sum(one.weights.values())
        if one.weights and total <= 0:
            raise UserError(f"{path}: the weights of round {number_} are all 0; allowed: at least one above 0")
        if not one.rows:  # What a site of ours wrote are weights as the rule gives them.
            one.weights = {client: weight / total for client, weight in one.weights.items()}
        for client, score in one.before.items():
            if number_ - 1 in rounds:
                rounds[number_ - 1].tests[client] = (score, math.nan)
    return columns, [rounds[n] for n in sorted(rounds)]


def _take(where: str, row: Mapping[str, Any], columns: Sequence[str], rounds: dict[int, _Round]) -> None:
    odd = sorted(set(row) ^ set(columns))
    if odd:
        state = "missing" if odd[0] in columns else "not in the lines before"
        raise UserError(f"{where}, {odd[0]}: {state}; allowed: the same fields in every line")
    client = str("" if row[_CLIENT] is None else row[_CLIENT]).strip()
    if not client:
        raise UserError(f"{where}, {_CLIENT}: is empty; allowed: a name for each client")
    if not client.isprintable():
        raise UserError(f"{where}, {_CLIENT}: {brief(client)} {_NOT_SHOWN}")
    value = _real(f"{where}, {_ROUND}", row[_ROUND])
    if value is None or value != int(value) or not 0 <= value < 10_000_000:
        raise UserError(f"{where}, {_ROUND}: got {brief(row[_ROUND])}; allowed: a whole number from 0 to 9,999,999")
    one = rounds.setdefault(int(value), _Round())
    if one.has(client):
        raise UserError(f"{where}, {_CLIENT}: {brief(client)} comes twice in round {int(value)}; allowed: once")
    reason = str(row.get(_REASON) or "").strip()
    if reason:
        one.reasons[client] = one_line(reason)[:_LONGEST_REASON]
    else:
        one.measures[client] = {
            name: number(f"{where}, {name}", row[name], MOST_SAMPLES if name == _SIZE else LARGEST_REAL)
            for name in _criteria(columns)
        }
        if _WEIGHT in columns:
            one.weights[client] = number(f"{where}, {_WEIGHT}", row[_WEIGHT])
    if row.get(_SAMPLES) not in (None, ""):
        one.samples[client] = number(f"{where}, {_SAMPLES}", row[_SAMPLES], MOST_SAMPLES)
    score, loss = (_real(f"{where}, {name}", row.get(name)) for name in (_ACCURACY, _LOSS))
    if score is not None:
        one.tests[client] = (score, math.nan if loss is None else loss)
    if _is_of_sites(columns):
        one.rows.append(row)
        if (before := _real(f"{where}, {TESTED}", row[TESTED])) is not None:
            one.before[client] = before


def _real(where: str, cell: object) -> float | None:
    """Return a number of any sign; None for an empty cell."""
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return None
    try:
        value = float(cast("float", cell))
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{where}: got {brief(cell)}; allowed: a number")
    return value


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, row) of a file, whichever of the two forms it has."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = iter(file)
            first = next((line for line in lines if line.strip()), "")
            file.seek(0)
            yield from _json_rows(path, file) if first.lstrip().startswith("{") else _csv_rows(path, file)
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; allowed: a CSV with a header, or JSON lines") from None
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: cannot be read: {reason}; allowed: a CSV with a header, or JSON lines") from error


def _json_rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            row: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {line}: is no JSON ({error}); allowed: an object in each line") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {line}: got {brief(row)}; allowed: an object in each line")
        found = cast("dict[str, Any]", row)
        _needed(f"{path}, line {line}", list(found))
        yield line, found


def _csv_rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    yield from csv_rows(lines, str(path), _needed)[1]


def _needed(where: str, columns: Sequence[str]) -> None:
    odd = next((name for name in columns if not name.isprintable()), None)
    if odd is not None:
        raise UserError(f"{where}: the column {brief(odd)} {_NOT_SHOWN}")
    lacking = [name for name in (_ROUND, _CLIENT) if name not in columns]
    if lacking:
        raise UserError(f"{where}: has no {lacking[0]} among {listed(columns)}; allowed: {_ROUND}, {_CLIENT}, criteria")
