"""Documents about several runs: `steelyard sweep` and `attack` with `--format json`, `SweepResult.table`."""

from __future__ import annotations

from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.report.documents.comparison import Recommendation
from steelyard.report.documents.shared import EstimateJson, Scalar


class SweepRow(TypedDict):
    """One point of a sweep: the values of its fields, its rule, and the measure over its seeds."""

    point: int
    run: str
    values: dict[str, Scalar]
    rule: str
    seeds: list[int]
    value: EstimateJson
    unreached: int
    diverged: bool


class SweepTest(TypedDict):
    """What the best point did on the test set."""

    run: str
    rule: str
    value: EstimateJson
    unreached: int


class SweepDocument(TypedDict):
    """A sweep: every point that is done, the best first."""

    folder: str
    measure: str
    measured: str
    less_is_better: bool
    validation: float
    seeds: list[int]
    fields: list[str]
    rows: list[SweepRow]
    best: SweepRow | None
    left: list[str]
    diverged: list[str]
    test: SweepTest | None
    problems: list[str]


class Outcome(TypedDict):
    """A rule under one attack: accuracy per seed, the weight of hostile clients, how often a backdoor worked, and in
    what share of its rounds an honest client was under alarm (None without a detector, the criterion TR).
    """

    accuracy: list[float]
    weight: float | None
    largest: float | None
    backdoor: list[float] | None
    false_alarms: float | None


class AttackRow(TypedDict):
    """A rule under one attack, over its seeds; `lost` is what it lost against the run without hostile clients."""

    rule: str
    accuracy: EstimateJson
    lost: EstimateJson | None
    weight: float | None
    largest: float | None
    backdoor: EstimateJson | None
    false_alarms: float | None


class AttackBlock(TypedDict):
    """All rules under one attack."""

    attack: str
    rules: list[AttackRow]


class Attacks(TypedDict):
    """The outcomes of several attacks; "clean" among them is what is lost from."""

    recommendation: Recommendation | None
    fraction: float
    flawed_clients: list[str]
    attacks: list[AttackBlock]
