"""Parts that several documents have."""

from __future__ import annotations

from typing import Any, Literal, Required

from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.base.measures import EstimateJson as EstimateJson

Scalar = str | int | float | bool
"""One value of a field, as a sweep gives it."""


VegaLite = dict[str, Any]
"""A figure as Vega and Vega-Lite define it: their document, not one of ours."""


Metrics = dict[str, dict[str, object]]
"""Metrics of lists by cutoff and by name, as `recommend.evaluate.figures` returns them; each metric names itself."""


class OnRows(TypedDict):
    """On how many rows a score was measured, its 95 % interval from these rows alone, and whether they are too few.

    `low` and `high` are NaN, in JSON null, where the rows give none. Too few rows rank nobody.
    """

    rows: int
    low: float
    high: float
    too_few: bool


class OnSample(TypedDict):
    """How many clients, drawn of how many, a score was measured on, and its 95 % interval for all of them."""

    clients: int
    of: int
    low: float
    high: float


class RecordedLoss(TypedDict, total=False):
    """How a rule's loss adapts."""

    adapt: str


class RecordedRule(TypedDict, total=False):
    """What readers ask of a rule's settings as a run stored them; `runs.database` has checked them."""

    criteria: Required[list[str]]
    score: str
    power: float | None
    priority: str | None
    normalise: str
    loss: RecordedLoss | None
    adjust: object
    fit: object
    trained_by: str


class Chain(TypedDict):
    """The head of a run's chain, the round that it follows, and the first problem, empty where there is none."""

    head: str
    round: int
    problem: str


class SingleClient(TypedDict):
    """How many of a rule's rounds weighed one client only."""

    rule: str
    seed: int
    rounds: int
    of: int


class Promise(TypedDict):
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
