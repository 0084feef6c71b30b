"""What the scripts of reports and pages read."""

from __future__ import annotations

from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.report.documents.shared import OnRows, VegaLite


class ClientCard(TypedDict):
    """One client under one rule: its totals, its course over the rounds, its flaws, why it was left out."""

    name: str
    share: float
    asked: int
    samples: float | None
    score: float | None
    score_on: OnRows | None
    failures: list[tuple[int, str]]
    rounds: list[int]
    weight: list[float | None]
    criteria: list[list[float | None]]
    tested: list[int]
    scores: list[float | None]
    flaws: list[str]
    interest: float


class ClientCards(TypedDict):
    """The clients of one rule, and the figure that each of them fills."""

    clients: list[ClientCard]
    criteria: list[str]
    last: int
    note: str
    template: VegaLite | None


class NamedClient(TypedDict):
    """A client and what is wrong with it."""

    name: str
    flaws: list[str]


class RawRound(TypedDict):
    """The raw criteria of one round's updates, and the weights that they were given."""

    round: int
    clients: list[int]
    raw: list[list[float]]
    weights: list[float]


class RawCriteria(TypedDict):
    """The updates of one rule, to be weighed again in a browser."""

    criteria: list[str]
    order: list[int]
    normalise: str
    clients: list[NamedClient]
    rounds: list[RawRound]
    note: str


class Themes(TypedDict):
    """How figures look, by day and by night."""

    light: VegaLite
    dark: VegaLite


class ReportData(TypedDict):
    """Everything that the scripts of a report read."""

    main: str
    measure: str
    percent: bool
    direction: str
    themes: Themes
    figures: dict[str, VegaLite]
    parts: dict[str, dict[str, VegaLite]]
    empty: dict[str, str]
    clients: dict[str, ClientCards]
    reweigh: dict[str, RawCriteria]
