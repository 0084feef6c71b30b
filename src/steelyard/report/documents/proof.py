"""Proof: `steelyard verify RUN --format json`, `steelyard record RUN --out record.json`."""

from __future__ import annotations

from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.contributions.document import Contributions
from steelyard.report.documents.shared import RecordedRule


class FoundJson(TypedDict):
    """One thing that is not as it was written, or cannot be checked."""

    what: str
    round: int | None
    client: str | None


class VerificationJson(TypedDict):
    """Whether a run's folder is what its run wrote."""

    run: str
    verdict: str
    head: str
    round: int
    changed: list[FoundJson]
    unchecked: list[FoundJson]
    checked: dict[str, str]


class RecordedSite(TypedDict):
    """What a run knows of one client: training rows, rows by class, flaws, rounds, mean weight."""

    client: str
    rows: int | None
    labels: list[int]
    flaws: list[str]
    rounds: int
    weight: float | None


class Record(TypedDict):
    """A run to hand over; what it does not know it says in words."""

    name: str
    purpose: str
    rule: str
    algorithm: str
    why: list[str]
    settings: RecordedRule
    beside: list[str]
    rounds: int
    measure: str
    result: float | None
    sites: list[RecordedSite]
    contributions: Contributions | str
    privacy: list[str]
    attacks: list[str]
    notes: str
    versions: dict[str, str]
    hashes: dict[str, str]
    verified: dict[str, str]
    not_covered: str
