"""The signatures of a run: of nodes over their updates, of the server over every head and the closing record.

`Findings` gathers what a look at a run shows. docs/reference/verifying.md says what signatures prove, by whose keys.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from steelyard.base.errors import first_names
from steelyard.proof.signing import Keys, closing_statement, fingerprint, head_statement, holds
from steelyard.proof.statements import Statement
from steelyard.runs.chain import NodeStatement, Records

_SIGNED_HEADS = "SELECT round, head, key, signature FROM chain WHERE head IS NOT NULL ORDER BY round"


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
    closed: bool = True
    """Whether what stands beside the rounds is as the closing record says; else no checkpoint's size is known."""

    def change(self, what: str, round: int | None = None, client: str | None = None) -> None:
        """Note what is not as it was written."""
        self.changed.append(Finding(what, round, client))

    def skip(self, what: str, round: int | None = None, client: str | None = None) -> None:
        """Note what cannot be checked."""
        self.unchecked.append(Finding(what, round, client))


class Signatures:
    """The signatures of a run: `add` the statements of each round in order, then `look`.

    A statement names the digest of the one before it, so a signature that holds stands for all statements that lead up
    to it: of each node the last one is checked, and any other that the next one does not name. With the keys of a
    checker nothing may be missing: neither a signature of the server nor a statement for a client that was weighed.
    """

    def __init__(self, db: sqlite3.Connection, found: Findings, keys: Keys | None) -> None:
        self._db, self._found, self._keys = db, found, keys
        self._records = Records(db)
        self._lines = dict(db.execute("SELECT key, line FROM keys").fetchall())
        self._last: dict[tuple[str, str], NodeStatement] = {}
        """By key and rule: the newest statement."""
        self._rounds: dict[tuple[str, str], list[int]] = {}
        """The rounds of those that lead up to it, and its own."""
        self._asked: set[tuple[str, str | None]] = set()
        """Keys with the client (None: the server) for whom it was asked whether they may sign."""
        self._stated: set[tuple[str, int, str]] = set()
        """By rule, round and client: for whom a node signed."""
        self._looked: list[int] = []
        self._counted = 0
        self._unlinked: list[tuple[int, Statement]] = []
        """Statements that name one before which the run does not hold, each with the round that is looked on from."""
        self._digests: set[str] = set()

    def add(self, round: int, statements: Sequence[NodeStatement]) -> None:
        """Take the statements of a round."""
        self._looked.append(round)
        for one in statements:
            self._counted += 1
            said = one.statement
            for client in said.digests:
                self._may_sign(one.key, said.round, client)
                self._stated.add((said.federation, said.round, client))
            line = (one.key, said.federation)
            if said.before and said.before not in self._digests:
                self._unlinked.append((self._rounds[line][-1] if line in self._rounds else 0, said))
            self._digests.add(one.digest)
            if line in self._last and said.before != self._last[line].digest:
                self._end(line)
            self._last[line] = one
            self._rounds.setdefault(line, []).append(said.round)

    def look(self) -> None:
        """Check what was added, and the server's signatures of heads and of the closing record."""
        for key, line in self._lines.items():
            if not _is_key(key, line):
                self._found.change(f"the public key {key} is not the one of its fingerprint")
        for line in list(self._last):
            self._end(line)
        heads = self._look_at_heads()
        by = "the keys that lie in the run's own folder"
        if self._keys is not None:
            by = f"the keys in {self._keys.folder}"
        if self._counted or heads:
            self._found.checked["signatures"] = f"{self._counted} of nodes, {heads} of the server, by {by}"
            if self._keys is not None:
                self._look_for_missing(self._keys)
        elif self._keys is not None:
            self._found.skip("it holds no signatures for --keys to check")

    def _end(self, line: tuple[str, str]) -> None:
        """Check the last statement of a line; where it does not hold, those before it, until one does."""
        one, rounds = self._last.pop(line), self._rounds.pop(line)[:-1]
        while not self._holds(one) and rounds:
            stated = self._records.statements(rounds.pop())
            one = next(each for each in stated if (each.key, each.statement.federation) == line)

    def _holds(self, one: NodeStatement) -> bool:
        said = one.statement
        if self._signed(one.key, one.signature, said.content()):
            return True
        single = next(iter(said.digests)) if len(said.digests) == 1 else None
        whose = "its node's signature" if single else f"the signature of the node of {first_names(list(said.digests))}"
        self._found.change(f"{whose} does not hold", said.round, single)
        return False

    def _look_at_heads(self) -> int:
        """Check what the server signed; returns how many heads and closing records that are."""
        run = self._records.run
        heads = [
            (round, "of the head", head_statement(run, round, str(head)), key, signature)
            for round, head, key, signature in self._db.execute(_SIGNED_HEADS).fetchall()
        ]
        closing = [
            (round, "of the closing record", closing_statement(run, str(hash)), key, signature)
            for round, hash, key, signature in self._db.execute("SELECT * FROM closing").fetchall()
        ]
        counted, unsigned = 0, list[tuple[int, str]]()
        for round, what, content, signer, signature in heads + closing:
            if signer is None and signature is None:
                unsigned.append((round, what))
                continue
            counted += 1
            self._may_sign(str(signer), round, None)
            if not self._signed(str(signer), signature, content):
                self._found.change(f"the server's signature {what} does not hold", round)
        if self._keys is not None and counted:
            for round, what in unsigned:
                self._found.change(f"the server's signature {what} is missing", round)
        elif self._keys is not None and self._counted:
            self._found.skip("no head is signed by the server")
        return counted

    def _look_for_missing(self, keys: Keys) -> None:
        """Note clients that were weighed in a round for which no node signed, and statements that were taken out."""
        nodes = bool(self._records.run or self._counted)  # a simulation has none
        signers = {(federation, client) for federation, _, client in self._stated}
        never: set[tuple[str, str]] = set()
        for round in self._looked:
            for federation, client in self._records.weighed(round):
                if (federation, round, client) in self._stated:
                    continue
                named = client in keys.named
                if (federation, client) in signers or (nodes and named):
                    self._found.change(f"its node's statement under {federation} is missing", round, client)
                elif (nodes or named) and (federation, client) not in never:
                    never.add((federation, client))
                    self._found.skip(f"its node signed nothing under {federation}, here and later", round, client)
        for after, said in self._unlinked:
            # Where the run says that it left the node out in between, that is the one which it does not hold.
            if not self._records.left_out(said.federation, after, said.round) & said.digests.keys():
                words = f"its node signed another update under {said.federation} before this one, after round {after}"
                self._found.skip(f"{words}, which the run does not hold", said.round, min(said.digests))
        if unkept := [round for round in self._looked if self._records.unkept(round)]:
            self._found.skip(f"who was weighed was not kept of {len(unkept)} rounds, so that signatures may be missing")

    def _may_sign(self, signer: str, round: int, client: str | None) -> None:
        """Note, in the first round of it, that a key is not one that the checker trusts for a client or the server."""
        if self._keys is None or (signer, client) in self._asked:
            return
        self._asked.add((signer, client))
        if refusal := self._keys.refusal(signer, client):
            whose = "the server's signature of the head" if client is None else "its node's signature"
            self._found.skip(f"{whose}, here and later: {refusal}", round, client)

    def _signed(self, signer: str, signature: object, content: bytes) -> bool:
        return isinstance(signature, bytes) and holds(str(self._lines.get(signer, "")), signature, content)


def bad_signature(db: sqlite3.Connection, rounds: Iterable[int]) -> str:
    """Return the first signature of a run that does not hold by the keys in its own folder; empty where all do."""
    found = Findings()
    signatures, records = Signatures(db, found, None), Records(db)
    for round in rounds:
        signatures.add(round, records.statements(round))
    signatures.look()
    return found.changed[0].line() if found.changed else ""


def _is_key(key: str, line: str) -> bool:
    try:
        return fingerprint(line) == key
    except (ValueError, IndexError):
        return False
