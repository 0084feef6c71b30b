"""Checking a run's folder by itself: every round against the chain, every signature against its key.

Where `chain.check` stops at the first round that differs, this goes on: each round is held against the head that was
written before it, so that every change is named in its own round, and by the marks in its own client.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from steelyard.errors import UserError
from steelyard.runs.chain import Records, check, marked
from steelyard.runs.marks import Marks
from steelyard.signing import fingerprint, head_statement, holds, read_public_key

SERVER = "server"
"""The file of this name, with .pub, in a folder of keys is the server's."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it was written, or cannot be checked."""

    what: str
    round: int | None = None
    client: str | None = None

    def line(self) -> str:
        """Return it in words: where, then what."""
        where = [] if self.round is None else [f"round {self.round}"]
        where += [] if self.client is None else [f"client {self.client}"]
        return f"{', '.join(where)}: {self.what}" if where else self.what


@dataclass
class Findings:
    """What a look at a run has shown so far; the looks add to it."""

    changed: list[Finding] = field(default_factory=list[Finding])
    unchecked: list[Finding] = field(default_factory=list[Finding])
    """What cannot be checked here: a key is missing, there is no chain yet."""
    checked: dict[str, str] = field(default_factory=dict[str, str])
    """What was looked at, in words."""


@dataclass(frozen=True)
class Keys:
    """Public keys that a checker trusts: by name of their file, each one line of OpenSSH."""

    named: Mapping[str, str] = field(default_factory=dict[str, str])
    folder: Path | None = None
    """None: the keys are those that the run's own folder holds."""

    @classmethod
    def read(cls, folder: Path) -> Keys:
        """Read every .pub file of a folder."""
        if not folder.is_dir():
            raise UserError(f"--keys: {folder} is no folder; allowed: a folder of .pub files")
        found = {file.stem: read_public_key(file) for file in sorted(folder.glob("*.pub"))}
        if not found:
            raise UserError(f"--keys: no .pub file in {folder}; allowed: a folder with the public keys of nodes")
        return cls(found, folder)

    def refusal(self, signer: str, client: str | None) -> str | None:
        """Say why a key may not sign for a client (None: for the server), or None where it may."""
        assert self.folder is not None
        name = SERVER if client is None else client
        if name in self.named:
            return None if fingerprint(self.named[name]) == signer else f"signed by {signer}, not by {name}.pub"
        nodes = {fingerprint(line) for key, line in self.named.items() if key != SERVER}
        if client is not None and signer in nodes:
            return None
        return f"signed by {signer}, which is no key of {self.folder}"


def look_at_chain(db: sqlite3.Connection, folder: Path, found: Findings) -> tuple[str, int]:
    """Hold every round, checkpoint and line of the ledger against the chain; returns the last head and its round."""
    shallow = check(db, folder)
    rows = db.execute("SELECT round, ledger_bytes, ledger, head FROM chain ORDER BY round").fetchall()
    sealed = [row for row in rows if row[3] is not None]
    if not sealed:
        found.unchecked.append(Finding("it has no head yet: no checkpoint was written"))
        return "", -1
    records, marks = Records(db), Marks(db)
    before, expected, named = records.first(), 0, len(found.changed)
    for round, size, sha256, written in sealed:
        if round != expected:
            found.changed.append(Finding("missing from the chain", round=expected))
        others = list(_others(records, marks, round))
        if records.head(round, before, marked(size, sha256)) != written:
            general = "its rules, its seeds or its salt" if round == 0 else "its figures, its models or its head"
            others = others or [Finding(f"{general} are not as they were written", round)]
        found.changed += others
        before, expected = str(written), round + 1
    if shallow.problem and len(found.changed) == named:
        found.changed.append(Finding(shallow.problem))
    found.checked["chain"] = f"{len(sealed)} rounds, as written" if not found.changed else f"{len(sealed)} rounds"
    return shallow.head, shallow.round


def _others(records: Records, marks: Marks, round: int) -> Iterator[Finding]:
    """Yield every client whose row is not as it was marked."""
    for name, key, written in records.marks(round):
        for client, what in marks.others(key, round, written):
            yield Finding(f"{what} under {name} is not as it was written", round, client)


def look_at_signatures(db: sqlite3.Connection, found: Findings, keys: Keys | None = None) -> None:
    """Check every signature of nodes and server: by the keys in the folder, or by those that the checker trusts."""
    records = Records(db)
    lines = dict(db.execute("SELECT key, line FROM keys").fetchall())
    for key, line in lines.items():
        if not _is_key(key, line):
            found.changed.append(Finding(f"the public key {key} is not the one of its fingerprint"))
    counted = {"node": 0, "server": 0}
    rounds = db.execute("SELECT DISTINCT round FROM signatures ORDER BY round").fetchall()
    for (round,) in rounds:
        for statement, signer, signature in records.statements(round):
            counted["node"] += 1
            _look(found, keys, lines, (signer, signature, statement.content()), round, statement.client)
    heads = "SELECT round, head, key, signature FROM chain WHERE key IS NOT NULL OR signature IS NOT NULL"
    for round, head, signer, signature in db.execute(f"{heads} ORDER BY round").fetchall():
        counted["server"] += 1
        _look(found, keys, lines, (signer, signature, head_statement(records.run, round, head)), round, None)
    signed = f"{counted['node']} of nodes, {counted['server']} of the server"
    by = f"the keys in {keys.folder}" if keys is not None else "the keys that lie in the run's own folder"
    if sum(counted.values()):
        found.checked["signatures"] = f"{signed}, by {by}"
    elif keys is not None:
        found.unchecked.append(Finding("it holds no signatures for --keys to check"))


def _look(
    found: Findings,
    keys: Keys | None,
    lines: Mapping[str, str],
    signed: tuple[str, bytes, bytes],
    round: int,
    client: str | None,
) -> None:
    """Check one signature (key, signature, what was signed)."""
    signer, signature, content = signed
    whose = "the server's signature of the head" if client is None else "its node's signature"
    if keys is not None and (refusal := keys.refusal(signer, client)) is not None:
        found.unchecked.append(Finding(f"{whose}: {refusal}", round, client))
    elif not isinstance(signature, bytes) or not holds(str(lines.get(signer, "")), signature, content):
        found.changed.append(Finding(f"{whose} does not hold", round, client))


def _is_key(key: str, line: str) -> bool:
    try:
        return fingerprint(line) == key
    except (ValueError, IndexError):
        return False
