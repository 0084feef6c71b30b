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
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.privacy.ledger_marks import FILE as LEDGER
from steelyard.privacy.ledger_marks import Mark, first_difference
from steelyard.proof.signing import (
    DIGEST_BYTES,
    SALT_BYTES,
    VERSION,
    SigningKey,
    field,
    fingerprint,
    head_statement,
    link,
)
from steelyard.proof.statements import SealedRound, Statement, Tree, slot

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
"""All of a round but its seconds and bytes."""
_PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("rounds", _ROUND),
    ("updates", ("clients", "samples", "bytes", "loss", "score", "weight", "raw", "normalised", "listening")),
    ("digests", ("task", "model", "updates", "salts")),
    ("evaluations", ("clients", "samples", "score", "loss", "metrics", "figures")),
    ("samples", ("hits", "count")),
    ("ended", ("reason",)),
)
_SINGLE = ("failures", "untested")
"""Tables with a row for each client and a reason. What nodes signed is in the tree of statements, not here."""
_VALUES = ("measure", "method", "clients", "added", "error", "sizes", "before", "after")
"""What each client added, as measured while the run went; what was found out afterwards is not in the record."""


class NodeStatement(NamedTuple):
    """A statement as a run holds it."""

    statement: Statement
    key: str
    """Fingerprint of the node's key."""
    signature: bytes
    digest: str
    """Of the statement."""


class Records:
    """Writes records from the rows of a run's database; names are looked up once."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._names: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._last: tuple[bytes, bytes] = (b"", b"")
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

    def head(
        self, round: int, before: str, mark: Mark | None, statements: Sequence[NodeStatement] | None = None
    ) -> str:
        """Return the head after a round, given the one before, and its statements where they are at hand."""
        tree = self.tree(round, self.statements(round) if statements is None else statements)
        return link(before, round, tree.root, hashlib.sha256(self.record(round, mark)).hexdigest())

    def tree(self, round: int, statements: Sequence[NodeStatement]) -> Tree:
        """Return the tree over the statements of a round."""
        run = self.run
        return Tree({slot(run, one.statement.federation, round, one.key): one.digest for one in statements})

    def sealed(self, round: int) -> SealedRound | None:
        """Return a round of the chain with all that proofs about it need; None where it has no head yet."""
        rows = {
            row[0]: row[1:]
            for row in self._db.execute(
                "SELECT round, ledger_bytes, ledger, head, key, signature FROM chain WHERE round IN (?, ?)",
                (round - 1, round),
            ).fetchall()
        }
        if round not in rows or rows[round][2] is None:
            return None
        size, sha256, head, key, signature = rows[round]
        line = self._db.execute("SELECT line FROM keys WHERE key = ?", (key,)).fetchone()
        record = hashlib.sha256(self.record(round, marked(size, sha256))).hexdigest()
        before = str(rows[round - 1][2]) if round - 1 in rows else self.first()
        line, signature = (str(line[0]), bytes(signature or b"")) if line else ("", b"")
        tree = self.tree(round, self.statements(round))
        return SealedRound(self.run, round, before, record, str(head), line, signature, tree)

    def statements(self, round: int) -> list[NodeStatement]:
        """Return what nodes signed in a round, by rule and key."""
        found: list[NodeStatement] = []
        run = self.run
        for federation, number, *_ in self._federations:
            rows = self._db.execute(
                "SELECT key, clients, others, before, signature FROM signatures WHERE federation = ? AND round = ? "
                "ORDER BY key",
                (number, round),
            ).fetchall()
            if not rows:
                continue
            task, digests = self._digests(number, round)
            for key, clients, others, before, signature in rows:
                numbers = _numbers(clients)
                rest = iter(_cut(others))
                named = {self._name(one): digests.get(one) or next(rest, b"") for one in numbers}
                said = Statement(run, federation, round, task, str(before or ""), named)
                found.append(NodeStatement(said, str(key), signature, said.digest()))
        return found

    def _name(self, number: int) -> str:
        if number not in self._texts:
            self._texts |= dict(self._db.execute("SELECT id, CAST(name AS TEXT) FROM clients").fetchall())
        return self._texts.get(number, f"number {number}")

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

    def _digests(self, federation: int, round: int) -> tuple[str, dict[int, bytes]]:
        """Return the task's digest of a federation's round, and each client's."""
        row = self._db.execute(
            "SELECT d.task, d.updates, u.clients FROM digests d LEFT JOIN updates u USING (federation, round) "
            "WHERE federation = ? AND round = ?",
            (federation, round),
        ).fetchone()
        task, updates, clients = row or ("", None, None)
        return str(task), dict(zip(_numbers(clients), _cut(updates), strict=False))

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
        for table in _SINGLE:
            rows = self._db.execute(
                f"SELECT c.name, l.reason FROM {table} l LEFT JOIN clients c ON c.id = l.client "
                "WHERE l.federation = ? AND l.round = ? ORDER BY c.name",
                here,
            ).fetchall()
            yield field("table", table) if rows else b""
            for name, reason in rows:
                yield field("client", name) + field("reason", reason)
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
        if numbers == self._last[0]:
            return self._last[1]  # as where everybody answers in every round
        keys = _numbers(numbers)
        if not self._names.keys() >= set(keys):
            # Written out once for all rounds: names never change in a run, and new ones get higher numbers.
            known = self._db.execute("SELECT id, name FROM clients WHERE id > ?", (len(self._names),))
            self._names |= {key: field("client", name) for key, name in known.fetchall()}
        written = b"".join(self._names.get(key) or field("client", key) for key in keys)
        self._last = (numbers, written)
        return written

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


def _numbers(packed: object) -> tuple[int, ...]:
    """Return the numbers of a column of clients; none where it is not one."""
    if not isinstance(packed, bytes) or len(packed) % 4:
        return ()
    return struct.unpack(f"<{len(packed) // 4}i", packed)


def _cut(digests: object) -> list[bytes]:
    """Return digests that stand one after the other."""
    if not isinstance(digests, bytes):
        return []
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def _criteria(settings: object) -> list[str]:
    """Return the names of a rule's criteria, so that columns of numbers cannot change their meaning."""
    try:
        return [str(name) for name in json.loads(str(settings))["criteria"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []


def marked(size: object, sha256: object) -> Mark | None:
    """Return how far the privacy ledger had come, as a row of the chain says; None without a ledger."""
    if size is None and sha256 is None:
        return None
    return Mark(size if type(size) is int else 0, sha256 if type(sha256) is str else "")


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


Words = NDArray[np.uint64]

_TABLES: dict[str, tuple[str, ...]] = {
    "updates": ("samples", "bytes", "loss", "score", "weight", "raw", "normalised", "listening"),
    "evaluations": ("samples", "score", "loss", "figures"),
}
_BY_METRIC = "figures"
"""This column stands as [metrics, clients], all others as [clients, ...]."""
_REASONS = ("failures", "untested")
_MOST_WORDS = 1 << 14
_ODD = np.random.Generator(np.random.PCG64(7)).integers(0, 2**63, _MOST_WORDS, dtype=np.uint64) * np.uint64(2) + 1
"""The odd numbers; a row of more words begins again with the first."""


class Marks:
    """Computes the marks of rounds from a run's rows; use `of` to write them and `names` to say whose they are."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._clients: dict[int, tuple[str, int]] = {}

    def of(self, federation: int, round: int) -> bytes:
        """Return the marks of a round: of clients that sent, that were tested, that were left out, that were not."""
        parts = [mark for table in _TABLES for mark in self._columns(table, federation, round)[1]]
        parts += [_word(name, reason) for table in _REASONS for name, reason in self._reasons(table, federation, round)]
        parts += [_word(*map(str, row)) for row in self._signatures(federation, round)]
        return np.array(parts, dtype="<u8").tobytes()

    def others(self, federation: int, round: int, written: object) -> list[tuple[str | None, str]]:
        """Return the clients whose rows are not as they were marked, and what of each; None: of no single client."""
        names: list[tuple[str | None, str]] = []
        for table, words in zip(_TABLES, ("its update", "its test"), strict=True):
            names += [(name, words) for name in self._columns(table, federation, round)[0]]
        for table, words in zip(_REASONS, ("why it was left out", "why it was not tested"), strict=True):
            names += [(name, words) for name, _ in self._reasons(table, federation, round)]
        names += [(None, f"what the node {key} signed") for key, *_ in self._signatures(federation, round)]
        if not isinstance(written, bytes) or len(written) != 8 * len(names):
            return [(None, "who took part")] if names or written else []
        now = np.frombuffer(self.of(federation, round), "<u8") != np.frombuffer(written, "<u8")
        return [names[at] for at in np.flatnonzero(now).tolist()]

    def _reasons(self, table: str, federation: int, round: int) -> list[tuple[str, str]]:
        return self._db.execute(
            f"SELECT CAST(c.name AS TEXT), CAST(l.reason AS TEXT) FROM {table} l JOIN clients c ON c.id = l.client "
            "WHERE federation = ? AND round = ? ORDER BY c.name",
            (federation, round),
        ).fetchall()

    def _signatures(self, federation: int, round: int) -> list[tuple[object, ...]]:
        return self._db.execute(
            "SELECT key, hex(clients), hex(others), before, hex(signature) FROM signatures "
            "WHERE federation = ? AND round = ? ORDER BY key",
            (federation, round),
        ).fetchall()

    def _columns(self, table: str, federation: int, round: int) -> tuple[list[str], list[int]]:
        """Return the clients of a table's row and the mark of each."""
        where = "WHERE federation = ? AND round = ?"
        row = self._db.execute(
            f"SELECT clients, {', '.join(_TABLES[table])} FROM {table} {where}", (federation, round)
        ).fetchone()
        if row is None or not isinstance(row[0], bytes) or len(row[0]) % 4:
            return [], []
        found = [self._client(key) for key in np.frombuffer(row[0], "<i4").tolist()]
        names, count = [name for name, _ in found], len(found)
        words: list[Words] = [np.array([[word] for _, word in found], dtype=np.uint64)]
        for column, value in zip(_TABLES[table], row[1:], strict=True):
            words.append(_of(value, count, across=column == _BY_METRIC))
        if table == "updates":
            query = f"SELECT updates, salts FROM digests {where}"
            digests, salts = self._db.execute(query, (federation, round)).fetchone() or (None, None)
            words += [_of(digests, count, DIGEST_BYTES), _of(salts, count, SALT_BYTES)]
        return names, _sums(np.concatenate(words, axis=1)).tolist() if count else []

    def _client(self, key: int) -> tuple[str, int]:
        if key not in self._clients:
            query = "SELECT id, CAST(name AS TEXT) FROM clients WHERE id > ?"  # new clients get higher numbers
            known = self._db.execute(query, (len(self._clients),)).fetchall()
            self._clients |= {number: (name, _word(name)) for number, name in known}
        return self._clients.get(key, (f"number {key}", key & 0xFFFF))


def _of(value: object, count: int, size: int | None = None, *, across: bool = False) -> Words:
    """Return a column as words [clients, words of each]; one of another length than its clients' counts for all."""
    if not isinstance(value, bytes) or not count:
        return np.full((count, 1), 0 if value is None else _word(str(value)), dtype=np.uint64)
    if len(value) % (8 * count) or (size is not None and len(value) != size * count):
        return np.full((count, 1), _word(value.hex()), dtype=np.uint64)
    words = np.frombuffer(value, "<u8")
    return words.reshape(-1, count).T if across else words.reshape(count, -1)


def _sums(words: Words) -> Words:
    """Return for each row the sum of its words times an odd number each, modulo 2⁶⁴."""
    if words.shape[1] <= _MOST_WORDS:
        return (words * _ODD[: words.shape[1]]).sum(axis=1, dtype=np.uint64)
    return (words * np.resize(_ODD, words.shape[1])).sum(axis=1, dtype=np.uint64)


def _word(*texts: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(texts).encode()).digest()[:8], "little")
