"""Checking a run's folder by itself: every round against the chain, every signature against its key.

Where `chain.check` stops at the first round that differs, this goes on: each round is held against the head that
was written before it, so that every change is named in its own round, and by the marks in its own client.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from steelyard.base.errors import UserError, first_names
from steelyard.proof.signing import fingerprint, head_statement, holds, read_public_key
from steelyard.runs.chain import (
    Checked,
    Link,
    NodeStatement,
    Records,
    chain_rows,
    checked,
    checkpoint_problem,
    one_moment,
)

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
    differ: set[int | None] = field(default_factory=set[int | None])
    """Rounds whose rows are not those of the chain: nothing more is computed from them."""


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


def look_at_rounds(db: sqlite3.Connection, folder: Path, found: Findings, keys: Keys | None = None) -> Checked:
    """Hold every round, checkpoint, line of the ledger and signature against the chain, in one walk.

    Signatures are checked by the keys in the folder, or by those that the checker trusts.
    """
    with one_moment(db):
        rows = chain_rows(db)
        sealed = [row for row in rows if row[3] is not None]
        records, signatures = Records(db), _Signatures(db, found, keys)
        for one in records.links(sealed):
            found.changed += _differences(records, one)
            signatures.add(one.statements)
        found.differ = {finding.round for finding in found.changed}
        signatures.look()
        shallow = checked(db, folder, rows, checkpoint_problem(db, sealed) if sealed else "")
    if not sealed:
        found.unchecked.append(Finding("it has no head yet: no checkpoint was written"))
        return shallow
    # A checkpoint cannot follow a chain that is known to differ.
    if shallow.problem and not (found.differ and "checkpoint" in shallow.problem):
        found.changed.append(Finding(shallow.problem))
    found.checked["chain"] = f"{len(sealed)} rounds, as written" if not found.differ else f"{len(sealed)} rounds"
    return shallow


def _differences(records: Records, one: Link) -> Iterator[Finding]:
    """Yield what is not as it was written in a round: by client where the marks say whose, else of the whole round."""
    if gap := one.round != one.expected:
        yield Finding(f"missing from the chain: round {one.round} cannot be held against it", one.expected)
    changes = list(records.changes(one.round))
    for federation, client, what in changes:
        yield Finding(f"{what} under {federation} is not as it was written", one.round, client)
    if not (gap or one.whole or changes):
        general = "its rules, its seeds or its salt" if one.round == 0 else "its figures, its models or its head"
        yield Finding(f"{general} are not as they were written", one.round)


class _Signatures:
    """The signatures of a run: `add` the statements of each round in order, then `look`.

    A statement names the digest of the one before it, so a signature that holds stands for all statements that lead up
    to it: of each node the last one is checked, and any other that the next one does not name.
    """

    def __init__(self, db: sqlite3.Connection, found: Findings, keys: Keys | None) -> None:
        self._db, self._found, self._keys = db, found, keys
        self._lines = dict(db.execute("SELECT key, line FROM keys").fetchall())
        self._last: dict[tuple[str, str], NodeStatement] = {}
        """By key and rule: the newest statement."""
        self._rounds: dict[tuple[str, str], list[int]] = {}
        """The rounds of those that lead up to it, and its own."""
        self._asked: set[tuple[str, str | None]] = set()
        """Keys with the client (None: the server) for whom it was asked whether they may sign."""
        self._counted = 0

    def add(self, statements: Sequence[NodeStatement]) -> None:
        """Take the statements of a round."""
        for one in statements:
            self._counted += 1
            for client in one.statement.digests:
                self._may_sign(one.key, one.statement.round, client)
            line = (one.key, one.statement.federation)
            if line in self._last and one.statement.before != self._last[line].digest:
                self._end(line)
            self._last[line] = one
            self._rounds.setdefault(line, []).append(one.statement.round)

    def look(self) -> None:
        """Check what was added, and the server's signatures of heads."""
        for key, line in self._lines.items():
            if not _is_key(key, line):
                self._found.changed.append(Finding(f"the public key {key} is not the one of its fingerprint"))
        for line in list(self._last):
            self._end(line)
        heads = self._look_at_heads()
        by = "the keys that lie in the run's own folder"
        if self._keys is not None:
            by = f"the keys in {self._keys.folder}"
        if self._counted or heads:
            self._found.checked["signatures"] = f"{self._counted} of nodes, {heads} of the server, by {by}"
        elif self._keys is not None:
            self._found.unchecked.append(Finding("it holds no signatures for --keys to check"))

    def _end(self, line: tuple[str, str]) -> None:
        """Check the last statement of a line; where it does not hold, those before it, until one does."""
        one, rounds = self._last.pop(line), self._rounds.pop(line)[:-1]
        records = Records(self._db)
        while not self._holds(one) and rounds:
            stated = records.statements(rounds.pop())
            one = next(each for each in stated if (each.key, each.statement.federation) == line)

    def _holds(self, one: NodeStatement) -> bool:
        said = one.statement
        if self._signed(one.key, one.signature, said.content()):
            return True
        single = next(iter(said.digests)) if len(said.digests) == 1 else None
        whose = "its node's signature" if single else f"the signature of the node of {first_names(list(said.digests))}"
        self._found.changed.append(Finding(f"{whose} does not hold", said.round, single))
        return False

    def _look_at_heads(self) -> int:
        run, counted = Records(self._db).run, 0
        heads = "SELECT round, head, key, signature FROM chain WHERE key IS NOT NULL OR signature IS NOT NULL"
        for round, head, signer, signature in self._db.execute(f"{heads} ORDER BY round").fetchall():
            counted += 1
            self._may_sign(signer, round, None)
            if not self._signed(signer, signature, head_statement(run, round, str(head))):
                self._found.changed.append(Finding("the server's signature of the head does not hold", round))
        return counted

    def _may_sign(self, signer: str, round: int, client: str | None) -> None:
        """Note, in the first round of it, that a key is not one that the checker trusts for a client or the server."""
        if self._keys is None or (signer, client) in self._asked:
            return
        self._asked.add((signer, client))
        if refusal := self._keys.refusal(signer, client):
            whose = "the server's signature of the head" if client is None else "its node's signature"
            self._found.unchecked.append(Finding(f"{whose}, here and later: {refusal}", round, client))

    def _signed(self, signer: str, signature: object, content: bytes) -> bool:
        return isinstance(signature, bytes) and holds(str(self._lines.get(signer, "")), signature, content)


def _is_key(key: str, line: str) -> bool:
    try:
        return fingerprint(line) == key
    except (ValueError, IndexError):
        return False
