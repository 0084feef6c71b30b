# ruff: noqa: RUF012  pydantic gives each model its own copy of a default
"""What a run notes of itself beside its rounds: `RunFacts`, the one form in which facts are written and read."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, StringConstraints

from steelyard.base.documents import Document

RUN = "federation_run"
"""Under this name a run across machines notes what its nodes know it by."""

Seed = Annotated[str, StringConstraints(pattern=r"^\d{1,19}$")]
"""A seed, as JSON names it."""


class Promise(Document):
    """What a run promised to its clients, and what it has spent."""

    model: Literal["central", "local"]
    delta: float
    budget: float | None
    accountant: str
    clip: float
    noise: dict[str, float]
    epsilon: dict[str, float]
    together: float
    neighbours: str
    charges: int
    ended: dict[str, int]
    notes: list[str]


class RunFacts(Document):
    """What a run's database says of the run itself; what was not noted is as its default.

    Write some with `Store.note(RunFacts(status="finished"))`: only those that are given are written. Read them as
    `History.facts`.
    """

    status: str = "unknown"
    """running, finished or stopped."""
    stopped: str = ""
    """Why it stopped."""
    seeds: list[int] = []
    rounds: int | None = None
    """How many are planned."""
    part: str | None = None
    """Which part of a comparison it is, as 3/8."""
    in_memory: bool = False
    """Whether its data were handed over from Python."""
    writer: str | None = None
    """The process that writes it."""
    tracked_as: str | None = None
    experiment_text: str | None = None
    """Its experiment file as it was written."""
    code_files: dict[str, str] = {}
    """Checksums of its code, by file."""
    data: dict[Seed, dict[str, str]] = {}
    """Fingerprints of its data, part by part."""
    accepted: list[str] = []
    """What was no longer as it began, and was accepted."""
    clients: str = ""
    """Where its clients are: local, flower, or recorded."""
    engine_choice: str = ""
    notes: str = ""
    engine_notes: str = ""
    measure: str = "accuracy"
    """What a client's score is."""
    measured_by: dict[str, str] = {}
    """Who measures each criterion."""
    trust: dict[str, dict[str, str]] = {}
    """How far each criterion of each rule can be trusted."""
    personal: list[str] = []
    """Rules whose clients keep models of their own."""
    report_rows: dict[Seed, int] = {}
    tested: dict[Seed, Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]] = {}
    """How many of how many clients are tested, where a sample is."""
    flaws: dict[Seed, dict[str, list[str]]] = {}
    labels: dict[Seed, dict[str, list[int]]] = {}
    """Training rows of each class, by client."""
    privacy: Promise | None = None
    federation_run: str | None = None
    """How the nodes of a federation know it."""
    salt: str | None = None
    """What hides clients' digests, where a ledger is kept."""
    withdrawn_from: dict[str, str | int] | None = None
    """The run that it repeats without a client."""
    withdrawals: list[dict[str, str]] = []
    """The runs that repeat it without a client."""
    others: dict[str, str] = {}
    """Versions, devices and what else clients say of how they compute: shown, and compared as text."""

    @classmethod
    def read(cls, texts: Mapping[str, str]) -> Self:
        """Read facts as the database holds them; a `ValueError` says which is not of its type."""
        given: dict[str, Any] = {name: _value(name, text) for name, text in texts.items() if name in cls.model_fields}
        given["others"] = {name: text for name, text in texts.items() if name not in cls.model_fields}
        return cls.model_validate(given, strict=True)

    def also(self, later: RunFacts) -> Self:
        """Return these facts and those that are given in `later`, which hold where both say something."""
        given = {name: getattr(later, name) for name in later.model_fields_set}
        return self.model_copy(update=given | {"others": {**self.others, **later.others}})

    @property
    def versions(self) -> dict[str, str]:
        """The versions of what computed, by name."""
        return {
            name.removeprefix("version_"): text for name, text in self.others.items() if name.startswith("version_")
        }

    def texts(self) -> dict[str, str]:
        """Return the facts that were given as the database holds them: texts as they are, all else as JSON."""
        given = self.model_dump(exclude_unset=True, exclude={"others"})
        found = {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
        return {name: text for name, text in found.items() if given[name] is not None} | self.others


def fact(db: sqlite3.Connection, key: str) -> str | None:
    """Return what a run notes under a name, as its text; None where it notes nothing. For those who read few facts."""
    row = db.execute("SELECT value FROM info WHERE key = ?", (key,)).fetchone()
    return None if row is None else row[0]


_TEXTS: tuple[object, ...] = (str, str | None)


def _value(name: str, text: str) -> Any:
    if RunFacts.model_fields[name].annotation in _TEXTS:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} holds no JSON ({error})") from None
