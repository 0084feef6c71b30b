"""A node's receipts: what it signed in each round, and what the server's signed heads say of it.

Both lie in the node's `state` folder. A receipt is written before an answer leaves; heads come with later tasks, and
after the last round. `receipt_answers` reads them: with them the node shows that it took part, or did not, without the
server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from steelyard.base import files
from steelyard.base.errors import UserError, told_as
from steelyard.messages.updates import Signed, Task, Updates
from steelyard.proof.signing import SigningKey, holds
from steelyard.proof.statements import Hash, Proof, Statement, stated

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
        if (size := file.seek(0, os.SEEK_END)) and (last := _whole_lines(path, size)) < size:
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
    return list({one.statement.digest(): one for one in _lines(folder / FILE, Receipt)}.values())


def read_proofs(folder: Path) -> list[Proof]:
    """Return what heads say of a node, each once."""
    return list({one.model_dump_json(): one for one in _lines(folder / PROOFS, Proof)}.values())


def _lines(path: Path, kind: type[LineT]) -> Iterator[LineT]:
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
