"""What a run recorded, as one curve per rule and seed, and the figures that are computed from it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from steelyard.base.measures import ERROR, MEASURES, TASKS, Measure, Z, measure_of
from steelyard.base.settings import Document
from steelyard.messages.updates import Counts, Floats
from steelyard.rounds.plan import RoundSettings, at_target, devices_needed
from steelyard.runs.database import unreadable
from steelyard.runs.history import START, History, at_once


class OnRows(Document):
    """On how many rows a score was measured, its 95 % interval from these rows alone, and whether they are too few.

    The interval is NaN where the rows give none. Too few rows rank nobody.
    """

    rows: int
    low: float
    high: float
    too_few: bool


class OnSample(Document):
    """How many clients, drawn of how many, a score was measured on, and its 95 % interval for all of them."""

    clients: int
    of: int
    low: float
    high: float


class Exploded(Document):
    """In which round a rule's model exploded, and why."""

    round: int
    reason: str


class RecordedLoss(BaseModel):
    """How a rule's loss adapts."""

    model_config = ConfigDict(frozen=True)
    adapt: str = "none"


class RecordedRule(BaseModel):
    """What readers ask of a rule's settings as a run stored them; `runs.database` has checked them."""

    model_config = ConfigDict(frozen=True)
    criteria: tuple[str, ...]
    score: str = ""
    power: float | None = None
    priority: str | None = None
    normalise: str = "share"
    loss: RecordedLoss | None = None
    adjust: Any = None
    fit: Any = None
    trained_by: str = "clients"

    @property
    def asks_clients(self) -> bool:
        """Whether the rule asks clients at all; the control "server-only" does not."""
        return self.trained_by == "clients"

    @property
    def fedavg(self) -> bool:
        """Whether it is FedAvg: dataset size alone, neither fitted, adapted nor sharpened."""
        sharpened = self.score == "power" and self.power not in (None, 1)
        adapts = self.loss is not None and self.loss.adapt != "none"
        plain = not (sharpened or adapts or self.fit) and self.normalise != "rank"
        return self.criteria == ("DS",) and plain and self.asks_clients


@dataclass(frozen=True, eq=False)
class Curve:
    """What one rule did with one seed."""

    rule: str
    seed: int
    rounds: NDArray[np.int64]
    scores: Floats
    """[rounds, devices]: local accuracy, or another score for which more is better."""
    overall: Floats
    """[rounds]: over all test samples."""
    tests: int
    """Testing rounds of the whole run."""
    orders: Mapping[str, int]
    """How many rounds kept which priority order."""
    server: Mapping[str, Sequence[float]]
    """Figures of each round's model on the server's reporting rows, by name."""
    hits: NDArray[np.bool_] | None = None
    """Right or wrong for every test sample in the last round."""
    by_class: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict[str, Sequence[Sequence[float]]])
    """Figures of each round and class on the server's reporting rows, by name: [rounds][classes]."""
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """[devices]: how many test rows each has; of a recommender one for each user."""
    devices: tuple[str, ...] = ()
    """Their names."""
    errors: Floats | None = None
    """[devices]: the standard error of each one's last score, where the run recorded it."""
    seconds: Floats | None = None
    """[rounds]: when each of them ended on the devices' clock; None without one."""
    settings: RecordedRule = field(default_factory=lambda: RecordedRule(criteria=()))
    algorithm: str = "fedavg"
    ended: Exploded | None = None
    tried: Mapping[str, int] = field(default_factory=dict[str, int])
    """How often each priority order was tested."""
    last_order: str | None = None
    played: int = 0
    """The newest round, tested or not."""
    sums: Mapping[str, float] = field(default_factory=dict[str, float])
    """What all rounds took: columns of `rounds` added up; NaN where none is known."""
    last_test: Mapping[str, float] = field(default_factory=dict[str, float])
    """Figures of the server's last test, also where it did not test every round."""
    step: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the server's last step said of itself."""
    flawed: Mapping[str, float] = field(default_factory=dict[str, float])
    """The share of all weight, of all samples and of all updates that flawed clients had; empty without any."""


SUMS = ("cohort", "answered", "tests", "seconds", "cpu", "gpu", "up", "down")
"""Columns of `rounds` that are added up."""
_COLUMNS = (
    *("rule", "seed", "round", "accuracy", "priority", "tried", "server_accuracy", "server_macro_f1", "server_metrics"),
    *("simulated", *SUMS),
)
"""What a curve is made of: in a long run every further column takes time."""


@at_once
def read_curves(history: History) -> list[Curve]:
    """Return every federation of a run as a curve, rules in the order in which the run lists them."""
    frame: Any = history.rounds[list(_COLUMNS)]  # pandas is typed in part only
    parts = dict(iter(frame.groupby(["rule", "seed"], sort=False)))
    return [
        _curve(history, row, parts.get((row["rule"], row["seed"]), frame.iloc[:0]))
        for row in history.federations.to_dict("records")
    ]


def _curve(history: History, federation: Mapping[Any, Any], frame: Any) -> Curve:
    """Return one federation as a curve: `frame` has its rounds, with that of its first model."""
    rule, seed = str(federation["rule"]), int(federation["seed"])
    rows = frame[frame["round"] > 0]
    ended = history.ended.get((rule, seed))
    rounds, scores = history.scores(rule, seed)
    measured = rows["accuracy"].dropna().to_numpy(np.float64)
    if len(measured) != len(rounds):
        counts = f"{len(measured)} rounds with an accuracy and {len(rounds)} with evaluations"
        raise unreadable(history.folder, f"{rule}, seed {seed}: {counts}")
    if not len(measured) and ended:
        # Its model exploded before any was tested: the first model is the only one that it has.
        rounds, scores = history.scores(rule, seed, START)
        measured = frame[frame["round"] <= 0]["accuracy"].to_numpy(np.float64)[: len(rounds)]
    tests = _server_tests(rows)
    last = next((test for test in reversed(tests) if test), {})
    # Curves on the server's rows are of runs whose every round it tested.
    series = {name: [test[name] for test in tests] for name in last if all(name in test for test in tests)}
    by_class = {name: values for name, values in series.items() if isinstance(last[name], list)}
    server = {name: [float(value) for value in values] for name, values in series.items() if name not in by_class}
    if not len(measured) and server:
        # No client tests anything: what the server finds is all there is.
        rounds = rows["round"].to_numpy(np.int64)
        main = next(task.figure for task in TASKS.values() if task.figure in server)
        measured = np.array(server[main]) * (-1.0 if measure_of(main).less_is_better else 1.0)
        scores = np.zeros((len(rounds), 0))
    tested = history.tested(rule, seed, int(rounds[-1]) - 1) if scores.size else None
    kept = rows["priority"].dropna().astype(str)
    steps = [step for text in rows["server_metrics"].dropna() if (step := _of_step(json.loads(text)))]
    return Curve(
        *(rule, seed, rounds, scores, measured, int(rows["tests"].sum()), Counter(kept), server),
        hits=history.hits(rule, seed),
        by_class=by_class,
        rows=np.zeros(0, np.int64) if tested is None else tested.samples,
        devices=() if tested is None else tested.clients,
        errors=None if tested is None else tested.metrics.get(ERROR),
        seconds=_ends(rows, rounds),
        settings=RecordedRule.model_validate_json(federation["settings"]),
        algorithm=str(federation["algorithm"]),
        ended=Exploded(round=ended[0], reason=ended[1]) if ended and ended[1] else None,
        tried=Counter(order for text in rows["tried"] for order, _ in json.loads(text)),
        last_order=None if kept.empty else kept.iloc[-1],
        played=int(rows["round"].max()) if len(rows) else 0,
        sums=rows[list(SUMS)].astype(float).sum(min_count=1).to_dict(),
        last_test={name: value for name, value in last.items() if not isinstance(value, list)},
        step=steps[-1] if steps else {},
    )


def _ends(rows: Any, rounds: Counts) -> Floats | None:
    """Return when each of these rounds ended on the devices' clock; None where there is none."""
    if rows.empty or rows["simulated"].isna().any():
        return None
    ends = np.concatenate([[0.0], rows["simulated"].to_numpy(np.float64).cumsum()])
    return ends[np.searchsorted(rows["round"].to_numpy(), rounds, side="right")]


def _of_step(found: Mapping[str, float]) -> dict[str, float]:
    """Return what the server's step says of itself, which is no test of the model."""
    return {name: found[name] for name in OF_A_STEP if name in found}


def _server_tests(rows: Any) -> list[dict[str, Any]]:
    """Return what the server found of each round's model, whole and class by class; empty where it did not test it."""
    tests: list[dict[str, Any]] = []
    columns = (rows[name] for name in ("server_metrics", "server_accuracy", "server_macro_f1"))
    for text, accuracy, macro in zip(*columns, strict=True):
        found: dict[str, Any] = json.loads(text) if isinstance(text, str) else {}
        test = {name: value for name, value in found.items() if name not in OF_A_STEP}
        tests.append(test | ({"accuracy": accuracy, "macro_f1": macro} if "f1" in test else {}))
    return tests


# What a reader must know beside figures: the chain, lone clients, flawed ones.


class Chain(Document):
    """The head of a run's chain, the round that it follows, and the first problem, empty where there is none."""

    head: str
    round: int
    problem: str


class SingleClient(Document):
    """How many of a rule's rounds weighed one client only."""

    rule: str
    seed: int
    rounds: int
    of: int


def chain_of(history: History) -> Chain:
    """Return the head of a run's chain, the round that it follows, and the first problem ("" where there is none)."""
    found = history.shown_chain
    return Chain(head=found.head, round=found.round, problem=found.problem)


def single_client_rounds(history: History) -> tuple[SingleClient, ...]:
    """Return each rule and seed with rounds that weighed one client; a sound run has none.

    The weight of a single client is all there is, so that such a round says nothing of a rule.
    """
    frame: Any = history.rounds
    frame = frame[frame["round"] > 0]
    frame = frame.assign(single=(frame["answered"] == 1) & (frame["kept_old"] == 0))
    return tuple(
        SingleClient(rule=str(rule), seed=int(seed), rounds=int(rows["single"].sum()), of=len(rows))
        for (rule, seed), rows in frame.groupby(["rule", "seed"], sort=False)
        if rows["single"].any()
    )


def flaws_of(history: History, seed: int) -> dict[str, list[str]]:
    """Return what is wrong with each flawed client of a seed, in plain words; empty for a run without flaws."""
    found: dict[str, list[str]] = {}
    for row in history.flaws.to_dict("records"):
        if int(row["seed"]) == seed:
            found.setdefault(str(row["client"]), []).append(str(row["flaw"]))
    return found


# Rounds to target, the worst tenth and the rows behind them, from local scores alone.


OF_A_STEP = ("product_error", "factor_error")
"""Figures beside the server's tests of a round that are about the server's step: what weighing adapters lost."""


def rounds_to_target(
    rounds: NDArray[np.int64], scores: Floats, target: float, share: float, *, above: bool = False
) -> int | None:
    """Return the first round at which at least ceil(share · n) devices have a score of at least the target.

    `scores` is [rounds, devices]. None when no round reaches it (SPEC §6). `above` asks for more than the target.
    """
    return rounds_to_shares(rounds, scores, target, [share], above=above)[0]


def rounds_to_shares(
    rounds: NDArray[np.int64], scores: Floats, target: float, shares: Sequence[float], *, above: bool = False
) -> list[int | None]:
    """Return `rounds_to_target` for several shares; the devices at the target are counted once."""
    counts = at_target(scores, target, above=above)
    needed = [max(1, devices_needed(share, scores.shape[-1])) for share in shares]
    found = [np.flatnonzero(counts >= devices) for devices in needed]
    return [int(rounds[enough[0]]) if len(enough) else None for enough in found]


def worst_tenth(scores: Floats) -> float:
    """Return the mean score of the worst 10 % of the devices (at least one); use it to see who is left behind."""
    return float(scores[worst_devices(scores)].mean()) if len(scores) else float("nan")


def worst_score(scores: Floats) -> float:
    """Return the score of the worst device; use it where each client is somebody, such as a hospital."""
    return float(scores.min()) if len(scores) else float("nan")


def worst_devices(scores: Floats) -> NDArray[np.int64]:
    """Return the positions of the worst tenth of the devices, the worst first."""
    return np.argsort(scores, kind="stable")[: math.ceil(0.1 * len(scores) - 1e-9)]


def on_rows(
    scores: Sequence[Floats],
    rows: Sequence[Counts],
    measure: Measure = MEASURES["accuracy"],
    errors: Sequence[Floats | None] = (),
) -> OnRows | None:
    """Return on how many rows the mean score of some devices rests, and its interval; one array for each seed.

    Devices count alike, so that k devices with n rows each carry as much as k²/Σ(1/n) rows of one. Seeds test on the
    same rows, or on others of the same source: they do not multiply them. `errors` are the scores' standard errors,
    for a measure that is no share of rows; None where neither gives an interval.
    """
    carried = float(np.mean([len(mine) ** 2 / float((1 / np.maximum(mine, 1)).sum()) for mine in rows]))
    known = [each for each in errors if each is not None]
    error = math.sqrt(np.mean([float(np.square(each).sum()) / len(each) ** 2 for each in known])) if known else None
    found = measure.interval(float(np.mean([mine.mean() for mine in scores])), carried, error)
    if found is None:
        return None
    few = measure.too_few(carried, *found)
    counted = round(float(np.mean([mine.sum() for mine in rows])))
    return OnRows(rows=counted, low=found[0], high=found[1], too_few=few)


def on_sample(scores: Floats, rows: Counts, of: int) -> OnSample:
    """Return the interval of the score over all test rows, where some clients were drawn (scores, rows) `of` so many.

    The score is a ratio of two sums over clients: its variance is that of each client's part in it (linearised), less
    the share of the clients that were drawn.
    """
    count, total = len(scores), float(rows.sum())
    mean = float(scores @ rows / total)
    parts = rows * (scores - mean) * count / total
    half = Z * math.sqrt((1 - count / of) * float(parts @ parts) / (count * max(count - 1, 1)))
    return OnSample(clients=count, of=of, low=mean - half, high=mean + half)


def jain(scores: Floats) -> float:
    """Jain's fairness index (Σx)² / (n Σx²): 1 when all devices do equally well, 1/n when only one does."""
    squares = float(np.square(scores).sum())
    return float(scores.sum()) ** 2 / (len(scores) * squares) if squares else float("nan")


# Figures of merit: what is computed of every curve. Tables, documents, files and tests of rules follow from this list.


@dataclass(frozen=True)
class FigureOfMerit:
    """A figure of merit: its name in documents, what it is of a curve, and how and where tables show it."""

    name: str
    heading: str
    of: Callable[[Curve, RoundSettings], float]
    """Its value; NaN where a curve has none."""
    measure: Measure | None = None
    """How it is written; None: as the clients' scores are."""
    tables: tuple[Literal["main", "clients", "server"], ...] = ()
    """Which tables have a column of it."""
    tested: str = ""
    """What a paired test of it compares, in words; empty where none is made."""


COUNT, INDEX = Measure("count"), Measure("index", low=0.0, high=1.0)
SHARE = Measure("share", low=0.0, high=1.0, percent=True)
SERVER = ("accuracy", "macro_f1", "mape", "micro_f1", "c_index", "dice", "mae", "rmse")
"""What the server's tests of a model may find, as `measures.MEASURES` names it."""
_TESTED = {
    "accuracy": "accuracy on the server's test set",
    "accuracy_late": "mean accuracy of the last rounds on the server's test set",
    "macro_f1": "macro F1 on the server's test set",
    "macro_f1_late": "mean macro F1 of the last rounds on the server's test set",
    "mape": "error on the server's test set",
    "c_index": "C-index on the server's test set",
    "dice": "mean Dice on the server's test set",
}
"""What paired tests of these compare."""


def _last(values: Sequence[float] | Floats) -> float:
    return float(values[-1]) if len(values) else math.nan


def _late(values: Sequence[float] | Floats, settings: RoundSettings) -> float:
    return float(np.mean(values[-settings.last :])) if len(values) else math.nan


def _of_clients(figure: Callable[[Floats], float], curve: Curve, settings: RoundSettings) -> float:
    """Return a figure of the clients' scores after the last round."""
    return float(figure(curve.scores[-1])) if curve.scores.size else math.nan


def _of_server(name: str, curve: Curve, settings: RoundSettings) -> float:
    """Return a figure of the server's last test of a model, also where it did not test every round."""
    return curve.last_test.get(name, _last(curve.server.get(name, ())))


def _late_of_server(name: str, curve: Curve, settings: RoundSettings) -> float:
    return _late(curve.server.get(name, ()), settings)


def _reached(curve: Curve, settings: RoundSettings) -> float:
    found = rounds_to_target(curve.rounds, curve.scores, settings.target, settings.share, above=settings.above)
    return math.nan if found is None else float(found)


def _sum(column: str, curve: Curve, settings: RoundSettings) -> float:
    return curve.sums.get(column, math.nan)


def _flawed(of: str, curve: Curve, settings: RoundSettings) -> float:
    return curve.flawed.get(of, math.nan)


FIGURES = (
    FigureOfMerit("flawed_weight", "weight of flawed", partial(_flawed, "weight"), SHARE, ("main",)),
    FigureOfMerit("flawed_samples", "samples of flawed", partial(_flawed, "samples"), SHARE),
    FigureOfMerit("flawed_updates", "updates of flawed", partial(_flawed, "updates"), SHARE),
    FigureOfMerit(
        *("final", "final", lambda curve, settings: _last(curve.overall)),
        tables=("main", "clients"),
        tested="score after the last round",
    ),
    FigureOfMerit(
        *("late", "last rounds", lambda curve, settings: _late(curve.overall, settings)),
        tested="mean score of the last rounds",
    ),
    FigureOfMerit(
        "best", "best round", lambda curve, settings: float(max(curve.overall, default=math.nan)), None, ("clients",)
    ),
    FigureOfMerit("worst", "worst client", partial(_of_clients, worst_score), None, ("clients",)),
    FigureOfMerit("worst_tenth", "worst tenth", partial(_of_clients, worst_tenth), None, ("main", "clients")),
    FigureOfMerit(
        "p10", "10th perc.", partial(_of_clients, lambda scores: np.percentile(scores, 10)), None, ("clients",)
    ),
    FigureOfMerit(
        "p90", "90th perc.", partial(_of_clients, lambda scores: np.percentile(scores, 90)), None, ("clients",)
    ),
    FigureOfMerit("spread", "std. dev.", partial(_of_clients, np.std), None, ("clients",)),
    FigureOfMerit("jain", "Jain", partial(_of_clients, jain), INDEX, ("clients",)),
    *(
        figure
        for name in SERVER
        for figure in (
            FigureOfMerit(
                *(f"server_{name}", MEASURES[name].heading, partial(_of_server, name), MEASURES[name]),
                tables=("server",),
                tested=_TESTED.get(name, ""),
            ),
            FigureOfMerit(
                *(f"server_{name}_late", f"{MEASURES[name].heading}, last rounds"),
                partial(_late_of_server, name),
                MEASURES[name],
                tested=_TESTED.get(f"{name}_late", ""),
            ),
        )
    ),
    FigureOfMerit("testing_rounds", "testing rounds", lambda curve, settings: float(curve.tests), COUNT, ("main",)),
    FigureOfMerit("rounds_to_target", "rounds to target", _reached, COUNT),
    FigureOfMerit(
        "left_out",
        "left out",
        lambda curve, settings: curve.sums.get("cohort", 0) - curve.sums.get("answered", 0),
        COUNT,
    ),
    FigureOfMerit("seconds", "seconds", partial(_sum, "seconds"), COUNT),
    FigureOfMerit("cpu_seconds", "seconds of processors", partial(_sum, "cpu"), COUNT),
    FigureOfMerit("gpu_seconds", "seconds of a GPU", partial(_sum, "gpu"), COUNT),
    FigureOfMerit("bytes_up", "bytes from clients", partial(_sum, "up"), COUNT),
    FigureOfMerit("bytes_down", "bytes to clients", partial(_sum, "down"), COUNT),
    *(
        FigureOfMerit(
            name, name.replace("_", " "), lambda curve, settings, name=name: curve.step.get(name, math.nan), SHARE
        )
        for name in OF_A_STEP
    ),
)
"""Every figure, in the order of tables."""


def figures_of(curves: Sequence[Curve], settings: RoundSettings) -> dict[str, list[float]]:
    """Return every figure of some curves, a value for each of them."""
    return {figure.name: [figure.of(curve, settings) for curve in curves] for figure in FIGURES}
