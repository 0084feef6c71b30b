"""The chain of a run: every round's record holds the head before it, and its SHA-256 is the next head.

docs/reference/chain.md defines it; this file is that definition as code. A record is written from the rows of the
database, by the writer of a run and by everyone who checks it alike, so that what is hashed is what is kept. It holds
nothing that differs between a run and the same run killed and resumed: no times, no numbers that stand for names.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from steelyard import files
from steelyard.errors import UserError
from steelyard.privacy.ledger_marks import FILE as LEDGER
from steelyard.privacy.ledger_marks import Mark, first_difference
from steelyard.runs.marks import Marks
from steelyard.signing import DIGEST_BYTES, SigningKey, Statement, field, fingerprint, head_statement, link, root

VERSION = 2
"""The first field of every record; another definition gets another number."""
SALT = "salt"
"""A run that promises something to its clients notes a secret under this name; the chain begins with it."""
RUN = "federation_run"
"""Under this name a run across machines notes what its nodes know it by."""
SEEN = "ledger_seen"
"""Under this name a resume notes how far the ledger had come."""

_ROUND = (
    "accuracy", "priority", "tried", "tests", "cohort", "answered", "kept_old", "zero_criteria", "zero_scores", "loss",
    "server_accuracy", "server_macro_f1", "server_metrics", "simulated", "epsilon",
)  # fmt: skip
"""All of a round but its seconds."""
_PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("rounds", _ROUND),
    ("updates", ("clients", "samples", "bytes", "loss", "score", "weight", "raw", "normalised", "listening")),
    ("digests", ("task", "model", "updates", "salts")),
    ("evaluations", ("clients", "samples", "score", "loss", "metrics", "figures")),
    ("samples", ("hits", "count")),
    ("ended", ("reason",)),
)
_SINGLE = (("failures", "reason"), ("untested", "reason"), ("signatures", "key"))
"""Tables with a row for each client, and what of it is in the record. A signature holds by itself, or does not."""
_VALUES = ("measure", "method", "clients", "added", "error", "sizes", "before", "after")
"""What each client added, as measured while the run went; what was found out afterwards is not in the record."""


class Records:
    """Writes records from the rows of a run's database; names are looked up once."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._names: dict[int, bytes] = {}
        self._marks = Marks(db)
        federations = db.execute("SELECT name, id, rule, seed, settings, algorithm FROM federations").fetchall()
        self._federations = sorted(federations, key=lambda row: str(row[0]))

    def first(self) -> str:
        """Return the head before round 0: which rules and seeds run side by side, and the salt if there is one."""
        parts = [field("chain", VERSION)]
        salt = self._db.execute("SELECT value FROM info WHERE key = ?", (SALT,)).fetchone()
        parts += [] if salt is None else [field(SALT, salt[0])]
        for name, _, rule, seed, settings, algorithm in self._federations:
            parts += [field("federation", name), field("rule", rule), field("seed", seed)]
            parts += [field("settings", settings), field("algorithm", algorithm)]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def record(self, round: int, mark: Mark | None) -> bytes:
        """Return the record of a round, given how far the privacy ledger had come."""
        parts: list[bytes] = []
        for name, key, _, _, settings, _ in self._federations:
            inner = b"".join(self._federation(key, round, settings))
            parts += [field("federation", name), inner] if inner else []
        if mark is not None:
            parts += [field("ledger_bytes", mark.bytes), field("ledger", mark.sha256)]
        return b"".join(parts)

    def head(self, round: int, before: str, mark: Mark | None) -> str:
        """Return the head after a round, given the one before."""
        leaves = [statement.leaf() for statement, *_ in self.statements(round)]
        return link(before, round, root(leaves), hashlib.sha256(self.record(round, mark)).hexdigest())

    def statements(self, round: int) -> list[tuple[Statement, str, bytes]]:
        """Return what nodes signed in a round, with the key's fingerprint and the signature, in the tree's order."""
        found: list[tuple[Statement, str, bytes]] = []
        run = self.run
        for federation, key, *_ in self._federations:
            rows = self._db.execute(
                "SELECT c.name, s.client, s.key, s.signature FROM signatures s JOIN clients c ON c.id = s.client "
                "WHERE s.federation = ? AND s.round = ? ORDER BY c.name",
                (key, round),
            ).fetchall()
            if not rows:
                continue
            task, digests = self._digests(key, round)
            for name, client, signer, signature in rows:
                statement = Statement(run, federation, round, name, task, digests.get(client, b""))
                found.append((statement, signer, signature))
        return found

    @property
    def run(self) -> str:
        """What nodes know the run by; empty where there are none."""
        row = self._db.execute("SELECT value FROM info WHERE key = ?", (RUN,)).fetchone()
        return "" if row is None else str(row[0])

    def marks(self, round: int) -> list[tuple[str, int, object]]:
        """Return the marks of a round as they were written: (federation, its number, marks)."""
        rows = self._db.execute("SELECT federation, marks FROM digests WHERE round = ?", (round,)).fetchall()
        written = dict(rows)
        return [(name, key, written.get(key)) for name, key, *_ in self._federations]

    def _digests(self, key: int, round: int) -> tuple[str, dict[int, bytes]]:
        """Return the task's digest of a federation's round, and each client's."""
        row = self._db.execute(
            "SELECT d.task, d.updates, u.clients FROM digests d JOIN updates u USING (federation, round) "
            "WHERE federation = ? AND round = ?",
            (key, round),
        ).fetchone()
        task, updates, clients = row or ("", b"", b"")
        if not isinstance(updates, bytes) or not isinstance(clients, bytes) or len(clients) % 4:
            return str(task), {}
        keys = struct.unpack(f"<{len(clients) // 4}i", clients)
        each = (updates[at : at + DIGEST_BYTES] for at in range(0, len(updates), DIGEST_BYTES))
        return str(task), dict(zip(keys, each, strict=False))

    def _federation(self, key: int, round: int, settings: object) -> Iterator[bytes]:
        here = (key, round)
        for table, columns in _PARTS:
            query = f"SELECT {', '.join(columns)} FROM {table} WHERE federation = ? AND round = ?"
            row = self._db.execute(query, here).fetchone()
            if row is None:
                continue
            yield field("table", table)
            if table == "updates":
                yield from (field("criterion", name) for name in _criteria(settings))
            yield from self._columns(columns, row)
        for table, column in _SINGLE:
            rows = self._db.execute(
                f"SELECT c.name, l.{column} FROM {table} l LEFT JOIN clients c ON c.id = l.client "
                "WHERE l.federation = ? AND l.round = ? ORDER BY c.name",
                here,
            ).fetchall()
            yield field("table", table) if rows else b""
            for name, value in rows:
                yield field("client", name) + field(column, value)
        values = self._db.execute(
            f"SELECT {', '.join(_VALUES)} FROM contributions WHERE federation = ? AND round = ? AND source = 'run' "
            "ORDER BY measure, method",
            here,
        ).fetchall()
        for row in values:
            yield field("table", "contributions")
            yield from self._columns(_VALUES, row)

    def _columns(self, columns: Sequence[str], row: Sequence[object]) -> Iterator[bytes]:
        for column, value in zip(columns, row, strict=True):
            yield self._clients(value) if column == "clients" else field(column, value)

    def _clients(self, numbers: object) -> bytes:
        """Return the names of a round's clients, a field each."""
        if not isinstance(numbers, bytes) or len(numbers) % 4:
            return field("clients", numbers)
        keys = struct.unpack(f"<{len(numbers) // 4}i", numbers)
        if not self._names.keys() >= set(keys):
            # Written out once for all rounds: names never change in a run.
            known = self._db.execute("SELECT id, name FROM clients").fetchall()
            self._names |= {key: field("client", name) for key, name in known if key not in self._names}
        return b"".join(self._names.get(key) or field("client", key) for key in keys)

    def extend(self, after: int, last: int, signer: SigningKey | None = None) -> str:
        """Write the heads of the rounds after one, up to and with the last, into their rows; returns the last head.

        Call it inside the transaction that writes the checkpoint of the last round. `signer` signs each head.
        """
        row = self._db.execute("SELECT head FROM chain WHERE round = ?", (after,)).fetchone()
        head = self.first() if row is None or row[0] is None else str(row[0])
        rows = self._db.execute(
            "SELECT round, ledger_bytes, ledger FROM chain WHERE round > ? AND round <= ? ORDER BY round", (after, last)
        ).fetchall()
        for round, size, sha256 in rows:
            head = self.head(round, head, marked(size, sha256))
            self._db.execute("UPDATE chain SET head = ? WHERE round = ?", (head, round))
            if signer is not None:
                key = fingerprint(signer.line)
                signature = signer.sign(head_statement(self.run, round, head))
                self._db.execute("INSERT OR IGNORE INTO keys VALUES (?, ?)", (key, signer.line))
                self._db.execute("UPDATE chain SET key = ?, signature = ? WHERE round = ?", (key, signature, round))
            for _, key, *_ in self._federations:
                self._db.execute(
                    "UPDATE digests SET marks = ? WHERE federation = ? AND round = ?",
                    (self._marks.of(key, round), key, round),
                )
        return head


def _criteria(settings: object) -> list[str]:
    """Return the names of a rule's criteria, so that columns of numbers cannot change their meaning."""
    try:
        return [str(name) for name in json.loads(str(settings))["criteria"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []


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


def check(db: sqlite3.Connection, folder: Path) -> Checked:
    """Compute a run's chain again from its rows and its ledger, and say where it first differs."""
    with _one_moment(db):
        rows = db.execute("SELECT round, ledger_bytes, ledger, head FROM chain ORDER BY round").fetchall()
        sealed = [row for row in rows if row[3] is not None]
        problem = _first_problem(db, sealed)
        seen = db.execute("SELECT value FROM info WHERE key = ?", (SEEN,)).fetchone()
        salted = db.execute("SELECT 1 FROM info WHERE key = ?", (SALT,)).fetchone() is not None
    marks = [(marked(size, sha256), f"round {round} was written") for round, size, sha256, _ in rows]
    marks.append((_read_mark(seen), "the run was last resumed"))
    known = sorted(((mark, when) for mark, when in marks if mark is not None), key=lambda each: each[0].bytes)
    # The ledger is read after the rows: it may have grown meanwhile, and is never behind them.
    found = first_difference(folder / LEDGER, [mark for mark, _ in known])
    if found is not None:
        problem = f"{LEDGER}: the ledger of this run {found[1]} when {known[found[0]][1]}"
    last = sealed[-1] if sealed else (-1, None, None, "")
    return Checked(str(last[3]), int(last[0]), problem, salted or bool(known) or files.is_file(folder / LEDGER))


def _first_problem(db: sqlite3.Connection, sealed: Sequence[tuple[int, object, object, object]]) -> str:
    records = Records(db)
    head = records.first()
    heads: dict[int, str] = {}
    for expected, (round, size, sha256, written) in enumerate(sealed):
        if round != expected:
            return f"round {expected} is missing from its chain"
        head = records.head(round, head, marked(size, sha256))
        if head != written:
            return f"round {round} is not as it was written"
        heads[round] = head
    checkpoints = db.execute("SELECT round, head FROM checkpoints ORDER BY round").fetchall()
    for round, written in checkpoints:
        if heads.get(round) != written:
            return f"the checkpoint after round {round} names another head than the chain"
    followed = checkpoints[-1][0] if checkpoints else -1
    last = sealed[-1][0] if sealed else followed
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


def marked(size: object, sha256: object) -> Mark | None:
    """Return how far the privacy ledger had come, as a row of the chain says; None without a ledger."""
    if size is None and sha256 is None:
        return None
    return Mark(size if type(size) is int else 0, sha256 if type(sha256) is str else "")


def _read_mark(row: tuple[str] | None) -> Mark | None:
    try:
        size, sha256 = json.loads("[null, null]" if row is None else row[0])
    except (ValueError, TypeError, RecursionError):
        return Mark(0, "")  # not what we wrote: it differs from every ledger
    return marked(size, sha256)


@contextmanager
def _one_moment(db: sqlite3.Connection) -> Generator[None]:
    """Let all questions be answered from the same moment, while a run is being written."""
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.rollback()
