"""What a database must be before anything is asked of it: it may have been made by anybody, to do anything.

Its files are plain ones, its tables are exactly ours, and no question takes more steps, rows or bytes than a database
of its size can need.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from functools import cache
from pathlib import Path

from steelyard.base import files
from steelyard.base.errors import UserError, brief
from steelyard.base.files import BESIDE

_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""How SQLite marks the end of a journal that names a further one."""
_STEPS = 10_000
"""Steps of SQLite's machine between two looks at how many there were."""
_STEPS_PER_BYTE = 50
"""More than any question of ours takes: about 30 steps for a row, which is 4 bytes at the least."""
_LEAST = 1 << 20
"""Bytes for which the smallest database is taken."""
_LONGEST = 1_000_000_000
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


def check_schema(connection: sqlite3.Connection, schema: str) -> None:
    """Refuse tables, views, triggers and indices that are not those of `schema`, to the letter."""
    ours = _made_by(schema)
    seen = _objects(connection)
    for kind, name, *_ in sorted(seen - ours):
        raise Damaged(f"the {brief(kind, '')} {brief(name)} is not one of a run's database")
    for kind, name, *_ in sorted(ours - seen):
        raise Damaged(f"the {kind} {name!r} is missing")


@cache
def _made_by(schema: str) -> frozenset[tuple[str, ...]]:
    with closing(sqlite3.connect(":memory:")) as model:
        model.executescript(schema)
        return _objects(model)


def _objects(connection: sqlite3.Connection) -> frozenset[tuple[str, ...]]:
    return frozenset(tuple(map(str, row)) for row in connection.execute(_OBJECTS))


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
