"""Documents about the federations of one run: `steelyard table` and `compare` with `--format json`."""

from __future__ import annotations

from typing import Literal, NotRequired, Required

from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.report.documents.run import Exploded
from steelyard.report.documents.shared import Chain, EstimateJson, OnRows, SingleClient


class TestedRule(TypedDict):
    """A rule in the measure that decides: its value, and the paired test against the baseline."""

    rule: str
    value: EstimateJson
    difference: EstimateJson | None
    ahead: int
    p: float | None
    p_holm: float | None
    verdict: str
    detectable: float | None
    left_out: str


class Recommendation(TypedDict):
    """Which rule to use: `rule` is the baseline where it is kept, and None where nothing is recommended.

    `detectable` is the least difference that would have been seen, `seeds_needed` how many seeds a small one needs.
    """

    rule: str | None
    sentence: str
    measure: str
    where: str
    less_is_better: bool
    baseline: str
    seeds: int
    detectable: float | None
    seeds_needed: int | None
    rules: list[TestedRule]


class TargetCell(EstimateJson):
    """Rounds to a target, or rounds gained, for one share of the devices."""

    share: float
    unreached: int


class TargetRow(TypedDict):
    """One rule's rounds (the baseline) or gains (the others) for a target."""

    rule: str
    kind: Literal["rounds", "gain"]
    cells: list[TargetCell]
    average: EstimateJson
    printed: EstimateJson


class TargetTable(TypedDict):
    """One target's part of the papers' tables."""

    target: float
    shares: list[float]
    rows: list[TargetRow]


class PairedTest(EstimateJson):
    """A rule against the baseline in one measure: the difference, p before and after Holm's correction."""

    p: float | None
    p_holm: float | None
    verdict: str


class RuleTests(TypedDict, total=False):
    """What a rule is held against the baseline by; a measure that a run does not have is left out."""

    gain: PairedTest
    final: PairedTest
    late: PairedTest
    server_accuracy: PairedTest
    server_accuracy_late: PairedTest
    server_macro_f1: PairedTest
    server_macro_f1_late: PairedTest
    server_mape: PairedTest
    server_c_index: PairedTest
    server_dice: PairedTest


class Verdict(RuleTests, total=False):
    """A rule against the baseline, measure by measure and in words."""

    rule: Required[str]
    sentence: Required[str]


class DeviceRow(TypedDict):
    """How a rule's last model serves the devices."""

    rule: str
    final: EstimateJson
    best: EstimateJson
    worst: EstimateJson
    worst_tenth: EstimateJson
    worst_tenth_on: OnRows | None
    p10: EstimateJson
    p90: EstimateJson
    spread: EstimateJson
    jain: EstimateJson


class ClientScore(OnRows):
    """The score of a rule's last model at one client: the mean over the seeds, on the rows of one of them."""

    rule: str
    client: str
    score: float


ServerFigure = Literal["accuracy", "macro_f1", "micro_f1", "mae", "mape", "rmse", "c_index", "dice"]
"""What the server's tests of a model may find, as `measures.MEASURES` names it."""


class ServerRow(TypedDict, total=False):
    """A rule's last model on the server's reporting rows."""

    rule: Required[str]
    accuracy: EstimateJson
    macro_f1: EstimateJson
    mape: EstimateJson
    micro_f1: EstimateJson
    c_index: EstimateJson
    dice: EstimateJson
    mae: EstimateJson
    rmse: EstimateJson


class ServerCurve(TypedDict, total=False):
    """Every figure of the server's tests, per seed and round."""

    rule: Required[str]
    accuracy: list[list[float]]
    macro_f1: list[list[float]]
    mape: list[list[float]]
    micro_f1: list[list[float]]
    c_index: list[list[float]]
    dice: list[list[float]]
    mae: list[list[float]]
    rmse: list[list[float]]


class ClassCurve(TypedDict):
    """F1 of single classes on the server's rows: per seed, round and class."""

    rule: str
    f1: NotRequired[list[list[list[float]]]]


class TestingRow(TypedDict):
    """What online adjustment cost a rule, and which orders it kept."""

    rule: str
    testing_rounds: EstimateJson
    orders_kept: dict[str, int]


class RightWrong(TypedDict):
    """Test samples that the baseline and a rule get right or wrong in the last round, summed over seeds."""

    rule: str
    both_wrong: int
    only_rule_right: int
    only_baseline_right: int
    both_right: int


class ScoreCurve(TypedDict):
    """The overall score round by round: each seed's, their mean and its interval."""

    rule: str
    rounds: list[int]
    seconds: NotRequired[list[list[float]]]
    """Of each seed: when each round ended on the devices' clock; only in runs with one."""
    values: list[list[float]]
    mean: list[float]
    low: list[float]
    high: list[float]


class FlawedRow(TypedDict):
    """The share of all weight that flawed clients got under a rule."""

    rule: str
    weight: EstimateJson


class EndedRow(Exploded):
    """A rule and seed that ended because its model exploded."""

    rule: str
    seed: int


class RuleTables(TypedDict):
    """All tables of a comparison; a pure function of the curves of its rules."""

    baseline: str
    rules: list[str]
    seeds: list[int]
    confidence: float
    rounds_to_target: list[TargetTable]
    verdicts: list[Verdict]
    devices: list[DeviceRow]
    clients: list[ClientScore]
    server: list[ServerRow]
    testing: list[TestingRow]
    right_wrong: list[RightWrong]
    server_curves: list[ServerCurve]
    class_curves: list[ClassCurve]
    curves: list[ScoreCurve]


class Comparison(RuleTables):
    """A run's rules, compared."""

    recommendation: Recommendation
    measure: str
    run: str
    status: str
    chain: Chain
    algorithms: dict[str, str]
    personal: list[str]
    """The rules whose clients tested models of their own; all figures of devices are then of these models."""
    rounds: int
    limit: int
    last: int
    reach: str
    weighed_one: list[SingleClient]
    flawed: list[FlawedRow]
    ended: list[EndedRow]
    left_out: dict[str, str]
    """What `--rules all` asked for and could not run, with the reason."""
