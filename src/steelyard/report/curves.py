"""What a run recorded, read at once (`read_run`): its rules, a curve for each rule and seed, its flaws, its chain."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from steelyard.base.documents import Document
from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.measures import ERROR, TASKS, measure_of
from steelyard.messages.updates import Counts, Floats
from steelyard.runs.columns import Cohorts
from steelyard.runs.database import unreadable
from steelyard.runs.history import START, History, at_once


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


class HeavyClient(Document):
    """A client that carried much weight."""

    client: str
    share: float
    rounds: int
    samples: int


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
    heaviest: tuple[HeavyClient, ...] = ()
    """The clients with most weight."""
    zero: Mapping[str, int] = field(default_factory=dict[str, int])
    """In how many rounds a criterion was 0 for every client, so that it told none apart."""


OF_A_STEP = ("product_error", "factor_error")
"""Figures beside the server's tests of a round that are about the server's step: what weighing adapters lost."""
HEAVIEST = 5
"""Clients that are named as those with most weight."""
SUMS = ("cohort", "answered", "tests", "seconds", "cpu", "gpu", "up", "down")
"""Columns of `rounds` that are added up."""
_COLUMNS = (
    *("rule", "seed", "round", "accuracy", "priority", "tried", "server_accuracy", "server_macro_f1", "server_metrics"),
    *("simulated", "zero_criteria", *SUMS),
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
        led = next(iter(server)) if {"brier", "r2"} & {*server} else None
        main = led or next(task.figure for task in TASKS.values() if task.figure in server)
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
        zero=Counter(name for text in rows["zero_criteria"] for name in json.loads(text)),
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
    """A run's last head, the round that it follows, its final hash, and the first problem ("" where there is none)."""

    head: str
    round: int
    closing: str
    problem: str


class SingleClient(Document):
    """How many of a rule's rounds weighted one client only."""

    rule: str
    seed: int
    rounds: int
    of: int


class FailingClient(Document):
    """A client that failed in at least half of the rounds in which it was selected, rules and seeds together."""

    client: str
    failed: int
    selected: int
    reason: str
    """Of its last failure."""


def chain_of(history: History) -> Chain:
    """Return how a run's chain stands, as it was last found while nobody has written to the run."""
    found = history.shown_chain
    return Chain(head=found.head, round=found.round, closing=found.closing, problem=found.problem)


def single_client_rounds(history: History) -> tuple[SingleClient, ...]:
    """Return each rule and seed with rounds that weighted one client; a sound run has none.

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


def failing_clients(history: History, answered: Mapping[str, int]) -> tuple[FailingClient, ...]:
    """Return the clients that failed at least as often as they `answered`, those that failed most often first."""
    failures: Any = history.failures_after()
    counts = failures.groupby("client", sort=True)["failure"].agg(["size", "last"])
    found = [
        FailingClient(
            client=str(client),
            failed=int(row["size"]),
            selected=int(row["size"]) + answered.get(str(client), 0),
            reason=str(row["last"]),
        )
        for client, row in counts.iterrows()
        if int(row["size"]) >= answered.get(str(client), 0)
    ]
    return tuple(sorted(found, key=lambda one: -one.failed))


def flaws_of(history: History, seed: int) -> dict[str, list[str]]:
    """Return what is wrong with each flawed client of a seed, in plain words; empty for a run without flaws."""
    found: dict[str, list[str]] = {}
    for row in history.flaws.to_dict("records"):
        if int(row["seed"]) == seed:
            found.setdefault(str(row["client"]), []).append(str(row["flaw"]))
    return found


# What a result is computed from, read at once.


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a run recorded: its curves, and what a reader must know beside figures."""

    history: History
    baseline: str
    curves: Sequence[Curve]
    """Those of the baseline first; seeds rise."""
    clients: int
    flaws: Mapping[int, Mapping[str, Sequence[str]]]
    """By seed and client, in words."""
    chain: Chain
    weighed_one: tuple[SingleClient, ...]
    failing: tuple[FailingClient, ...]
    server_rows: str
    """What the server's reporting rows are called."""


@at_once
def read_run(history: History, baseline: str | None = None) -> Recorded:
    """Read a run; `baseline` is the rule that the others are held against, if it is not to be found."""
    if not len(history.federations):
        raise unreadable(history.folder, "it names no rule")
    chosen = find_baseline(history, baseline)
    curves = sorted(read_curves(history), key=lambda curve: (curve.rule != chosen, curve.seed))
    flaws = {seed: flaws_of(history, seed) for seed in dict.fromkeys(curve.seed for curve in curves)}
    asked: set[str] = set()
    answered: Counter[str] = Counter()
    for place, curve in enumerate(curves):
        cohorts = history.cohorts(curve.rule, curve.seed)
        asked |= {*(curve.devices or cohorts.clients)}
        rounds = np.bincount(cohorts.client, minlength=len(cohorts.clients)).tolist()
        answered.update(dict(zip(cohorts.clients, rounds, strict=True)))
        flawed = _flawed(cohorts, set(flaws[curve.seed]))
        curves[place] = replace(curve, flawed=flawed, heaviest=_heaviest(cohorts))
    single, failing = single_client_rounds(history), failing_clients(history, answered)
    rows = servers_rows(history)
    return Recorded(history, chosen, curves, len(asked), flaws, chain_of(history), single, failing, rows)


def find_baseline(history: History, wanted: str | None) -> str:
    """Return the rule that the others are held against: the one asked for, else FedAvg, else the first."""
    rules = {
        str(row["rule"]): RecordedRule.model_validate_json(row["settings"])
        for row in history.federations.to_dict("records")
    }
    if wanted is not None:
        if wanted not in rules:
            raise UserError(f"--baseline: got '{wanted}'{nearest(wanted, rules)}; allowed: {listed(rules)}")
        return wanted
    return next((name for name, settings in rules.items() if settings.fedavg), next(iter(rules)))


def servers_rows(history: History) -> str:
    """Return what the server's reporting rows are called: "the server's 46 test samples", or "429 clean" ones.

    They are known to be clean where the run itself made clients flawed: the server's rows are as the source has them.
    """
    counts = sorted(set(history.facts.report_rows.values()))
    number = "" if not counts else f"{counts[0]:,} " if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} "
    return f"the server's {number}{'clean ' if len(history.flaws) else ''}test samples"


def _heaviest(cohorts: Cohorts) -> tuple[HeavyClient, ...]:
    """Return the clients with most weight, the heaviest first."""
    weighed = ~np.isnan(cohorts.weight)
    client, weight = cohorts.client[weighed], cohorts.weight[weighed]
    totals = np.bincount(client, weight, minlength=len(cohorts.clients))
    rounds = np.bincount(client, minlength=len(cohorts.clients))
    samples = np.zeros(len(cohorts.clients), np.int64)
    np.maximum.at(samples, client, cohorts.samples[weighed])
    whole = float(totals.sum()) or 1.0
    # Names are in ascending order: of two with the same weight the first comes first.
    ranked = [index for index in np.argsort(-totals, kind="stable") if rounds[index]][:HEAVIEST]
    return tuple(
        HeavyClient(
            client=cohorts.clients[index],
            share=float(totals[index]) / whole,
            rounds=int(rounds[index]),
            samples=int(samples[index]),
        )
        for index in ranked
    )


def _flawed(cohorts: Cohorts, flawed: set[str]) -> dict[str, float]:
    """Return the share of all weight, of all samples and of all updates that flawed clients had; empty without any."""
    weighed = ~np.isnan(cohorts.weight)
    if not flawed or not weighed.any():
        return {}
    theirs = np.isin(cohorts.client, [at for at, name in enumerate(cohorts.clients) if name in flawed])[weighed]
    weight, samples = cohorts.weight[weighed], cohorts.samples[weighed]
    return {
        "weight": float(weight[theirs].sum() / (weight.sum() or 1.0)),
        "samples": float(samples[theirs].sum() / (samples.sum() or 1.0)),
        "updates": float(theirs.mean()),
    }
