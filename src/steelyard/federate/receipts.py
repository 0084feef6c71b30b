"""A node's receipts: what it signed in each round, and what shows that a server's chain holds it.

Receipts lie in the node's `state` folder. A line is written before an answer leaves. With a run's folder (`prove`)
the signed head of the round and the path from the statement to it are kept beside it; from then on the node shows
that it took part with its own files and the server's public key alone.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from steelyard import files
from steelyard.errors import UserError
from steelyard.messages import Signed, Task
from steelyard.runs.chain import Records, marked
from steelyard.runs.schema import reading
from steelyard.runs.verifying import SERVER, Keys
from steelyard.signing import Statement, fingerprint, head_statement, holds, link, path_to, root_along

FILE, PROOFS = "receipts.jsonl", "proofs.jsonl"
"""In a node's `state` folder: what it signed, and what servers' chains say of it."""
Outcome = Literal["signed", "took part", "did not take part", "differs"]
CODES: dict[Outcome, int] = {"signed": 0, "took part": 0, "did not take part": 1, "differs": 2}
"""What `steelyard federate receipts` ends with: the largest of its lines. "signed": by the node, and no head yet."""
_LONGEST_LINE = 1 << 16
NO_SIGNATURE = "the head is not signed"


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


LineT = TypeVar("LineT", bound=_Line)


class Receipt(_Line):
    """One client's statement of one round, as its node signed it; bytes in hexadecimal digits."""

    run: str
    federation: str
    round: int
    client: str
    task: str
    digest: str
    salt: str
    """With it and the update the digest can be made again; empty where updates are hidden."""
    key: str
    """The node's public key, as one line of OpenSSH."""
    signature: str

    @property
    def statement(self) -> Statement:
        """What was signed."""
        asked = (self.run, self.federation, self.round, self.client, self.task)
        return Statement(*asked, bytes.fromhex(self.digest))

    @property
    def place(self) -> tuple[str, str, int, str]:
        """Where it belongs: run, rule, round, client."""
        return self.run, self.federation, self.round, self.client

    def holds(self) -> bool:
        """Whether its signature is its key's."""
        return holds(self.key, bytes.fromhex(self.signature), self.statement.content())


class Proof(_Line):
    """What leads from a statement (by its leaf) to a head that a server signed."""

    leaf: str
    path: list[str]
    before: str
    record: str
    head: str
    key: str = ""
    """The server's public key; empty where it signed nothing."""
    signature: str = ""

    def fault(self, receipt: Receipt, trusted: Keys | None = None) -> str:
        """Say why it does not show that a signed head holds a receipt; empty where it does."""
        try:
            top = root_along(receipt.statement.leaf(), self.path)
        except ValueError:
            return "its path is none"
        if link(self.before, receipt.round, top, self.record) != self.head:
            return "its path does not lead to the head"
        if not self.key:
            return NO_SIGNATURE
        said = head_statement(receipt.run, receipt.round, self.head)
        if not holds(self.key, bytes.fromhex(self.signature), said):
            return "the server's signature of the head does not hold"
        if trusted is not None and trusted.named.get(SERVER) != self.key:
            return f"the head is signed by {fingerprint(self.key)}, not by {SERVER}.pub"
        return ""


@dataclass(frozen=True)
class Answer:
    """What is known of one receipt."""

    receipt: Receipt
    outcome: Outcome
    why: str

    def line(self) -> str:
        """Return it in words: where, the digest, what is known."""
        one = self.receipt
        where = f"run {one.run}, {one.federation}, round {one.round}, client {one.client}"
        return f"{where}: digest {one.digest[:16]}…: {self.outcome}: {self.why}"


def keep(folder: Path, run: str, task: Task, asked: str, signed: Mapping[str, Signed]) -> None:
    """Write down what a node signed; when this returns it is on the disk, and only then may the answer leave."""
    lines = [
        Receipt(
            run=run, federation=task.federation, round=task.round, client=client, task=asked, digest=one.digest.hex(),
            salt=one.salt.hex(), key=one.key, signature=one.signature.hex(),
        )
        for client, one in signed.items()
    ]  # fmt: skip
    try:
        with files.owners_only(folder):
            _append(folder / FILE, lines)
    except OSError as error:
        raise UserError(
            f"node config state: {folder / FILE} cannot be written ({error.strerror}), so nothing is answered; "
            "allowed: room and the right to write"
        ) from error


def _append(path: Path, lines: Sequence[_Line]) -> None:
    with files.open_to_append(path) as file:
        # A node that was killed while it wrote leaves a torn line, whose answer never left: it is overwritten.
        if (size := file.seek(0, os.SEEK_END)) and (last := _last_line(path)) < size:
            file.truncate(last)
        file.write(_written(lines))
        file.flush()
        os.fsync(file.fileno())


def _last_line(path: Path) -> int:
    """Return where the last whole line of a file ends; only its end is read."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - _LONGEST_LINE))
        return start + file.read().rfind(b"\n") + 1


def _written(lines: Iterable[_Line]) -> bytes:
    return b"".join(line.model_dump_json().encode() + b"\n" for line in lines)


def read(folder: Path) -> list[Receipt]:
    """Return a node's receipts by run, rule, round and client; a statement that was signed twice counts once."""
    if not files.is_file(folder / FILE):
        raise UserError(f"{folder}: holds no {FILE}; allowed: the state folder of a node that has a key and took part")
    found = {one.statement: one for one in _lines(folder / FILE, Receipt)}
    return sorted(found.values(), key=lambda one: (one.place, one.digest))


def _lines(path: Path, kind: type[LineT]) -> Iterator[LineT]:
    *whole, _torn = files.read_bytes(path).split(b"\n")
    for number, line in enumerate(whole, 1):
        try:
            one = kind.model_validate_json(line)
            for text in (getattr(one, name, "") for name in ("digest", "salt", "signature")):
                bytes.fromhex(text)
        except (ValidationError, ValueError):
            raise UserError(
                f"{path}: line {number} is cut off or changed; allowed: the file as it was written"
            ) from None
        yield one


def _proofs(folder: Path) -> dict[str, Proof]:
    """Return the proofs that are kept, by the leaf that each is of."""
    path = folder / PROOFS
    return {one.leaf: one for one in _lines(path, Proof)} if files.is_file(path) else {}


def listed(folder: Path, trusted: Keys | None = None) -> list[Answer]:
    """Return what each receipt shows by itself: its own signature, and the signed head that was kept with it."""
    proofs = _proofs(folder)
    found: list[Answer] = []
    for one in read(folder):
        proof = proofs.get(one.statement.leaf().hex())
        if not one.holds():
            found.append(Answer(one, "differs", "the node's own signature does not hold"))
        elif proof is None:
            found.append(Answer(one, "signed", "no head of the server is kept with it (--run keeps it)"))
        elif fault := proof.fault(one, trusted):
            found.append(Answer(one, "differs", fault))
        else:
            found.append(Answer(one, "took part", _shown(proof)))
    return found


def prove(folder: Path, run: Path, trusted: Keys | None = None) -> list[Answer]:
    """Hold a node's receipts against a run's folder, and keep the head and the path of each that is in its chain."""
    files.check_run(run)
    receipts = read(folder)
    with reading(run) as db:
        records = Records(db)
        mine = [one for one in receipts if one.run == records.run]
        if not mine:
            known = f"no receipt is of run '{records.run}' ({run})"
            raise UserError(f"{folder}: {known}; allowed: the folder of a run that the node signed in")
        found, proofs = _against(records, dict(_chain(db, records)), mine, trusted)
    try:
        files.write(folder / PROOFS, _written((_proofs(folder) | {one.leaf: one for one in proofs}).values()))
    except OSError as error:
        raise UserError(
            f"{folder / PROOFS}: cannot be written: {error.strerror}; allowed: a writable folder"
        ) from error
    return found


@dataclass(frozen=True)
class _Sealed:
    """One round of a chain as it is written."""

    before: str
    head: str
    record: str
    key: str
    signature: bytes


def _chain(db: sqlite3.Connection, records: Records) -> Iterator[tuple[int, _Sealed]]:
    lines = dict(db.execute("SELECT key, line FROM keys").fetchall())
    before = records.first()
    rows = db.execute("SELECT round, ledger_bytes, ledger, head, key, signature FROM chain ORDER BY round").fetchall()
    for round, size, sha256, head, key, signature in rows:
        if head is None:
            return
        record = hashlib.sha256(records.record(round, marked(size, sha256))).hexdigest()
        yield round, _Sealed(before, str(head), record, str(lines.get(key, "")), signature or b"")
        before = str(head)


def _against(
    records: Records, chain: dict[int, _Sealed], receipts: Sequence[Receipt], trusted: Keys | None
) -> tuple[list[Answer], list[Proof]]:
    found: list[Answer] = []
    proofs: list[Proof] = []
    by_round = {round: [one for one, *_ in records.statements(round)] for round in {one.round for one in receipts}}
    for one in receipts:
        statements, sealed = by_round[one.round], chain.get(one.round)
        same = [said for said in statements if (said.federation, said.client) == (one.federation, one.client)]
        if not one.holds():
            found.append(Answer(one, "differs", "the node's own signature does not hold"))
        elif sealed is None:
            found.append(Answer(one, "did not take part", "the run's chain does not reach this round"))
        elif not same:
            found.append(Answer(one, "did not take part", "the run has no statement of this client in this round"))
        elif one.statement not in same:
            found.append(Answer(one, "differs", f"the run says digest {same[0].digest.hex()[:16]}…"))
        else:
            leaves = [said.leaf() for said in statements]
            at = statements.index(one.statement)
            proof = Proof(
                leaf=leaves[at].hex(), path=path_to(leaves, at), before=sealed.before, record=sealed.record,
                head=sealed.head, key=sealed.key, signature=sealed.signature.hex(),
            )  # fmt: skip
            fault = proof.fault(one, trusted)
            outcome: Outcome = "differs" if fault not in ("", NO_SIGNATURE) else "took part"
            found.append(Answer(one, outcome, fault or _shown(proof)))
            proofs += [] if fault else [proof]
    return found, proofs


def _shown(proof: Proof) -> str:
    return f"head {proof.head[:16]}… is signed and its path holds"
