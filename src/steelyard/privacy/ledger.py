"""The ledger: every release of a run, on the disk before its noise is drawn.

A run that is killed may have used noise that its checkpoint does not know of; when it goes on, the rounds after the
checkpoint are run again with new noise, and both count. So the ledger is a file of its own that only grows: one line of
JSON for each charge, flushed to the disk before the charge returns. A line that was cut by a power failure belongs to
noise that was never drawn.

Marks say how far a ledger had come, for those who check it later: a chain of rounds, a node.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from steelyard.base import files
from steelyard.base.errors import UserError, printable
from steelyard.privacy.accounting import Mechanism, Release, Sampling, Spending, spent
from steelyard.privacy.settings import Noise

FILE = files.LEDGER
"""The ledger's file in a run's folder."""


@dataclass(frozen=True)
class Mark:
    """How far a ledger had come, and what stood in it: its first bytes, and their SHA-256 in hexadecimal digits."""

    bytes: int
    sha256: str


def first_difference(path: Path, marks: Sequence[Mark]) -> tuple[int, str] | None:
    """Return the place of the first mark that a ledger's file does not bear out, and how; None where it bears out all.

    Marks come in the order of their bytes. What follows the last is not looked at: a ledger is ahead of the rounds that
    were written, never behind them.
    """
    try:
        content = files.read_bytes(path)
    except FileNotFoundError:
        content = None
    except OSError as error:
        return 0, f"cannot be read ({error.strerror}), and could be"
    hashed, done = hashlib.sha256(), 0
    for place, mark in enumerate(marks):
        if mark.bytes and content is None:
            return place, "is gone, and was there"
        held = content or b""
        if len(held) < mark.bytes:
            return place, f"has {len(held):,} bytes, and had {mark.bytes:,}"
        hashed.update(held[done : mark.bytes])
        done = mark.bytes
        if hashed.hexdigest() != mark.sha256:
            return place, "no longer holds the charges that it held"
    return None


class _Line(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """A charge as its line holds it. What no noise of ours is would make a sum without ε, or with an ε of 0."""

    federation: str
    round: int
    what: str
    noise: Noise
    sampling: Sampling
    rate: Annotated[float, Field(gt=0, le=1)]
    count: Annotated[int, Field(ge=1, le=10**12)]
    mechanism: Mechanism = "gaussian"
    clients: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Charge:
    """Some equal releases in one round of one federation."""

    federation: str
    round: int
    what: str
    """What was released: "update", "criteria"."""
    release: Release
    clients: tuple[str, ...] | None = None
    """Whose data it is about, where that is known to everybody; None: any client may have been in it."""
    count: int = 1

    def line(self) -> str:
        """Return the charge as one line of JSON."""
        fields = _Line(
            federation=self.federation,
            round=self.round,
            what=self.what,
            noise=self.release.noise,
            sampling=self.release.sampling,
            rate=self.release.rate,
            count=self.count,
            mechanism=self.release.mechanism,
            clients=self.clients,
        )
        return json.dumps(fields.model_dump(exclude_defaults=True)) + "\n"

    @classmethod
    def read(cls, line: str) -> Charge:
        """Read a line that `line` wrote; ValueError for anything else."""
        found = _Line.model_validate_json(line)
        if found.clients is None and found.sampling == "all":
            raise ValueError("it names no clients, and they were not drawn at random")
        if found.mechanism != "gaussian" and found.sampling != "all":
            raise ValueError(f"mechanism {found.mechanism} with clients that were drawn")
        release = Release(found.noise, found.sampling, found.rate, found.mechanism)
        return cls(found.federation, found.round, found.what, release, found.clients, found.count)


@dataclass(eq=False)
class Account:
    """What was released about the clients of one federation, or of several together."""

    everybody: Counter[Release] = field(default_factory=Counter[Release])
    """Releases that any client may have been in."""
    single: dict[str, Counter[Release]] = field(default_factory=dict[str, Counter[Release]])
    """Releases by the client that they are about."""

    def add(self, charge: Charge) -> None:
        """Count one charge."""
        if charge.clients is None:
            self.everybody[charge.release] += charge.count
            return
        for client in charge.clients:
            self.single.setdefault(client, Counter())[charge.release] += charge.count

    def plus(self, charges: Iterable[Charge]) -> Account:
        """Return a copy with more charges."""
        found = Account(Counter(self.everybody), {name: Counter(mine) for name, mine in self.single.items()})
        for charge in charges:
            found.add(charge)
        return found

    def worst(self) -> list[Spending]:
        """Return what was spent about the clients that may have been hit worst; the others are no worse off."""
        distinct = {frozenset(mine.items()) for mine in self.single.values()} or {frozenset[tuple[Release, int]]()}
        plain = all(release.exact for mine in distinct for release, _ in mine)
        if plain:
            # Plain releases add up as Σ k/z²: one client is the worst.
            distinct = {max(distinct, key=lambda mine: sum(count / release.noise**2 for release, count in mine))}
        return [self.everybody + Counter(dict(mine)) for mine in distinct]

    def epsilon(self, delta: float, *, coarse: bool = False) -> float:
        """Return the ε at δ that the worst-hit client has lost; `coarse` is faster and never too low."""
        return max(spent(spending, delta, coarse=coarse) for spending in self.worst())


def _first(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    return ": ".join([*map(str, first["loc"]), first["msg"]])


class Ledger:
    """The charges of a run, in memory and in their file; without a path, for tests, in memory only."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.charges: list[Charge] = []
        self._accounts: dict[str, Account] = {}
        self._bytes, self._hash = 0, hashlib.sha256()
        if path is not None and files.is_file(path, alone=True):
            for charge in self._read(path):
                self._count(charge)

    def charge(self, charges: Sequence[Charge]) -> None:
        """Write charges down; when this returns they are on the disk, and only then may noise be drawn."""
        text = "".join(charge.line() for charge in charges).encode()
        if self.path is not None:
            self._append(text)
        self._extend(text)
        for charge in charges:
            self._count(charge)

    def mark(self) -> Mark:
        """Return how far the ledger has come; what the chain of rounds holds of it."""
        return Mark(self._bytes, self._hash.hexdigest())

    def _extend(self, text: bytes) -> None:
        self._bytes += len(text)
        self._hash.update(text)

    def account(self, federation: str) -> Account:
        """Return what was released in one federation so far."""
        return self._accounts.get(federation, Account())

    def together(self) -> Account:
        """Return what was released in all federations: rules that run side by side are about the same clients."""
        return Account().plus(self.charges)

    def _count(self, charge: Charge) -> None:
        self.charges.append(charge)
        self._accounts.setdefault(charge.federation, Account()).add(charge)

    def _append(self, text: bytes) -> None:
        assert self.path is not None
        fresh = not files.is_file(self.path)
        try:
            with files.open_to_append(self.path) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if fresh:
                handle = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
        except OSError as error:
            raise UserError(
                f"{self.path}: the ledger cannot be written ({error.strerror}), so no noise is drawn; allowed: a disk "
                "with room, on which you may write"
            ) from error

    def _read(self, path: Path) -> list[Charge]:
        content = files.read_bytes(path)
        whole, _, cut = content.rpartition(b"\n")
        content = content[: len(content) - len(cut)]
        if cut:
            # The charge was not on the disk yet, so its noise was never drawn; a new line must not continue it.
            files.write(path, content)
        self._extend(content)
        found: list[Charge] = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                found.append(Charge.read(line.decode()))
            except ValueError as error:
                reason = printable(_first(error))
                raise UserError(
                    f"{path}, line {number}: is not a charge ({reason}); allowed: the ledger as the run wrote it"
                ) from None
        return found
