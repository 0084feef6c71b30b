"""What a run recorded, as one curve per rule and seed, and the figures that are computed from it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.base.measures import ERROR, MEASURES, TASKS, Measure, Z, measure_of
from steelyard.messages.updates import Counts, Floats
from steelyard.rounds.plan import at_target, devices_needed
from steelyard.runs.database import unreadable
from steelyard.runs.history import START, History, at_once


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


_COLUMNS = (
    *("rule", "seed", "round", "accuracy", "priority", "tests"),
    *("server_accuracy", "server_macro_f1", "server_metrics", "simulated"),
)
"""What a curve is made of: in a long run every further column takes time."""


@at_once
def read_curves(history: History) -> list[Curve]:
    """Return every federation of a run as a curve, rules in the order in which the run lists them."""
    recorded: dict[tuple[str, int], list[dict[str, Any]]] = {}
    first: dict[tuple[str, int], float] = {}
    frame: Any = history.rounds[list(_COLUMNS)]  # pandas is typed in part only
    for row in cast("list[dict[str, Any]]", frame.to_dict("records")):
        key = (str(row["rule"]), int(row["seed"]))
        if row["round"] > 0:
            recorded.setdefault(key, []).append(row)
        else:
            first[key] = row["accuracy"]
    keys = [(str(each["rule"]), int(each["seed"])) for each in history.federations.to_dict("records")]
    return [_curve(history, *key, recorded.get(key, []), first) for key in keys]


def _curve(
    history: History, rule: str, seed: int, mine: Sequence[dict[str, Any]], first: Mapping[tuple[str, int], float]
) -> Curve:
    """Return one federation as a curve; `first` has the accuracy of every first model, by rule and seed."""
    rounds, scores = history.scores(rule, seed)
    measured = [row["accuracy"] for row in mine if not _missing(row["accuracy"])]
    if len(measured) != len(rounds):
        counts = f"{len(measured)} rounds with an accuracy and {len(rounds)} with evaluations"
        raise unreadable(history.folder, f"{rule}, seed {seed}: {counts}")
    if not measured and (rule, seed) in history.ended:
        # Its model exploded before any was tested: the first model is the only one that it has.
        rounds, scores = history.scores(rule, seed, START)
        measured = [first[rule, seed]] if len(rounds) else []
    server, by_class = _server(mine)
    if not measured and server:
        # No client tests anything: what the server finds is all there is.
        rounds = np.array([row["round"] for row in mine], np.int64)
        main = next(task.figure for task in TASKS.values() if task.figure in server)
        sign = -1.0 if measure_of(main).less_is_better else 1.0
        measured = [sign * value for value in server[main]]
        scores = np.zeros((len(rounds), 0))
    tested = history.tested(rule, seed, int(rounds[-1]) - 1) if scores.size else None
    overall = np.array(measured, dtype=np.float64)
    kept = Counter(str(row["priority"]) for row in mine if not _missing(row["priority"]))
    tests = sum(int(row["tests"]) for row in mine)
    names, rows = ((), np.zeros(0, np.int64)) if tested is None else (tested.clients, tested.samples)
    errors = None if tested is None else tested.metrics.get(ERROR)
    return Curve(
        *(rule, seed, rounds, scores, overall, tests, kept, server, history.hits(rule, seed), by_class, rows, names),
        *(errors, _ends(mine, rounds)),
    )


def _ends(rows: Sequence[Mapping[str, Any]], rounds: NDArray[np.int64]) -> Floats | None:
    """Return when each of these rounds ended on the devices' clock; None where there is none."""
    if not rows or any(_missing(row["simulated"]) for row in rows):
        return None
    ends = np.cumsum([0.0, *(row["simulated"] for row in rows)])
    return ends[np.searchsorted([int(row["round"]) for row in rows], rounds, side="right")]


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _server(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[float]], dict[str, list[list[float]]]]:
    """Return what the server found of each round's model, whole and class by class; empty unless it tested them all."""
    found: dict[str, list[float]] = {}
    by_class: dict[str, list[list[float]]] = {}
    for row in rows:
        text = row["server_metrics"]
        # What the server's step says of itself is no test of the model.
        metrics = {k: v for k, v in json.loads(text).items() if k not in OF_A_STEP} if isinstance(text, str) else {}
        if not metrics:
            return {}, {}
        if "f1" in metrics:
            metrics |= {"accuracy": row["server_accuracy"], "macro_f1": row["server_macro_f1"]}
        for name, value in metrics.items():
            if isinstance(value, list):
                by_class.setdefault(name, []).append([float(one) for one in cast("list[float]", value)])
            else:
                found.setdefault(name, []).append(float(value))
    return found, by_class


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
    return {"rows": counted, "low": found[0], "high": found[1], "too_few": few}


def on_sample(scores: Floats, rows: Counts, of: int) -> OnSample:
    """Return the interval of the score over all test rows, where some clients were drawn (scores, rows) `of` so many.

    The score is a ratio of two sums over clients: its variance is that of each client's part in it (linearised), less
    the share of the clients that were drawn.
    """
    count, total = len(scores), float(rows.sum())
    mean = float(scores @ rows / total)
    parts = rows * (scores - mean) * count / total
    half = Z * math.sqrt((1 - count / of) * float(parts @ parts) / (count * max(count - 1, 1)))
    return {"clients": count, "of": of, "low": mean - half, "high": mean + half}


def jain(scores: Floats) -> float:
    """Jain's fairness index (Σx)² / (n Σx²): 1 when all devices do equally well, 1/n when only one does."""
    squares = float(np.square(scores).sum())
    return float(scores.sum()) ** 2 / (len(scores) * squares) if squares else float("nan")
