"""Opening a run's database, for writing or for questions; it may have been made by anybody, to do anything.

Its files are plain ones, its tables are exactly ours, no question takes more steps, rows or bytes than a database of
its size can need, and every value is of its column's type. Whatever is wrong is an error in one line.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    BaseModel,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from steelyard.base import files
from steelyard.base.errors import MachineError, UserError, brief, one_line
from steelyard.base.files import BESIDE, DATABASE
from steelyard.runs.facts import RunFacts
from steelyard.runs.schema import SCHEMA, VERSION, Column, declared

_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""How SQLite marks the end of a journal that names a further one."""
_STEPS = 10_000
"""Steps of SQLite's machine between two looks at how many there were."""
_STEPS_PER_BYTE = 50
"""More than any question of ours takes: about 30 steps for a row, which is 4 bytes at the least."""
_LEAST = 1 << 20
"""Bytes for which the smallest database is taken."""
_LONGEST = 1_000_000_000
_COMMENT = re.compile(r"\s*--[^\n]*")
_OBJECTS = "SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT 1000"
_DISTRUST = ("PRAGMA trusted_schema=OFF", "PRAGMA cell_size_check=ON")


class Damaged(Exception):
    """A database is not as a run wrote it; whoever opened it says so in one line."""


BROKEN = (sqlite3.Error, UnicodeDecodeError, Damaged)
"""How a damaged database shows. SQLite's own messages quote it, and Python decodes them."""


def check_files(path: Path, *, write: bool) -> bool:
    """Whether a run's database is there; refuses links, and files beside it through which SQLite would reach others."""
    # SQLite shortens the files beside it in place, for readers too.
    beside = [path.name + ending for ending in BESIDE]
    there = files.files_in(path.parent, [*beside, path.name], alone=[*beside, *([path.name] if write else ())])
    journal = path.with_name(path.name + "-journal")
    # A run that begins has one for a moment, and may remove it while we look.
    with suppress(FileNotFoundError):
        if journal.name in there and files.read_bytes(journal).endswith(_JOURNAL):
            # SQLite removes the file that is named there once it has rolled back. Ours never name one.
            raise UserError(f"{journal}: names another file; allowed: the file as the run wrote it")
    return path.name in there


@cache
def _ours() -> frozenset[tuple[str, ...]]:
    with closing(sqlite3.connect(":memory:")) as model:
        model.executescript(SCHEMA)
        return _objects(model)


def _objects(connection: sqlite3.Connection) -> frozenset[tuple[str, ...]]:
    """Return what a database holds, as the statements that made it, without our comments."""
    rows = connection.execute(_OBJECTS)
    return frozenset((*map(str, names), _COMMENT.sub("", str(made))) for *names, made in rows)


def size_of_database(path: Path) -> int:
    """Return how many bytes a database has, with what is in its log."""
    total = 0
    for file in (path, *(path.with_name(path.name + ending) for ending in BESIDE)):
        try:
            total += os.lstat(file).st_size
        except OSError:
            continue
    return max(total, _LEAST)


def distrust(connection: sqlite3.Connection) -> None:
    """Have SQLite check pages as it reads them, and run nothing that a database brings along."""
    for statement in _DISTRUST:
        connection.execute(statement)


def bound(connection: sqlite3.Connection, size: int) -> None:
    """End every question that takes more steps, or a value that is longer, than a database of this size can need.

    Pages that point to each other give a table without end, and one page may be the rest of a thousand values.
    """
    left = 0

    def begin(_: str) -> None:
        nonlocal left
        left = size * _STEPS_PER_BYTE // _STEPS

    def step() -> int:
        nonlocal left
        left -= 1
        return int(left < 0)

    begin("")
    connection.set_trace_callback(begin)
    connection.set_progress_handler(step, _STEPS)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(size, _LONGEST))
    distrust(connection)


def unbound(connection: sqlite3.Connection) -> None:
    """Let a database that was found sound be written, and grow."""
    connection.set_trace_callback(None)
    connection.set_progress_handler(None, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)


_CHUNK = 10_000
_ROW = 4
"""Bytes that a row takes at the least."""
LARGEST_FIGURE = 1e200
"""No figure of a run comes near, and sums of such figures are still numbers."""
_LARGEST = 10**12
"""No count of ours comes near; seeds are no counts."""


class _Settings(BaseModel, extra="allow", strict=True):
    """What readers ask of a rule's settings; the rest may be anything."""

    criteria: list[str]
    score: str = "prioritized"
    power: float | None = None
    priority: str | None = None
    normalise: str = "share"
    loss: dict[str, Any] | None = None
    trained_by: str = "clients"

    @model_validator(mode="after")
    def _ordered(self) -> _Settings:
        named = [name.strip() for name in (self.priority or "").split(">") if name.strip()]
        if len(set(self.criteria)) < len(self.criteria) or not set(named) <= set(self.criteria):
            raise ValueError("criteria and priority do not fit")
        return self


class _Loss(BaseModel, extra="forbid", strict=True):
    name: str = "auto"
    class_weights: list[float] | None = None
    shape: float | None = None
    scale: float | None = None


def _known(metrics: dict[str, float | list[float]]) -> dict[str, float | list[float]]:
    for name, value in metrics.items():
        if any(abs(one) > LARGEST_FIGURE for one in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{name} is beyond {LARGEST_FIGURE:g}")
        if isinstance(value, list) != (name == "f1") and name in ("f1", "mape", "mae", "rmse"):
            raise ValueError(f"{name} is of another kind")
    return metrics


_SHAPES: Mapping[tuple[str, str], TypeAdapter[Any]] = {
    ("federations", "settings"): TypeAdapter(_Settings),
    ("rounds", "tried"): TypeAdapter(list[tuple[str, float | None]]),
    ("rounds", "zero_criteria"): TypeAdapter(list[str]),
    ("rounds", "loss"): TypeAdapter(_Loss),
    ("rounds", "server_metrics"): TypeAdapter(Annotated[dict[str, float | list[float]], AfterValidator(_known)]),
    ("evaluations", "metrics"): TypeAdapter(list[str]),
}
_FRAMES = {int: "int64", float: "float64", str: "str", bytes: "object"}
_NamedT = TypeVar("_NamedT")


class Reader(sqlite3.Connection):
    """A connection to a database that may be anybody's; ask it through `rows` and `info`."""

    size = 1 << 20
    """Bytes of the database: no table holds more."""

    def rows(self, table: str, columns: Sequence[str], where: str = "", *values: int | str) -> list[tuple[Any, ...]]:
        """Return columns of one table, each value of its column's type; what is not finite is unknown (None)."""
        cursor = self.execute(f"SELECT {', '.join(columns)} FROM {table} {where}", values)
        found: list[tuple[Any, ...]] = []
        left = self.size
        while part := cursor.fetchmany(_CHUNK):
            found += part
            left -= sum(len(value) for row in part for value in row if isinstance(value, str | bytes))
            if left < 0 or len(found) * _ROW > self.size:
                raise Damaged(f"{table} holds more than its file does")
        kinds = declared()[table]
        checked = [
            _check(table, name, kinds[name], column)
            for name, column in zip(columns, zip(*found, strict=True), strict=False)
        ]
        return list(zip(*checked, strict=True))

    def kinds(self, table: str, columns: Sequence[str]) -> dict[str, str]:
        """Return the columns of a data frame: by name, what pandas calls their type."""
        kinds = declared()[table]
        return {name: _FRAMES[kinds[name].kind] for name in columns}

    def facts(self) -> RunFacts:
        """Return the facts about a run."""
        try:
            return RunFacts.read(dict(self.rows("info", ("key", "value"), "ORDER BY key")))
        except ValueError as error:
            raise _damage(("info",), error) from None

    def check_tables(self) -> None:
        """Read what a writer takes over from a database as it is: every value of its type, no table without end."""
        for table in _TAKEN_OVER:
            self.rows(table, tuple(declared()[table]))

    def federations(self) -> dict[int, tuple[str, int]]:
        """Return the rule and the seed of each federation by its number."""
        found = {key: (rule, seed) for key, rule, seed in self.rows("federations", _FEDERATION, "ORDER BY id")}
        if len(set(found.values())) < len(found):
            raise Damaged("federations: a rule and a seed come twice")
        return found

    def by_federation(
        self, table: str, columns: Sequence[str], where: str = "", *values: int | str
    ) -> list[tuple[Any, ...]]:
        """Return columns as `rows` does, behind the rule and the seed, a pair, that each row belongs to."""
        rows = self.rows(table, ("federation", *columns), where, *values)
        federations = self.federations()
        return [(known(federations, key, "federation"), *rest) for key, *rest in rows]


_FEDERATION = ("id", "rule", "seed")
_TAKEN_OVER = ("clients", "federations", "failures", "untested", "ended", "chain", "checkpoints")
NEWEST = "WHERE federation = ? ORDER BY round DESC LIMIT 1"
"""For `rows`: the newest round of a federation alone, at the end of the primary key."""


def known(names: Mapping[int, _NamedT], key: int, what: str) -> _NamedT:
    """Return what a number stands for in another table; one that is not there is damage."""
    if key not in names:
        raise Damaged(f"{what} number {key} is not in its table")
    return names[key]


def _check(table: str, name: str, column: Column, values: tuple[Any, ...]) -> Sequence[Any]:
    allowed = {column.kind, type(None)} if column.may_lack else {column.kind}
    if not set(map(type, values)) <= allowed:
        wrong = next(value for value in values if type(value) not in allowed)
        raise Damaged(f"{table}, {name}: {brief(wrong)} is no {column.words}")
    if column.kind is float and any(value is not None and LARGEST_FIGURE < abs(value) < math.inf for value in values):
        raise Damaged(f"{table}, {name}: holds a number beyond {LARGEST_FIGURE:g}")
    if column.kind is float and not all(value is None or math.isfinite(value) for value in values):
        if not column.may_lack:
            raise Damaged(f"{table}, {name}: holds a number that is not finite")
        values = tuple(value if value is not None and math.isfinite(value) else None for value in values)
    most = 2**63 if name == "seed" else _LARGEST
    if column.kind is int and not all(value is None or 0 <= value <= most for value in values):
        wrong = next(value for value in values if value is not None and not 0 <= value <= most)
        raise Damaged(f"{table}, {name}: {wrong} is no {column.words}")
    if (table, name) in _SHAPES:
        for text in set(values) - {None}:
            _check_shape(table, name, text)
    return values


def _check_shape(table: str, name: str, text: str) -> None:
    """Refuse a JSON text of another shape than its column's; readers then need not look again."""
    shape = _SHAPES.get((table, name))
    if shape is None:
        return
    try:
        json.loads(text)  # what readers use is pickier than pydantic: long numbers, depth
        shape.validate_json(text, strict=True)
    except ValidationError as error:
        raise _damage((table, name), error) from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{table}, {name} holds no JSON ({error})") from None


def _damage(path: tuple[str, ...], error: ValueError) -> Damaged:
    """Return what is wrong with JSON of another shape, in one line."""
    if not isinstance(error, ValidationError):
        return Damaged(f"{', '.join(path)}, {error}")
    first = error.errors(include_url=False)[0]
    table, name, *inside = (*path, *map(str, first["loc"]))
    return Damaged(f"{table}, {name}: {'.'.join(inside) and '.'.join(inside) + ': '}{first['msg']}")


_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
"""How SQLite says that a disk is full: it writes less than it was asked to."""
_WAIT = 30
"""Seconds to wait for whoever holds a lock."""
_VERSION = "SELECT value FROM info WHERE key = 'schema' LIMIT 1"
_NOTE_VERSION = "INSERT OR IGNORE INTO info VALUES ('schema', ?)"
_ANY_TABLE = "SELECT 1 FROM sqlite_master LIMIT 1"
_FIRST_DAMAGE = "PRAGMA quick_check(1)"
_KEEP_A_LOG = "PRAGMA busy_timeout=1000; PRAGMA journal_mode=WAL"
_PATIENT = f"PRAGMA busy_timeout={1000 * _WAIT}; PRAGMA synchronous=NORMAL"


class Unreadable(UserError):
    """A run that is there and cannot be read; `why` says the reason alone, for lists that name the run anyway."""

    def __init__(self, line: str, why: str) -> None:
        super().__init__(line)
        self.why = why


_SEVERAL = {
    files.SWEEP_FILE: ("a sweep", "a run in it, {0}/POINT, or `steelyard table {0}`"),
    files.ATTACK_FILE: ("attacks", "a run in it, {0}/ATTACK, or `steelyard table {0}`"),
    files.PARTICIPATION_FILE: ("a comparison at several shares", "a run in it, or `steelyard table {0}`"),
    files.ARENA_FILE: ("an arena", "a run in it, {0}/scenes/NAME, or `steelyard table {0}` and `steelyard report {0}`"),
}
"""By file: what a folder of several runs is, and what to name in its place."""


def instead_of_a_run(folder: Path, missing: str = DATABASE) -> str:
    """Say what a folder without a run's file holds; use it for whoever named the folder of several runs."""
    for name, (what, instead) in _SEVERAL.items():
        if files.is_file(folder / name):
            return f"holds {what}, which is several runs; allowed: {instead.format(folder)}"
    with suppress(OSError):
        if inside := sorted(entry.parent for entry in folder.glob(f"*/{DATABASE}")):
            return f"not a run folder: {missing} is missing; allowed: one of the runs in it, such as {inside[0]}"
    return f"not a run folder: {missing} is missing; allowed: a folder that `steelyard run` made"


def connect(folder: Path, *, write: bool) -> sqlite3.Connection:
    """Open the database of a run folder; readers never block the writer nor the other way round (WAL)."""
    path = folder / DATABASE
    if not check_files(path, write=write) and not write:
        raise UserError(f"{folder}: {instead_of_a_run(folder)}")
    try:
        return _for_writing(path) if write else _for_reading(path)
    except (*BROKEN, OSError, UserError) as error:
        if isinstance(error, UserError):
            raise
        if write and isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF in _NO_ROOM:
            words = "allowed: a writable folder with room on the disk"
            raise MachineError(f"{folder}: cannot be written: {_reason(error)}; {words}") from error
        raise Unreadable(f"{path}: not a readable run database: {_reason(error)}", _reason(error)) from error


def _check_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database of another version, or whose tables, views, triggers and indices are not ours to the letter."""
    row = connection.execute(_VERSION).fetchone()
    found = row[0] if row else None
    if found != str(VERSION):
        raise UserError(f"{path}: schema {brief(found, '')}; this version reads schema {VERSION}")
    ours, seen = _ours(), _objects(connection)
    for kind, name, *_ in sorted(seen - ours):
        raise Damaged(f"the {brief(kind, '')} {brief(name)} is not one of a run's database")
    for kind, name, *_ in sorted(ours - seen):
        raise Damaged(f"the {kind} {name!r} is missing")


class _Kept(threading.local):
    """By folder, the databases that stay open for a while in this thread: SQLite lends none to another."""

    def __init__(self) -> None:
        self.readers: dict[Path, Reader] = {}


_KEPT = _Kept()


@contextmanager
def reading(folder: Path) -> Generator[Reader]:
    """Open the database of a run folder for some questions; what goes wrong with one is an error in one line."""
    kept = _KEPT.readers.get(folder)
    connection = connect(folder, write=False) if kept is None else kept
    assert isinstance(connection, Reader)
    try:
        yield connection
    except BROKEN as error:
        raise unreadable(folder, _reason(error)) from error
    finally:
        if kept is None:
            connection.close()


@contextmanager
def kept_open(folder: Path) -> Generator[None]:
    """Let `reading` open and check a run's database once for a block; each question still sees the newest round."""
    with reading(folder) as connection:
        if folder in _KEPT.readers:
            yield
            return
        _KEPT.readers[folder] = connection
        try:
            yield
        finally:
            del _KEPT.readers[folder]


def unreadable(folder: Path, reason: object) -> Unreadable:
    """Return the error for a database that is not as a run wrote it."""
    return Unreadable(f"{folder}: the run's database cannot be read: {one_line(str(reason))}", one_line(str(reason)))


def _reason(error: Exception) -> str:
    # What `bound` ends, SQLite calls interrupted.
    return "a query of it does not end" if str(error) == "interrupted" else one_line(str(error))


@contextmanager
def _closed_on_error(connection: sqlite3.Connection) -> Generator[None]:
    """Close a connection that comes to nothing at once: one that waits for the collector holds its locks."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _for_writing(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_WAIT)
    with _closed_on_error(connection):
        distrust(connection)
        if connection.execute(_ANY_TABLE).fetchone():
            # Before anything is read on or written: pages may point to each other, and a trigger that somebody put
            # there would run with the first row.
            bound(connection, size_of_database(path))
            (found,) = connection.execute(_FIRST_DAMAGE).fetchone()
            if found != "ok":
                raise Damaged(f"damaged: {found}; allowed: the file as it was")
            _check_tables(connection, path)
            unbound(connection)
        with suppress(sqlite3.OperationalError):  # while somebody reads a run at rest; it is written all the same
            connection.executescript(_KEEP_A_LOG)
        connection.executescript(_PATIENT)
        with connection:
            connection.executescript(SCHEMA)
            connection.execute(_NOTE_VERSION, (str(VERSION),))
        _check_tables(connection, path)
    return connection


def _for_reading(path: Path) -> Reader:
    size = size_of_database(path)
    connection = sqlite3.connect(f"file:{_escaped(path)}?mode=ro", uri=True, timeout=_WAIT, factory=Reader)
    try:
        with _closed_on_error(connection):
            bound(connection, size)
            connection.execute(_ANY_TABLE).fetchone()
    except sqlite3.OperationalError as error:
        if "unable to open" not in str(error) and "readonly" not in str(error):
            raise
        connection = _from_read_only(path)
    with _closed_on_error(connection):
        bound(connection, size)
        connection.size = size
        _check_tables(connection, path)
    return connection


def _from_read_only(path: Path) -> Reader:
    """Open a database whose folder cannot be written, where SQLite cannot make the side files of a run that goes on."""
    beside = [path.with_name(path.name + ending) for ending in ("-wal", "-journal")]
    pending = [file for file in beside if files.is_file(file) and file.stat().st_size]
    if not pending:
        return sqlite3.connect(f"file:{_escaped(path)}?mode=ro&immutable=1", uri=True, factory=Reader)
    # What is not in the database file yet, or has to be taken out of it again, is in the files beside it: all are
    # copied to where SQLite can put them together.
    with tempfile.TemporaryDirectory() as scratch:
        for file in (path, *pending):
            shutil.copyfile(file, Path(scratch) / file.name)
        inside = sqlite3.connect(":memory:", factory=Reader)
        with closing(sqlite3.connect(Path(scratch) / path.name)) as whole:
            whole.backup(inside)
    return inside


def _escaped(path: Path) -> str:
    """Return a path as SQLite's addresses want it: a question mark in a folder's name begins no options."""
    return quote(str(path))


def close_log(connection: sqlite3.Connection) -> None:
    """Make the database one file without side files, as far as nobody is reading it right now."""
    connection.execute("PRAGMA busy_timeout=100")
    for _ in range(20):
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            if connection.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",):
                return
        except sqlite3.OperationalError:
            pass
        time.sleep(0.05)


def exists(folder: Path) -> bool:
    """Whether a folder holds a run already."""
    return files.is_file(folder / DATABASE)
