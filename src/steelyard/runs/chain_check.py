"""Whether a run's rows and its privacy ledger are what its chain says: for a resume, and for readers of a run."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.privacy.ledger_marks import FILE as LEDGER
from steelyard.privacy.ledger_marks import Mark, first_difference
from steelyard.runs.chain import SALT, SEEN, Records, marked


@dataclass(frozen=True)
class Checked:
    """What a look at a run's chain has shown."""

    head: str = ""
    """The last head; empty before the first checkpoint."""
    round: int = -1
    """The round that it is the head of; rounds after the last checkpoint are not in the chain yet."""
    problem: str = ""
    """What differs first, in words; empty where all is as it was written."""
    ledger: bool = False
    """Whether the run keeps a privacy ledger, for which nothing can be excused."""


Row = tuple[int, object, object, object]
"""Of the chain: round, bytes and SHA-256 of the ledger, head."""


def check(db: sqlite3.Connection, folder: Path) -> Checked:
    """Compute a run's chain again from its rows and its ledger, and say where it first differs."""
    with one_moment(db):
        rows = chain_rows(db)
        sealed = [row for row in rows if row[3] is not None]
        problem = _first_problem(db, sealed)
        return checked(db, folder, rows, problem)


def chain_rows(db: sqlite3.Connection) -> list[Row]:
    """Return the rows of a run's chain, also of rounds that have no head yet."""
    return db.execute("SELECT round, ledger_bytes, ledger, head FROM chain ORDER BY round").fetchall()


def checked(db: sqlite3.Connection, folder: Path, rows: Sequence[Row], problem: str) -> Checked:
    """Return what a look at the rounds has shown, once the ledger was looked at too."""
    seen = db.execute("SELECT value FROM info WHERE key = ?", (SEEN,)).fetchone()
    salted = db.execute("SELECT 1 FROM info WHERE key = ?", (SALT,)).fetchone() is not None
    marks = [(marked(size, sha256), f"round {round} was written") for round, size, sha256, _ in rows]
    marks.append((_read_mark(seen), "the run was last resumed"))
    known = sorted(((mark, when) for mark, when in marks if mark is not None), key=lambda each: each[0].bytes)
    # The ledger is read after the rows: it may have grown meanwhile, and is never behind them.
    found = first_difference(folder / LEDGER, [mark for mark, _ in known])
    if found is not None:
        problem = f"{LEDGER}: the ledger of this run {found[1]} when {known[found[0]][1]}"
    last = next((row for row in reversed(rows) if row[3] is not None), (-1, None, None, ""))
    return Checked(str(last[3]), int(last[0]), problem, salted or bool(known) or files.is_file(folder / LEDGER))


def _first_problem(db: sqlite3.Connection, sealed: Sequence[Row]) -> str:
    records = Records(db)
    head = records.first()
    heads: dict[int, object] = {}
    for expected, (round, size, sha256, written) in enumerate(sealed):
        if round != expected:
            return f"round {expected} is missing from its chain"
        head = records.head(round, head, marked(size, sha256))
        if head != written:
            return f"round {round} is not as it was written"
        heads[round] = head
    return checkpoint_problem(db, heads)


def checkpoint_problem(db: sqlite3.Connection, heads: Mapping[int, object]) -> str:
    """Say which checkpoint does not follow the chain, given the heads of its rounds; empty where all do."""
    checkpoints = db.execute("SELECT round, head FROM checkpoints ORDER BY round").fetchall()
    for round, written in checkpoints:
        if heads.get(round) != written:
            return f"the checkpoint after round {round} names another head than the chain"
    followed = checkpoints[-1][0] if checkpoints else -1
    last = max(heads, default=followed)
    return "" if followed == last else f"round {followed + 1} has a head and no checkpoint after it"


def require_whole(checked: Checked, folder: Path, *, accept: bool) -> None:
    """Refuse to go on with a run that is not as it was written; `accept` excuses it, where there is no ledger."""
    if not checked.problem or (accept and not checked.ledger):
        return
    if checked.ledger:
        allowed = "the folder as it was written; --accept-changes excuses no run that keeps a privacy ledger"
    else:
        allowed = f"the folder as it was written, or `steelyard resume {folder} --accept-changes`"
    raise UserError(f"{folder}: {checked.problem}; allowed: {allowed}")


def ledger_seen(db: sqlite3.Connection) -> dict[str, object]:
    """Return the note by which a resume remembers how far the ledger had come in rounds that will be run again."""
    row = db.execute("SELECT ledger_bytes, ledger FROM chain WHERE ledger IS NOT NULL ORDER BY round DESC").fetchone()
    mark = None if row is None else marked(*row)
    return {} if mark is None else {SEEN: [mark.bytes, mark.sha256]}


def _read_mark(row: tuple[str] | None) -> Mark | None:
    try:
        size, sha256 = json.loads("[null, null]" if row is None else row[0])
    except (ValueError, TypeError, RecursionError):
        return Mark(0, "")  # not what we wrote: it differs from every ledger
    return marked(size, sha256)


@contextmanager
def one_moment(db: sqlite3.Connection) -> Generator[None]:
    """Let all questions be answered from the same moment, while a run is being written."""
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.rollback()
