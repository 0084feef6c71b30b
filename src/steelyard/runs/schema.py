"""The tables of a run's database. A round is written in one transaction, so a reader sees whole rounds only."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from steelyard import files
from steelyard.errors import UserError, brief, one_line
from steelyard.files import BESIDE as BESIDE
from steelyard.files import DATABASE as DATABASE
from steelyard.runs.checks import BROKEN, Damaged, bound, check_files, check_schema, distrust, size_of_database, unbound
from steelyard.runs.typed import Reader, declared

VERSION = 9
_WAIT = 30
"""Seconds to wait for whoever holds a lock."""
_VERSION = "SELECT value FROM info WHERE key = 'schema' LIMIT 1"
_NOTE_VERSION = "INSERT OR IGNORE INTO info VALUES ('schema', ?)"
_ANY_TABLE = "SELECT 1 FROM sqlite_master LIMIT 1"
_FIRST_DAMAGE = "PRAGMA quick_check(1)"
_KEEP_A_LOG = "PRAGMA busy_timeout=1000; PRAGMA journal_mode=WAL"
_PATIENT = f"PRAGMA busy_timeout={1000 * _WAIT}; PRAGMA synchronous=NORMAL"

SCHEMA = """
CREATE TABLE IF NOT EXISTS info (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS federations (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
    rule TEXT NOT NULL, seed INTEGER NOT NULL, settings TEXT NOT NULL,
    algorithm TEXT NOT NULL      -- its name; its parameters are in the settings
);
CREATE TABLE IF NOT EXISTS clients (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS rounds (
    federation INTEGER NOT NULL REFERENCES federations(id),
    round INTEGER NOT NULL,
    accuracy REAL,               -- over all clients' test samples; NULL where the round was not evaluated
    priority TEXT,               -- the order that the round kept
    tried TEXT NOT NULL,         -- JSON: [[order, accuracy], ...], the order the round started with first
    tests INTEGER NOT NULL,      -- testing rounds: extra tests beyond the one every round has
    cohort INTEGER NOT NULL,     -- clients asked
    answered INTEGER NOT NULL,   -- clients whose update was weighed
    kept_old INTEGER NOT NULL,   -- 1: the old model was kept, nothing could be weighed
    zero_criteria TEXT NOT NULL, -- JSON: criteria that were 0 for the whole cohort (everyone got 1/n)
    zero_scores INTEGER NOT NULL,-- 1: all scores were 0, weights are uniform for that reason
    loss TEXT NOT NULL,          -- JSON: the loss the clients used
    server_accuracy REAL, server_macro_f1 REAL,
    server_metrics TEXT,         -- JSON: f1 per class, or mape, mae, rmse, on the server's test set
    seconds REAL NOT NULL,
    simulated REAL,              -- seconds that the round took on the devices' clock; NULL without one
    epsilon REAL,                -- what the rounds so far have told about any one client; NULL without such a promise
    cpu REAL, gpu REAL,          -- seconds of this process's processors and of a GPU held; a round's are shared evenly
    up REAL, down REAL,          -- bytes of all answers, and sent to all that were asked; NULL: unknown
    PRIMARY KEY (federation, round)
) WITHOUT ROWID;
-- What single clients did stands as one row per round, a column of numbers in each field (runs/columns.py): a row per
-- client would make a long run slow to read. NULL: none of them is known.
CREATE TABLE IF NOT EXISTS updates (
    federation INTEGER NOT NULL, round INTEGER NOT NULL,
    clients BLOB NOT NULL,                           -- numbers of the clients, int32
    samples BLOB NOT NULL,                           -- int64
    bytes BLOB, loss BLOB NOT NULL, score BLOB, weight BLOB, -- float64, NaN for unknown
    raw BLOB, normalised BLOB,                       -- float64 [clients, criteria of the rule]
    listening BLOB,                                  -- float64 [clients, clients]: how each weighed all for itself
    PRIMARY KEY (federation, round)
);
CREATE TABLE IF NOT EXISTS failures (                -- clients that were asked and left out, and why
    federation INTEGER NOT NULL, round INTEGER NOT NULL, client INTEGER NOT NULL REFERENCES clients(id),
    reason TEXT NOT NULL, PRIMARY KEY (federation, round, client)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS untested (                -- clients that gave no usable test of the round's model, and why
    federation INTEGER NOT NULL, round INTEGER NOT NULL, client INTEGER NOT NULL REFERENCES clients(id),
    reason TEXT NOT NULL, PRIMARY KEY (federation, round, client)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evaluations (
    federation INTEGER NOT NULL, round INTEGER NOT NULL,
    clients BLOB NOT NULL, samples BLOB NOT NULL,    -- int32, int64
    score BLOB NOT NULL, loss BLOB NOT NULL,         -- float64, NaN for unknown
    metrics TEXT NOT NULL, figures BLOB,             -- JSON: names of further metrics; float64 [metrics, clients]
    PRIMARY KEY (federation, round)
);
CREATE TABLE IF NOT EXISTS samples (
    federation INTEGER NOT NULL, round INTEGER NOT NULL, hits BLOB NOT NULL, -- packed bits, clients in order
    count INTEGER NOT NULL, PRIMARY KEY (federation, round)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ended (                   -- federations that ended early because a model exploded, and why
    federation INTEGER PRIMARY KEY REFERENCES federations(id),
    round INTEGER NOT NULL,      -- the round that gave no sound model; the one before is the last there is
    reason TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS contributions (           -- what each client added to the model; source run is in the chain
    federation INTEGER NOT NULL, round INTEGER NOT NULL,
    measure TEXT NOT NULL, method TEXT NOT NULL,
    source TEXT NOT NULL,                            -- run, kept, rounded, replay or retrained: what it was made from
    clients BLOB NOT NULL, added BLOB NOT NULL,      -- int32; float64 [clients, 1 + groups of test rows]
    error BLOB NOT NULL, sizes BLOB NOT NULL,        -- float64: of drawing coalitions; int64: rows of each group
    before REAL NOT NULL, after REAL NOT NULL,       -- the measure of the model before and after the round
    PRIMARY KEY (federation, round, measure, method, source)
) WITHOUT ROWID;
-- The chain of rounds (runs/chain.py, docs/reference/chain.md); digests and heads are written with checkpoints.
CREATE TABLE IF NOT EXISTS digests (
    federation INTEGER NOT NULL, round INTEGER NOT NULL,
    model TEXT NOT NULL,         -- SHA-256 of the model that the round ended with
    task TEXT,                   -- SHA-256 of what clients were asked; NULL: nobody was
    updates BLOB,                -- salted SHA-256 of each client's update, 32 bytes each; NULL: none was taken
    salts BLOB,                  -- the salts, 16 bytes each; NULL: nodes keep them
    marks BLOB,                  -- by which a change is found in its client's row (runs/marks.py), 8 bytes each
    PRIMARY KEY (federation, round)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS signatures (              -- of nodes, each over all digests of its clients in a round
    federation INTEGER NOT NULL, round INTEGER NOT NULL, key TEXT NOT NULL,
    clients BLOB NOT NULL,       -- numbers of the clients that the statement names, int32
    others BLOB,                 -- digests of those of them that are not among the round's updates; NULL: none
    before TEXT,                 -- digest of the node's statement before; NULL: it knew of none
    signature BLOB NOT NULL, PRIMARY KEY (federation, round, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (
    key TEXT PRIMARY KEY,        -- fingerprint
    line TEXT NOT NULL           -- the public key, as one line of OpenSSH
);
CREATE TABLE IF NOT EXISTS chain (
    round INTEGER PRIMARY KEY,
    ledger_bytes INTEGER,        -- how long the privacy ledger was when the round was written; NULL: there is none
    ledger TEXT,                 -- SHA-256 of these bytes
    head TEXT,                   -- SHA-256 of the round's record; NULL until a checkpoint follows
    key TEXT, signature BLOB     -- of the server, over the head; NULL: it has no key
);
CREATE TABLE IF NOT EXISTS checkpoints (
    round INTEGER PRIMARY KEY, file TEXT NOT NULL, states TEXT NOT NULL,
    checksum TEXT NOT NULL,      -- SHA-256 of the file and the states
    head TEXT NOT NULL           -- of the chain, after this round
);
"""


WRITE: Mapping[str, str] = {
    table: f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(columns))})"
    for table, columns in declared(SCHEMA).items()
}
"""By table, the statement that writes a whole row, in place of the one that is there."""


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
    return "a question to it does not end" if str(error) == "interrupted" else one_line(str(error))


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
        whole = sqlite3.connect(Path(scratch) / path.name)
        inside = sqlite3.connect(":memory:", factory=Reader)
        try:
            whole.backup(inside)
        finally:
            whole.close()
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
