"""A node's ledger: every answer that left it with noise, whoever asked, and the ε of all of them together.

A server names its own rounds, rules and runs, so a node that limits what it discloses counts for itself. Each answer
counts as one more release about all data here, whichever clients were asked: within one answer a row is one client's,
but under another name, seed or split it may be another's. An answer that is asked for twice is noised anew, and counts
twice. The file is replaced as a whole before an answer leaves, so a cut or changed one was damaged later. A mark beside
it, written after it, says how long it was and what its SHA-256 was: an older copy, or one with other lines, differs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from steelyard.base import files
from steelyard.base.errors import UserError, printable, writable
from steelyard.base.files import owners_only
from steelyard.base.usercode import NotAllowed
from steelyard.clients.node import NodeConfig
from steelyard.privacy.accounting import Mechanism, Release, spent
from steelyard.privacy.ledger import Mark, first_difference
from steelyard.privacy.settings import OWNERS_DELTA, Noise, Positive

FILE = "ledger.jsonl"
"""The ledger's file in a node's `state` folder."""
MARK = "ledger.mark"
"""Beside it: how far the ledger had come after the last answer but, where a node was killed just then, one."""
_LONGEST_NAME = 200


class Disclosure(BaseModel, extra="forbid", frozen=True, strict=True, allow_inf_nan=False):
    """What one answer of a node discloses, and to whom; names are the server's own and are cut to a length."""

    run: str
    federation: str
    """The rule, with its seed where there are several."""
    round: int
    clients: int
    """How many clients of this node were asked."""
    clip: Positive
    noise: Noise
    """Noise on the update, in units of its sensitivity 2·clip."""
    criteria: Annotated[int, Field(ge=0)] = 0
    """How many criteria were sent with noise beside each update."""
    criteria_noise: Noise | None = None
    """Noise on a criterion, in units of its bound; None where none was sent."""
    criteria_mechanism: Mechanism = "gaussian"
    """How a criterion was noised; pure: by what is private by ε = 1/criteria_noise alone."""

    def releases(self) -> Counter[Release]:
        """Return what it discloses of any one client."""
        found = Counter({Release(self.noise): 1})
        if self.criteria and self.criteria_noise is not None:
            found[Release(self.criteria_noise, mechanism=self.criteria_mechanism)] += self.criteria
        return found


class Entry(Disclosure, frozen=True):
    """One line of the ledger."""

    number: int
    time: str
    delta: Annotated[float, Field(gt=0, lt=1)]
    epsilon: Annotated[float, Field(ge=0)]
    """ε of all entries up to this one together, at δ."""


_MARK = TypeAdapter(Mark)


class NodeLedger:
    """The ledger of one node; ask `check` before work is done, and `charge` before its answer leaves.

    `most` is the owner's ε; without it the ledger only records. Any number of processes may use one folder.
    """

    def __init__(self, folder: Path, most: float | None = None) -> None:
        self.path, self.most = folder / FILE, most

    @classmethod
    def of(cls, config: NodeConfig) -> NodeLedger | None:
        """Return the ledger of a node whose every answer carries noise, in its state folder; None for all others."""
        if config.state is None or "local" not in config.require:
            return None
        return cls(config.state, config.epsilon)

    def open(self) -> str:
        """Return in words the total so far; a ledger that cannot be read or written is refused. For the start."""
        writable(self.path.parent, "node config state")
        return f"{standing(self.entries(), self.most)} so far (delta {OWNERS_DELTA:g})"

    def entries(self) -> list[Entry]:
        """Return all entries, in order; a damaged file is refused."""
        return self._read()[1]

    def check(self, planned: Disclosure) -> None:
        """Refuse an answer that would take the total over the owner's ε; nothing is written."""
        self._next(planned, self.entries())

    def charge(self, planned: Disclosure) -> Entry:
        """Write an answer down, or refuse it; when this returns it is on the disk, and only then may it leave."""
        try:
            with self._locked():
                content, entries = self._read()
                entry = self._next(planned, entries)
                content += entry.model_dump_json().encode() + b"\n"
                files.write(self.path, content)
                mark = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                files.write(self.path.with_name(MARK), json.dumps(mark).encode())
        except OSError as error:
            raise UserError(
                f"node config state: {self.path} cannot be written ({error.strerror}), so nothing is answered; "
                "allowed: room and the right to write"
            ) from error
        return entry

    def _next(self, planned: Disclosure, entries: Sequence[Entry]) -> Entry:
        total = epsilon_of([*entries, planned])
        if self.most is not None and total > self.most:
            # The server learns this much; what others learned before is none of its business.
            raise NotAllowed(
                f"privacy.local: round {planned.round} would take the total of this node's answers over its epsilon "
                f"{self.most:g}; allowed: no further answer"
            )
        return Entry(
            **planned.model_dump(),
            number=len(entries) + 1,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            delta=OWNERS_DELTA,
            epsilon=total,
        )

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Keep other processes from writing between our reading and our writing."""
        with owners_only(self.path.parent), self.path.with_name("ledger.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self) -> tuple[bytes, list[Entry]]:
        # The mark first: another process may charge meanwhile, and the ledger is never behind its mark.
        mark = self._mark()
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            if mark is not None:
                raise self._damaged("it is gone, and its mark is there") from None
            return b"", []
        except OSError as error:
            raise UserError(f"node config state: {self.path} cannot be read: {error.strerror}") from error
        if not content.endswith(b"\n"):
            raise self._damaged("it is empty" if not content else "its last line is cut")
        entries = self._parsed(content)
        if mark is None and len(entries) > 1:
            raise self._damaged(f"its mark, {MARK}, is gone")
        if mark is not None and (difference := first_difference(self.path, [mark])):
            raise self._damaged(f"it {difference[1]} when the last answer left")
        return content, entries

    def _mark(self) -> Mark | None:
        try:
            return _MARK.validate_json(self.path.with_name(MARK).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError):
            raise self._damaged(f"its mark, {MARK}, cannot be read") from None

    def _parsed(self, content: bytes) -> list[Entry]:
        entries: list[Entry] = []
        for number, line in enumerate(content.splitlines(), 1):
            try:
                entries.append(Entry.model_validate_json(line))
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                where = ".".join(str(part) for part in first["loc"])
                raise self._damaged(printable(f"line {number}: {where and where + ': '}{first['msg']}")) from None
            if entries[-1].number != number:
                raise self._damaged(f"line {number} is number {entries[-1].number}")
        if entries:
            last = entries[-1]
            total = epsilon_of(entries, last.delta)
            if not math.isclose(total, last.epsilon, rel_tol=1e-6):
                raise self._damaged(f"it says epsilon {last.epsilon:.6g} and its lines add up to {total:.6g}")
        return entries

    def _damaged(self, what: str) -> UserError:
        return UserError(
            f"node config state: {self.path} is damaged ({what}), so the total so far is unknown; allowed: the file as "
            "it was"
        )


def ledger_name(name: str) -> str:
    """Return a name that a server gave as the ledger keeps it."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def epsilon_of(entries: Sequence[Disclosure], delta: float = OWNERS_DELTA) -> float:
    """Return the ε at δ of these answers together, for any one client."""
    spending: Counter[Release] = Counter()
    for entry in entries:
        spending.update(entry.releases())
    return spent(spending, delta)


def standing(entries: Sequence[Entry], most: float | None = None) -> str:
    """Return in words the ε of some answers together, and of how much."""
    limit = "" if most is None else f" of {most:g}"
    answers = "1 answer" if len(entries) == 1 else f"{len(entries):,} answers"
    return f"epsilon {epsilon_of(entries):.4g}{limit} in {answers}"
