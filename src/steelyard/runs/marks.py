"""Marks: eight bytes for each client of a round, so that a change is found in its client's row and not only its round.

A mark is no proof, and need not be one: the head of the chain is. It is a sum of the row's words, each times an odd
number of its own, modulo 2⁶⁴, so that no change of one word leaves it as it was, and a whole cohort takes one product.
"""

from __future__ import annotations

import hashlib
import sqlite3

import numpy as np
from numpy.typing import NDArray

from steelyard.proof.signing import DIGEST_BYTES, SALT_BYTES

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
