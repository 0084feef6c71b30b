"""A node's receipts: what it signed in each round, what the server's signed heads say of it, and what both show.

Both lie in the node's `state` folder. A receipt is written before an answer leaves; heads come with later tasks, and
after the last round. With them the node shows that it took part, or did not, without the server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from steelyard.base import files
from steelyard.base.errors import UserError, first_names, told_as
from steelyard.messages.updates import Signed, Task, Updates
from steelyard.proof.signing import SERVER, Keys, SigningKey, fingerprint, holds
from steelyard.proof.statements import UNSIGNED, Hash, Proof, Statement, stated
from steelyard.runs.chain import Records
from steelyard.runs.database import reading

FILE, PROOFS = "receipts.jsonl", "proofs.jsonl"
"""In a node's `state` folder: what it signed, and what servers' heads say of it."""
BLOCK = 1 << 16
"""Bytes that are read at once where a file is read from its end; the line of a thousand clients has 130,000."""
_FARTHEST = 1 << 24
"""Bytes from the end up to which a statement of the same run is looked for: what is older is a run long ended."""

LineT = TypeVar("LineT", bound=BaseModel)


class Receipt(BaseModel, extra="forbid", frozen=True, strict=True):
    """A node's statement of one rule and round, as it signed it; bytes in hexadecimal digits."""

    run: str
    federation: str
    round: int
    task: str
    before: Hash
    digests: dict[str, Hash]
    salts: dict[str, str]
    """By client: with its salt and its update a digest can be made again."""
    key: str
    """The node's public key, as one line of OpenSSH."""
    signature: str

    @property
    def statement(self) -> Statement:
        """What was signed."""
        digests = {client: bytes.fromhex(digest) for client, digest in self.digests.items()}
        return Statement(self.run, self.federation, self.round, self.task, self.before, digests)

    def holds(self) -> bool:
        """Whether its signature is its key's."""
        try:
            return holds(self.key, bytes.fromhex(self.signature), self.statement.content())
        except ValueError:
            return False


def sign(
    key: SigningKey, state: Path | None, run: str, task: Task, asked: str, updates: Updates, *, hidden: bool
) -> Signed | None:
    """Sign what a node sends; with a state folder, the receipt is on the disk when this returns. None: nothing is sent.

    `asked` is the digest of the task. Only with a state folder does a statement name the one before it.
    """
    before = "" if state is None else last_statement(state, run, task.federation, task.round)
    signed = stated(key, run, task, asked, updates, before, hidden=hidden)
    if state is not None and signed is not None:
        keep(state, run, task, asked, signed)
    return signed


def keep(folder: Path, run: str, task: Task, asked: str, signed: Signed) -> None:
    """Write down what a node signed; only when this returns may the answer leave."""
    digests = {client: digest.hex() for client, digest in signed.digests.items()}
    salts = {client: salt.hex() for client, salt in signed.salts.items()}
    receipt = Receipt(
        run=run, federation=task.federation, round=task.round, task=asked, before=signed.before, digests=digests,
        salts=salts, key=signed.key, signature=signed.signature.hex(),
    )  # fmt: skip
    try:
        append(folder / FILE, [receipt])
    except OSError as error:
        raise UserError(
            f"node config state: {folder / FILE} cannot be written ({error.strerror}), so nothing is answered; "
            "allowed: room and the right to write"
        ) from error


def last_statement(folder: Path, run: str, federation: str, round: int) -> str:
    """Return the digest of the node's last statement of an earlier round; empty where there is none.

    A round that is repeated follows the one before it, as it did the first time. Lines are read from the end and only
    as far as needed, so that a task late in a long run costs no more than an early one.
    """
    path = folder / FILE
    of_run = f'{{"run":{json.dumps(run, ensure_ascii=False)},'.encode()
    for line in _from_the_end(path) if files.is_file(path) else ():
        if not line.startswith(of_run):
            continue
        try:
            one = Receipt.model_validate_json(line)
        except ValidationError:
            continue
        if (one.run, one.federation) == (run, federation) and one.round < round:
            return one.statement.digest()
    return ""


def keep_proofs(folder: Path, run: str, key: str, proofs: Sequence[Proof]) -> list[str]:
    """Keep what signed heads say of the node with this public key; returns in words what shows nothing."""
    sound: list[Proof] = []
    faults: list[str] = []
    for proof in proofs:
        try:
            if (proof.run, proof.node) != (run, key):
                raise ValueError("it is of another node or run")
            proof.check()
            sound.append(proof)
        except ValueError as error:
            faults.append(f"the head of round {proof.round} is not kept: {error}")
    try:
        append(folder / PROOFS, sound)
    except OSError as error:
        faults.append(f"{folder / PROOFS} cannot be written: {error.strerror}")
    return faults


def append(path: Path, lines: Sequence[BaseModel]) -> None:
    """Add lines to a file of the node; when this returns they are on the disk."""
    if not lines:
        return
    with files.owners_only(path.parent), files.open_to_append(path) as file:
        # A node that was killed while it wrote leaves a torn line, whose answer never left: it is overwritten.
        if not (size := file.seek(0, os.SEEK_END)):
            files.sync_folder(path.parent)
        elif (last := _whole_lines(path, size)) < size:
            file.truncate(last)
        file.write(b"".join(line.model_dump_json().encode() + b"\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def read_end(path: Path, start: int, end: int) -> bytes:
    """Return a stretch of a file."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def _whole_lines(path: Path, size: int) -> int:
    """Return where the last whole line of a file ends; only its end is read."""
    while size:
        start = max(0, size - BLOCK)
        if (found := read_end(path, start, size).rfind(b"\n")) >= 0:
            return start + found + 1
        size = start
    return 0


def _from_the_end(path: Path) -> Iterator[bytes]:
    """Yield the whole lines of a file, the last one first; only as much of its end is read as is asked for."""
    at = _whole_lines(path, path.stat().st_size)
    farthest = max(0, at - _FARTHEST)
    begun = b""
    while at > farthest:
        start = max(farthest, at - BLOCK)
        begun, *lines = (read_end(path, start, at) + begun).split(b"\n")
        yield from reversed(lines)
        at = start
    yield begun


def read(folder: Path) -> list[Receipt]:
    """Return a node's receipts in the order in which they were written; a statement that was signed twice counts once.

    None where it has signed nothing yet.
    """
    return list({one.statement.digest(): one for one in read_lines(folder / FILE, Receipt)}.values())


def read_proofs(folder: Path) -> list[Proof]:
    """Return what heads say of a node, each once."""
    return list({one.model_dump_json(): one for one in read_lines(folder / PROOFS, Proof)}.values())


def read_lines(path: Path, kind: type[LineT]) -> Iterator[LineT]:
    """Yield the lines that `append` wrote, without one that was torn; a changed one is refused."""
    *whole, _torn = files.read_bytes(path).split(b"\n") if files.is_file(path) else [b""]
    for number, line in enumerate(whole, 1):
        try:
            yield kind.model_validate_json(line)
        except ValidationError:
            raise UserError(
                f"{path}: line {number} is cut off or changed; allowed: the file as it was written"
            ) from None


def written(folder: Path, proofs: Iterable[Proof]) -> None:
    """Add proofs that are not there yet."""
    known = {one.model_dump_json() for one in read_proofs(folder)}
    with told_as(f"{folder / PROOFS}: cannot be written", "a writable folder"):
        append(folder / PROOFS, [one for one in proofs if one.model_dump_json() not in known])


Outcome = Literal["signed", "took part", "absent", "did not take part", "differs"]
CODES: dict[Outcome, int] = {"signed": 0, "took part": 0, "absent": 0, "did not take part": 1, "differs": 2}
"""What `steelyard federate receipts` ends with: the largest of its lines. "signed": by the node, and no head yet;
"absent": the node signed nothing, and the head holds nothing of it; "did not take part": it signed, and the head holds
nothing of it."""
Place = tuple[str, str, int]
"""Run, rule and round."""
CheckedProof = tuple[Proof, str]
"""A proof, and why it shows nothing; empty where it does."""


@dataclass(frozen=True)
class Answer:
    """What is known of a node in one round of one rule."""

    place: Place
    clients: tuple[str, ...]
    """For whom the node signed."""
    outcome: Outcome
    why: str

    def line(self) -> str:
        """Return it in words: where, who, what is known."""
        run, federation, round = self.place
        who = f", client{'s' if len(self.clients) > 1 else ''} {first_names(self.clients)}" if self.clients else ""
        return f"run {run}, {federation}, round {round}{who}: {self.outcome}: {self.why}"


def listed(folder: Path, trusted: Keys | None = None) -> list[Answer]:
    """Return what a node's own files show of each round: its receipts, and the heads that were kept with them."""
    return _answers(_receipts(folder), _checked(read_proofs(folder), trusted))


def prove(folder: Path, run: Path, trusted: Keys | None = None) -> list[Answer]:
    """Hold a node's receipts against a run's folder, and keep what its signed heads say of the node."""
    files.check_run(run)
    receipts = _receipts(folder)
    with reading(run) as db:
        records = Records(db)
        name = records.run
        nodes = sorted({one.key for one in receipts if one.run == name})
        if not nodes:
            known = f"no receipt is of run '{name}' ({run})"
            raise UserError(f"{folder}: {known}; allowed: the folder of a run that the node signed in")
        rules = [rule for (rule,) in db.execute("SELECT name FROM federations ORDER BY name").fetchall()]
        rounds = [round for (round,) in db.execute("SELECT round FROM chain WHERE round > 0 ORDER BY round").fetchall()]
        sealed = [one for round in rounds if (one := records.sealed(round)) is not None]
    proofs = _checked([one.proof(rule, node) for one in sealed for rule in rules for node in nodes], trusted)
    written(folder, [proof for proof, fault in proofs if not fault])
    beyond = "the run's chain does not reach this round"
    return [
        Answer(one.place, one.clients, "did not take part", beyond) if one.outcome == "signed" else one
        for one in _answers(receipts, proofs)
        if one.place[0] == name
    ]


def _receipts(folder: Path) -> list[Receipt]:
    if not files.is_file(folder / FILE) and not files.is_file(folder / PROOFS):
        raise UserError(f"{folder}: holds no {FILE}; allowed: the state folder of a node that has a key and took part")
    return read(folder)


def _answers(receipts: Sequence[Receipt], proofs: Sequence[CheckedProof]) -> list[Answer]:
    last: dict[Place, CheckedProof] = {(one[0].run, one[0].federation, one[0].round): one for one in proofs}
    signed: dict[Place, list[Receipt]] = {}
    for one in receipts:
        signed.setdefault((one.run, one.federation, one.round), []).append(one)
    heads: dict[tuple[str, int], set[str]] = {}
    for proof, fault in proofs:
        if not fault:
            heads.setdefault((proof.run, proof.round), set()).add(proof.head)
    places = sorted({*last, *signed})
    return [_answer(place, signed.get(place, []), last.get(place), heads) for place in places]


def _answer(
    place: Place, receipts: Sequence[Receipt], last: CheckedProof | None, heads: Mapping[tuple[str, int], set[str]]
) -> Answer:
    """Say what is known of one round: it may have been repeated, then any of its receipts counts."""
    clients = tuple(sorted({client for one in receipts for client in one.digests}))

    def answer(outcome: Outcome, why: str) -> Answer:
        return Answer(place, clients, outcome, why)

    if any(not one.holds() for one in receipts):
        return answer("differs", "the node's own signature does not hold")
    if last is None:
        return answer("signed", "no head of the server is kept with it yet")
    both = heads.get((place[0], place[2]), set[str]())
    if len(both) > 1:
        return answer("differs", f"the server signed two heads: {' and '.join(f'{one[:16]}…' for one in sorted(both))}")
    proof, fault = last
    if fault not in ("", UNSIGNED):
        return answer("differs", fault)
    held = proof.statement if proof.own else ""
    shown = fault or f"head {proof.head[:16]}… is signed"
    if not held:
        nothing = f"{shown} and holds nothing of this node"
        return answer("did not take part" if receipts else "absent", nothing)
    if held not in {one.statement.digest() for one in receipts}:
        return answer("differs", f"{shown} and holds another statement, {held[:16]}…")
    return answer("took part", shown if fault else f"{shown} and its path holds")


def _checked(proofs: Sequence[Proof], trusted: Keys | None) -> list[CheckedProof]:
    return [(proof, _fault(proof, trusted)) for proof in proofs]


def _fault(proof: Proof, trusted: Keys | None) -> str:
    """Say why a proof shows nothing; empty where it does."""
    try:
        proof.check()
    except ValueError as error:
        return str(error)
    if trusted is not None and trusted.named.get(SERVER) != proof.key:
        return f"the head is signed by {fingerprint(proof.key)}, not by {SERVER}.pub"
    return ""
