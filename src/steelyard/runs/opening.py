"""Opening a run's database, for writing or for questions; whatever is wrong with it is an error in one line."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from steelyard.base import files
from steelyard.base.errors import UserError, brief, one_line
from steelyard.base.files import DATABASE
from steelyard.runs.checks import BROKEN, Damaged, bound, check_files, check_schema, distrust, size_of_database, unbound
from steelyard.runs.schema import SCHEMA, VERSION
from steelyard.runs.typed import Reader

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
    files.ATTACK_FILE: ("attacks", "a run in it, {0}/ATTACK"),
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
            return f"no run here (no {missing}); allowed: one of the runs in it, such as {inside[0]}"
    return f"no run here (no {missing}); allowed: a folder that `steelyard run` made"


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
        raise Unreadable(f"{path}: not a readable run database: {_reason(error)}", _reason(error)) from error


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database of another version, or with other tables than ours."""
    row = connection.execute(_VERSION).fetchone()
    found = row[0] if row else None
    if found != str(VERSION):
        raise UserError(f"{path}: schema {brief(found, '')}; this version reads schema {VERSION}")
    check_schema(connection, SCHEMA)


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
    if folder in _KEPT.readers:
        yield
        return
    connection = connect(folder, write=False)
    assert isinstance(connection, Reader)
    _KEPT.readers[folder] = connection
    try:
        yield
    finally:
        del _KEPT.readers[folder]
        connection.close()


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
        _prepare_writing(connection, path)
    return connection


def _prepare_writing(connection: sqlite3.Connection, path: Path) -> None:
    distrust(connection)
    if connection.execute(_ANY_TABLE).fetchone():
        # Before anything is read on or written: pages may point to each other, and a trigger that somebody put there
        # would run with the first row.
        bound(connection, size_of_database(path))
        (found,) = connection.execute(_FIRST_DAMAGE).fetchone()
        if found != "ok":
            raise Damaged(f"damaged: {found}; allowed: the file as it was")
        _check(connection, path)
        unbound(connection)
    with suppress(sqlite3.OperationalError):  # while somebody reads a run at rest; it is written all the same
        connection.executescript(_KEEP_A_LOG)
    connection.executescript(_PATIENT)
    with connection:
        connection.executescript(SCHEMA)
        connection.execute(_NOTE_VERSION, (str(VERSION),))
    _check(connection, path)


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
        connection.size, connection.schema = size, SCHEMA
        _check(connection, path)
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
