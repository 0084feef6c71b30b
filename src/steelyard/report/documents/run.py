"""A run: `steelyard run --format json`, `Result.summary`. Weighing again: `steelyard weigh RUN --format json`."""

from __future__ import annotations

from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.report.documents.shared import Chain, OnRows, OnSample, Promise, SingleClient


class FlawedShares(TypedDict):
    """The share of all weight, of all samples and of all updates that flawed clients had."""

    weight: float
    samples: float
    updates: float


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
