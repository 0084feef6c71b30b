"""The documents that commands print as JSON and reports are made from: their keys and types, in one place.

They are typed dictionaries because the JSON is the public form: what stands here is what `--format json` prints.
`cli.printing.print_json` writes them, and docs/reference/runs.md lists their keys.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, Required

from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.base.measures import EstimateJson as EstimateJson
from steelyard.report.curves import OnRows as OnRows
from steelyard.report.curves import OnSample as OnSample
from steelyard.report.curves import RecordedRule as RecordedRule
from steelyard.report.decide import Verdict as Verdict
from steelyard.report.notices import Chain as Chain
from steelyard.report.notices import FlawedShares as FlawedShares
from steelyard.report.notices import SingleClient as SingleClient
from steelyard.runs.facts import Promise as Promise

Scalar = str | int | float | bool
"""One value of a field, as a sweep gives it."""


VegaLite = dict[str, Any]
"""A figure as Vega and Vega-Lite define it: their document, not one of ours."""


Metrics = dict[str, dict[str, object]]
"""Metrics of lists by cutoff and by name, as `recommend.evaluate.figures` returns them; each metric names itself."""


# A run: `steelyard run --format json`, `Result.summary`.


class Orders(TypedDict):
    """Priority orders of a rule: that of the last round, how many rounds kept each, how often each was tested."""

    last: str | None
    kept: dict[str, int]
    tried: dict[str, int]


class Exploded(TypedDict):
    """In which round a rule's model exploded, and why."""

    round: int
    reason: str


class CriterionUsed(TypedDict):
    """A criterion of a rule, who measured it, and how far it can be trusted."""

    name: str
    measured_by: str
    trust: str


class HeavyClient(TypedDict):
    """A client that carried much weight."""

    client: str
    share: float
    rounds: int
    samples: int


class ServerTest(TypedDict, total=False):
    """The last model on the server's rows: of classes accuracy and F1, of numbers the errors."""

    accuracy: float | None
    macro_f1: float
    f1: list[float]
    mape: float
    c_index: float
    micro_f1: float
    dice: float
    mae: float
    rmse: float


class Lost(TypedDict):
    """What the last weighing of low-rank adapters lost, as a share of the size of Σ wᵢBᵢAᵢ."""

    product: float
    """By cutting it to the rank of the adapters."""
    factors: float
    """What averages of A and of B would have lost."""


class Cost(TypedDict):
    """What the rounds of one rule took, without tests on clients; None: not known."""

    cpu_seconds: float | None
    """Of this process; rules that ran side by side share evenly."""
    gpu_seconds: float | None
    """During which a GPU was held."""
    bytes_up: float | None
    """Of models and vectors that clients sent, or would have sent."""
    bytes_down: float | None
    """Of models and vectors that they were sent."""


class RuleSummary(TypedDict):
    """The final figures of one rule with one seed."""

    algorithm: str
    rule: str
    seed: int
    rounds: int
    accuracy: float | None
    accuracy_on: OnSample | None
    worst_tenth: float | None
    worst_tenth_on: OnRows | None
    p10: float | None
    p90: float | None
    rounds_to_target: int | None
    testing_rounds: int
    orders: Orders
    server: ServerTest
    lost: Lost | None
    ended: Exploded | None
    left_out: int
    seconds: float
    cost: Cost
    heaviest_clients: list[HeavyClient]
    criteria: list[CriterionUsed]
    fedavg: bool
    asks_clients: bool
    adapts_loss: bool
    flawed: FlawedShares | None
    flawed_weight: float | None


class TargetReached(TypedDict):
    """The first round in which a share of the clients reached a target; None where none did."""

    rule: str
    seed: int
    target: float
    share: float
    round: int | None


class Summary(TypedDict):
    """A run: its final figures, rule by rule and seed by seed."""

    run: str
    status: str
    notes: str
    weighed_one: list[SingleClient]
    privacy: Promise | None
    chain: Chain
    measure: str
    target: float
    share: float
    server_rows: str
    sentence: str
    flaws: dict[str, dict[str, list[str]]]
    rules: list[RuleSummary]
    rounds_to_target: list[TargetReached]


# Weighing again: `steelyard weigh RUN --format json`.


class ReweighedClient(TypedDict):
    """A client's share of all weight, as recorded and as another rule would have given it."""

    client: str
    recorded: float
    weight: float
    rounds: int
    flaws: list[str]


class FlawedWeights(TypedDict):
    """What flawed clients have together of all weight."""

    recorded: float
    weight: float


class Reweighed(TypedDict):
    """A run's updates weighed by another rule."""

    run: str
    updates_of: str
    seed: int
    rule: str
    rounds: int
    note: str
    clients: list[ReweighedClient]
    flawed: FlawedWeights | None


# The rules of one run: `steelyard table` and `compare` with `--format json`.


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


class RuleVerdict(RuleTests, total=False):
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
    verdicts: list[RuleVerdict]
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

    recommendation: Verdict
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


# Several runs: `steelyard sweep` and `attack` with `--format json`, `SweepResult.table`.


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
    ended: int
    """In how many seeds its model exploded."""
    fedavg: bool
    """Whether it weighs by dataset size alone, whatever it is called."""


class AttackRow(TypedDict):
    """A rule under one attack, over its seeds; `lost` is what it lost against the run without hostile clients."""

    rule: str
    accuracy: EstimateJson
    lost: EstimateJson | None
    weight: float | None
    largest: float | None
    backdoor: EstimateJson | None
    false_alarms: float | None
    ended: int
    fedavg: bool


class AttackBlock(TypedDict):
    """All rules under one attack."""

    attack: str
    rules: list[AttackRow]


class Attacks(TypedDict):
    """The outcomes of several attacks; "clean" among them is what is lost from."""

    recommendation: Verdict | None
    fraction: float
    flawed_clients: list[str]
    attacks: list[AttackBlock]
