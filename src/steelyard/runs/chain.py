"""The chain of a run: every round's record holds the head before it, and its SHA-256 is the next head.

docs/reference/chain.md defines it; this file is that definition as code. A record is written from the rows of the
database, by the writer of a run and by everyone who checks it alike, so that what is hashed is what is kept. It holds
nothing that differs between a run and the same run killed and resumed: no times, no numbers that stand for names.

Marks stand beside it: eight bytes for each client of a round, so that a change is found in its client's row and not
only in its round. A mark is no proof, and need not be one: it is a sum of the row's words, each times an odd number of
its own, modulo 2⁶⁴, so that no change of one word leaves it as it was, and a whole cohort takes one product.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.base.journal import Journal, Mark
from steelyard.privacy.ledger import FILE as LEDGER
from steelyard.proof.signing import (
    DIGEST_BYTES,
    VERSION,
    SigningKey,
    field,
    fields,
    head_statement,
    link,
)
from steelyard.proof.statements import SealedRound, Statement, Tree, slot
from steelyard.runs.facts import (
    RUN,
    RunFacts,
    closing_problem,
    fact,
    file_problem,
    last_head,
    signed_by,
    written_closing,
)

SALT = "salt"
"""A run that promises something to its clients notes a secret under this name; the chain begins with it."""
SEEN = "ledger_seen"
"""Under this name a resume notes how far the ledger had come."""

_PARTS: Mapping[str, tuple[str, ...]] = {
    "rounds": (
        *("accuracy", "priority", "tried", "tests", "cohort", "answered", "kept_old", "zero_criteria", "zero_scores"),
        *("loss", "server_accuracy", "server_macro_f1", "server_metrics", "simulated", "epsilon"),
    ),
    "updates": ("clients", "samples", "bytes", "loss", "score", "weight", "raw", "normalised", "listening"),
    "digests": ("task", "model", "updates", "salts"),
    "evaluations": ("clients", "samples", "score", "loss", "metrics", "figures"),
    "samples": ("hits", "count"),
    "ended": ("reason",),
}
"""Tables with one row for a federation's round; of `rounds` all but its seconds and bytes."""
_VALUES = ("measure", "method", "clients", "added", "error", "sizes", "before", "after")
"""What each client added, as measured while the run went; what was found out afterwards is not in the record."""
_REASONS = {"failures": "why it was left out", "untested": "why it was not tested"}
"""Tables with a row for each client and a reason. What nodes signed is in the tree of statements, not here."""
_MARKED = {
    "its update": ("updates", ("samples", "bytes", "loss", "score", "weight", "raw", "normalised", "listening")),
    "its test": ("evaluations", ("samples", "score", "loss", "figures")),
}
_BY_METRIC = "figures"
"""This column stands as [metrics, clients], all others as [clients, ...]."""
_HERE = "WHERE federation = ? AND round = ?"
_ODD = np.random.Generator(np.random.PCG64(7)).integers(0, 2**63, 1 << 14, dtype=np.uint64) * np.uint64(2) + 1
"""The odd numbers; a row of more words begins again with the first."""

Words = NDArray[np.uint64]


class Row(NamedTuple):
    """A round of the chain as the database holds it."""

    round: int
    ledger_bytes: object
    ledger: object
    kept: object
    """SHA-256 of the file of its kept updates."""
    head: object

    @property
    def mark(self) -> Mark | None:
        """How far the privacy ledger had come; None without a ledger."""
        return marked(self.ledger_bytes, self.ledger)


class NodeStatement(NamedTuple):
    """A statement as a run holds it."""

    statement: Statement
    key: str
    """Fingerprint of the node's key."""
    signature: bytes
    digest: str
    """Of the statement."""


class Link(NamedTuple):
    """A round of the chain, held against the head that was written before it."""

    round: int
    expected: int
    """The round that follows the one before; another one where rounds are missing."""
    whole: bool
    statements: list[NodeStatement]


class _Client(NamedTuple):
    name: str
    field: bytes
    word: int


class Records:
    """Writes records and marks from the rows of a run's database; names are looked up once."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._clients: dict[int, _Client] = {}
        self._last: tuple[bytes, bytes] = (b"", b"")

    @cached_property
    def _federations(self) -> list[tuple[str, int, object, object, object, object]]:
        found = self._db.execute("SELECT name, id, rule, seed, settings, algorithm FROM federations").fetchall()
        return sorted(found, key=lambda row: str(row[0]))

    def first(self) -> str:
        """Return the head before round 0: which rules and seeds run side by side, and the salt if there is one."""
        parts = [field("chain", VERSION), field(SALT, fact(self._db, SALT))]
        for name, _, rule, seed, settings, algorithm in self._federations:
            parts.append(fields(federation=name, rule=rule, seed=seed, settings=settings, algorithm=algorithm))
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def record(self, row: Row) -> bytes:
        """Return the record of a round."""
        parts: list[bytes] = []
        for name, key, _, _, settings, _ in self._federations:
            inner = b"".join(self._federation(key, row.round, settings))
            parts += [field("federation", name), inner] if inner else []
        return b"".join(parts) + fields(ledger_bytes=row.ledger_bytes, ledger=row.ledger, kept=row.kept)

    def links(self, rows: Sequence[Row]) -> Iterator[Link]:
        """Hold each round against the head that was written before it."""
        before, expected = self.first(), 0
        for row in rows:
            statements = self.statements(row.round)
            whole = row.round == expected and self._head(row, before, statements) == row.head
            yield Link(row.round, expected, whole, statements)
            before, expected = str(row.head), row.round + 1

    def _head(self, row: Row, before: str, statements: Sequence[NodeStatement]) -> str:
        record = hashlib.sha256(self.record(row)).hexdigest()
        root = self._tree(row.round, statements).root if statements else None
        return link(before, row.round, root, record)

    def _tree(self, round: int, statements: Sequence[NodeStatement]) -> Tree:
        run = self.run
        return Tree({slot(run, one.statement.federation, round, one.key): one.digest for one in statements})

    def sealed(self, round: int) -> SealedRound | None:
        """Return a round of the chain with all that proofs about it need; None where it has no head yet."""
        rows = {row.round: row for row in chain_rows(self._db, "WHERE round IN (?, ?)", round - 1, round)}
        if round not in rows or rows[round].head is None:
            return None
        query = "SELECT k.line, c.signature FROM chain c JOIN keys k USING (key) WHERE c.round = ?"
        line, signature = self._db.execute(query, (round,)).fetchone() or ("", None)
        before = str(rows[round - 1].head) if round - 1 in rows else self.first()
        record = hashlib.sha256(self.record(rows[round])).hexdigest()
        tree = self._tree(round, self.statements(round))
        return SealedRound(
            self.run, round, before, record, str(rows[round].head), str(line), bytes(signature or b""), tree
        )

    def statements(self, round: int) -> list[NodeStatement]:
        """Return what nodes signed in a round, by rule and key."""
        found: list[NodeStatement] = []
        run = self.run
        query = f"SELECT key, clients, others, before, signature FROM signatures {_HERE} ORDER BY key"
        for federation, number, *_ in self._federations:
            rows = self._db.execute(query, (number, round)).fetchall()
            if not rows:
                continue
            task, updates = self._row("digests", ("task", "updates"), number, round) or ("", None)
            (clients,) = self._row("updates", ("clients",), number, round) or (None,)
            digests = dict(zip(_numbers(clients), _cut(updates), strict=False))
            for key, clients, others, before, signature in rows:
                numbers, rest = _numbers(clients), iter(_cut(others))
                clients_of = zip(numbers, self._named(numbers), strict=True)
                named = {client.name: digests.get(one) or next(rest, b"") for one, client in clients_of}
                said = Statement(run, federation, round, str(task), str(before or ""), named)
                found.append(NodeStatement(said, str(key), signature, said.digest()))
        return found

    def weighed(self, round: int) -> list[tuple[str, str]]:
        """Return (rule, client) for every client whose update was weighed in a round, as far as that was kept."""
        found: list[tuple[str, str]] = []
        for name, key, *_ in self._federations:
            (clients,) = self._row("updates", ("clients",), key, round) or (None,)
            found += [(name, client.name) for client in self._named(_numbers(clients))]
        return found

    def left_out(self, federation: str, after: int, before: int) -> set[str]:
        """Return the clients that the run says it left out of a federation's rounds between two."""
        query = (
            "SELECT c.name FROM failures l JOIN clients c ON c.id = l.client JOIN federations f ON f.id = l.federation "
            "WHERE f.name = ? AND l.round > ? AND l.round < ?"
        )
        return {name for (name,) in self._db.execute(query, (federation, after, before))}

    def unkept(self, round: int) -> bool:
        """Whether clients answered in a round of which it was not kept who they were."""
        rows = "SELECT 1 FROM rounds r LEFT JOIN updates u USING (federation, round) WHERE r.round = ?"
        found = self._db.execute(f"{rows} AND r.answered > 0 AND u.round IS NULL LIMIT 1", (round,))
        return found.fetchone() is not None

    @property
    def run(self) -> str:
        """What nodes know the run by; empty where there are none."""
        return str(fact(self._db, RUN) or "")

    def _row(self, table: str, columns: Sequence[str], federation: int, round: int) -> tuple[object, ...] | None:
        query = f"SELECT {', '.join(columns)} FROM {table} {_HERE}"
        return self._db.execute(query, (federation, round)).fetchone()

    def _reasons(self, table: str, federation: int, round: int) -> list[tuple[object, object]]:
        query = f"SELECT c.name, l.reason FROM {table} l LEFT JOIN clients c ON c.id = l.client {_HERE} ORDER BY c.name"
        return self._db.execute(query, (federation, round)).fetchall()

    def _federation(self, key: int, round: int, settings: object) -> Iterator[bytes]:
        for table, columns in _PARTS.items():
            row = self._row(table, columns, key, round)
            if row is not None:
                yield field("table", table)
                if table == "updates":
                    yield from (field("criterion", name) for name in _criteria(settings))
                yield from self._columns(columns, row)
        for table in _REASONS:
            rows = self._reasons(table, key, round)
            yield field("table", table) if rows else b""
            yield from (fields(client=name, reason=reason) for name, reason in rows)
        query = f"SELECT {', '.join(_VALUES)} FROM contributions {_HERE} AND source = 'run' ORDER BY measure, method"
        for row in self._db.execute(query, (key, round)).fetchall():
            yield field("table", "contributions")
            yield from self._columns(_VALUES, row)

    def _columns(self, columns: Sequence[str], row: Sequence[object]) -> Iterator[bytes]:
        for column, value in zip(columns, row, strict=True):
            yield self._names(value) if column == "clients" else field(column, value)

    def _names(self, numbers: object) -> bytes:
        """Return the names of a round's clients, a field each."""
        if not isinstance(numbers, bytes) or len(numbers) % 4:
            return field("clients", numbers)
        if numbers != self._last[0]:  # as where everybody answers in every round
            self._last = (numbers, b"".join(client.field for client in self._named(_numbers(numbers))))
        return self._last[1]

    def _named(self, numbers: Sequence[int]) -> list[_Client]:
        """Return clients by their numbers; one that has no name stands as its number."""
        if not self._clients.keys() >= set(numbers):
            # Names never change in a run, and new ones get higher numbers.
            new = self._db.execute("SELECT id, name FROM clients WHERE id > ?", (len(self._clients),))
            self._clients |= {n: _Client(str(name), field("client", name), _word(name)) for n, name in new.fetchall()}
        found = self._clients
        return [found.get(n) or _Client(f"number {n}", field("client", n), n & 0xFFFF) for n in numbers]

    def changes(self, round: int) -> Iterator[tuple[str, str | None, str]]:
        """Yield (federation, client, what) for what is not as it was marked; without a client, what is of none."""
        then = dict(self._db.execute("SELECT federation, marks FROM digests WHERE round = ?", (round,)).fetchall())
        for federation, key, *_ in self._federations:
            now, written = list(self._marks(key, round)), then.get(key)
            if isinstance(written, bytes) and len(written) == 8 * len(now):
                words = np.frombuffer(written, "<u8").tolist()
                changed = (
                    (client, what) for (client, what, mark), word in zip(now, words, strict=True) if mark != word
                )
                yield from ((federation, client, what) for client, what in changed)
            elif now or written:
                yield federation, None, "who took part"

    def _marks(self, federation: int, round: int) -> Iterator[tuple[str | None, str, int]]:
        """Yield (client, what, mark) for who sent, was tested, was left out or was not tested, and each signature."""
        for what, (table, columns) in _MARKED.items():
            yield from ((name, what, mark) for name, mark in self._column_marks(table, columns, federation, round))
        for table, what in _REASONS.items():
            reasons = self._reasons(table, federation, round)
            yield from ((str(name), what, _word(name, reason)) for name, reason in reasons)
        query = f"SELECT key, hex(clients), hex(others), before, hex(signature) FROM signatures {_HERE} ORDER BY key"
        for row in self._db.execute(query, (federation, round)).fetchall():
            yield None, f"what the node {row[0]} signed", _word(*row)

    def _column_marks(self, table: str, columns: Sequence[str], federation: int, round: int) -> list[tuple[str, int]]:
        """Return the clients of a table's row with the mark of each."""
        clients, *values = self._row(table, ("clients", *columns), federation, round) or (None,)
        found = self._named(_numbers(clients))
        if not found:
            return []
        words = [np.array([[client.word] for client in found], dtype=np.uint64)]
        words += [_words(one, len(found), column == _BY_METRIC) for column, one in zip(columns, values, strict=True)]
        if table == "updates":
            digests = self._row("digests", ("updates", "salts"), federation, round) or (None, None)
            words += [_words(each, len(found)) for each in digests]
        rows = np.concatenate(words, axis=1)
        return list(
            zip((client.name for client in found), (rows @ np.resize(_ODD, rows.shape[1])).tolist(), strict=True)
        )

    def extend(self, after: int, last: int, signer: SigningKey | None = None) -> str:
        """Write the heads of the rounds after one, up to and with the last, into their rows; returns the last head.

        Call it inside the transaction that writes the checkpoint of the last round. `signer` signs each head.
        """
        row = self._db.execute("SELECT head FROM chain WHERE round = ?", (after,)).fetchone()
        head = self.first() if row is None or row[0] is None else str(row[0])
        for each in chain_rows(self._db, "WHERE round > ? AND round <= ?", after, last):
            round = each.round
            head = self._head(each, head, self.statements(round))
            signed = signed_by(self._db, signer, head_statement(self.run, round, head))
            # Without a key, a signature that was there stays: it tells that somebody computed the chain again.
            self._db.execute(
                "UPDATE chain SET head = ?, key = ifnull(?, key), signature = ifnull(?, signature) WHERE round = ?",
                (head, *signed, round),
            )
            for _, key, *_ in self._federations:
                marks = np.array([mark for *_, mark in self._marks(key, round)], dtype="<u8").tobytes()
                self._db.execute(f"UPDATE digests SET marks = ? {_HERE}", (marks, key, round))
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


def _words(value: object, count: int, across: bool = False) -> Words:
    """Return a column as words [clients, words of each]; one of another length than its clients' counts for all."""
    if not isinstance(value, bytes) or len(value) % (8 * count):
        return np.full((count, 1), 0 if value is None else _word(value), dtype=np.uint64)
    words = np.frombuffer(value, "<u8")
    return words.reshape(-1, count).T if across else words.reshape(count, -1)


def _word(*values: object) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(map(str, values)).encode()).digest()[:8], "little")


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
    closing: str = ""
    """The hash of the record that closes the run, after the last head; empty where there is none."""


def check(db: sqlite3.Connection, folder: Path, *, checkpoints: bool = True) -> Checked:
    """Compute a run's chain again from its rows, its ledger and what closes it, and say where it first differs.

    Without `checkpoints` their files are not read, for those who read them anyway.
    """
    with one_moment(db):
        rows = chain_rows(db)
        problem = _first_problem(db, [row for row in rows if row.head is not None]) or closing_problem(db)
        if checkpoints and not problem:
            problem = file_problem(db, folder)
        return checked(db, folder, rows, problem)


def chain_rows(db: sqlite3.Connection, where: str = "", *values: int) -> list[Row]:
    """Return the rows of a run's chain, also of rounds that have no head yet."""
    query = f"SELECT round, ledger_bytes, ledger, kept, head FROM chain {where} ORDER BY round"
    return list(map(Row._make, db.execute(query, values)))


def checked(db: sqlite3.Connection, folder: Path, rows: Sequence[Row], problem: str) -> Checked:
    """Return what a look at the rounds has shown, once the ledger was looked at too."""
    marks = [(row.mark, f"round {row.round} was written") for row in rows]
    marks.append((_read_mark(fact(db, SEEN)), "the run was last resumed"))
    known = sorted(((mark, when) for mark, when in marks if mark is not None), key=lambda each: each[0].bytes)
    # The ledger is read after the rows: it may have grown meanwhile, and is never behind them.
    found = Journal(folder / LEDGER).first_difference([mark for mark, _ in known])
    if found is not None:
        problem = f"{LEDGER}: the ledger of this run {found[1]} when {known[found[0]][1]}"
    last, head = last_head(db)
    ledger = bool(known) or fact(db, SALT) is not None or files.is_file(folder / LEDGER)
    return Checked(head, last, problem, ledger, written_closing(db)[1])


def _first_problem(db: sqlite3.Connection, sealed: Sequence[Row]) -> str:
    for one in Records(db).links(sealed):
        if one.round != one.expected:
            return f"round {one.expected} is missing from its chain"
        if not one.whole:
            return f"round {one.round} is not as it was written"
    return checkpoint_problem(db, sealed)


def checkpoint_problem(db: sqlite3.Connection, sealed: Sequence[Row]) -> str:
    """Say which checkpoint does not follow the chain, given its rows that have heads; empty where all do."""
    heads = {row.round: row.head for row in sealed}
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


def ledger_seen(db: sqlite3.Connection) -> RunFacts:
    """Return the note by which a resume remembers how far the ledger had come in rounds that will be run again."""
    row = db.execute("SELECT ledger_bytes, ledger FROM chain WHERE ledger IS NOT NULL ORDER BY round DESC").fetchone()
    mark = None if row is None else marked(*row)
    return RunFacts(others={} if mark is None else {SEEN: json.dumps([mark.bytes, mark.sha256])})


def _read_mark(noted: str | None) -> Mark | None:
    if noted is None:
        return None
    try:
        size, sha256 = json.loads(noted)
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
