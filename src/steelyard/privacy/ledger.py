"""The ledger: every release of a run, on the disk before its noise is drawn.

A run that is killed may have used noise that its checkpoint does not know of; when it goes on, the rounds after the
checkpoint are run again with new noise, and both count. So the ledger is a journal of its own: one line of JSON for
each charge. A line that was cut by a power failure belongs to noise that was never drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from steelyard.base import files
from steelyard.base.errors import told_as
from steelyard.base.journal import Journal, Mark
from steelyard.privacy.accounting import Mechanism, Release, Sampling, Spending, spent
from steelyard.privacy.settings import Noise

FILE = files.LEDGER
"""The ledger's file in a run's folder."""


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
        fields = {name: value for name, value in vars(self).items() if name != "release"}
        return json.dumps(_Line(**fields, **vars(self.release)).model_dump(exclude_defaults=True))

    @classmethod
    def read(cls, line: bytes) -> Charge:
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

    def of(self, client: str) -> Spending:
        """Return what was spent about one client."""
        return self.everybody + self.single.get(client, Counter())

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


class Ledger:
    """The charges of a run, in memory and in their file; without a path, for tests, in memory only."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.charges: list[Charge] = []
        self._journal = None if path is None else Journal(path)
        self._accounts: dict[str, Account] = {}
        self._bytes, self._hash = 0, hashlib.sha256()
        if self._journal is not None:
            content = self._journal.content()
            self._extend(content)
            for charge in self._journal.read(Charge.read, content):
                self._count(charge)

    def charge(self, charges: Sequence[Charge]) -> None:
        """Write charges down; when this returns they are on the disk, and only then may noise be drawn."""
        lines = [charge.line() for charge in charges]
        if self._journal is not None:
            allowed = "a disk with room, on which you may write"
            with told_as(f"{self.path}: the ledger cannot be written, so no noise is drawn", allowed):
                self._journal.append(lines)
        self._extend("".join(f"{line}\n" for line in lines).encode())
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
