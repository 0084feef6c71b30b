"""What is measured for the papers' tables, by name: of rules from their curves, of recommenders from users' lists.

| of rules | |
|---|---|
| `score`, `server_accuracy`, `server_macro_f1` | in the last round; `score:5` in the fifth, `score:all` in each |
| `rounds:0.9:0.5` | rounds until half of the devices are at the target; never is the last round |
| `gain:0.9` | how many fewer than the first rule, on average over nine shares of the devices |
| `apart` | the score of the clients that choose no order (`online-apart`) |
| `of:fact(age=60..)`, `others:fact(age=60..)` | the accuracy on test rows where a fact is met, and elsewhere |

Of lists: any metric at a length, `ndcg@10`; `shown:250`: how often each of the most shown items is, `sent:1000`: how
often each of the most updated items is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.data import load, share_out
from steelyard.data.dataset import Population
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.recommend import RecommendDescription
from steelyard.privacy.noise import SystemSource, laplace
from steelyard.recommend.baselines import baseline, recommend
from steelyard.recommend.interactions import Codes
from steelyard.recommend.knowledge.loading import load_features
from steelyard.recommend.metrics import measure
from steelyard.recommend.run_data import RunData
from steelyard.report.curves import Curve, read_curves
from steelyard.report.recommender import open_run
from steelyard.report.statistics import rounds_to_shares
from steelyard.rounds.plan import RoundSettings
from steelyard.runs.history import History
from steelyard.studies.paper_table import Entry, Value
from steelyard.weighing.fact import read_fact
from steelyard.weighing.order import chooses

SHARES = [share / 10 for share in range(1, 10)]
EPSILON, RELEASES, AT = 0.5, 50_000, np.linspace(80.0, 125.0, 451).round(1)
"""Of the Laplace mechanism: releases of a count, and where its density is drawn."""
LONGEST = 10
"""Items in a list; no table of the papers shows more."""

Measured = tuple[str, float, float]
"""A measure's name, its place, its value."""


def of_rules(folder: Path, measures: Sequence[str]) -> Iterator[tuple[str, int, str, float, float]]:
    """Yield rule, seed, measure, place and value of everything that a run of rules measured."""
    history, settings = History(folder), read_experiment(folder).rounds
    curves = read_curves(history)
    first = {curve.seed: curve for curve in reversed(curves) if curve.rule == curves[0].rule}
    for curve in curves:
        for name in measures:
            for place, value in _of_curve(curve, name, settings, first[curve.seed], history):
                yield curve.rule, curve.seed, name, place, value


def _of_curve(
    curve: Curve, name: str, settings: RoundSettings, first: Curve, history: History
) -> list[tuple[float, float]]:
    kind, *rest = name.split(":", 2)
    if kind in ("rounds", "gain"):
        shares = [float(rest[1])] if kind == "rounds" else SHARES
        needed, least = (_reached(each, settings, float(rest[0]), shares) for each in (curve, first))
        return [(0.0, float(np.mean(needed if kind == "rounds" else least - needed)))]
    if kind in ("of", "others"):
        if curve.hits is None:
            return []
        chosen = curve.hits[_rows_with(history.folder, curve, name.partition(":")[2]) == (kind == "of")]
        return [(0.0, float(chosen.mean()))] if 0 < len(chosen) < len(curve.hits) else []
    if kind == "apart":
        reporting = np.array([not chooses(client) for client in curve.devices])
        return [(0.0, float(np.average(curve.scores[-1][reporting], weights=curve.rows[reporting])))]
    series = curve.overall if kind == "score" else curve.server.get(kind.removeprefix("server_"), [])
    if rest == ["all"] or not len(series):
        return [(float(place), float(value)) for place, value in zip(curve.rounds, series, strict=False)]
    return [(0.0, float(series[int(rest[0]) - 1 if rest else -1]))]


def _reached(curve: Curve, settings: RoundSettings, target: float, shares: Sequence[float]) -> np.ndarray:
    found = rounds_to_shares(curve.rounds, curve.scores, target, shares, above=settings.above)
    return np.array([settings.count if reached is None else reached for reached in found], dtype=np.float64)


def _rows_with(folder: Path, curve: Curve, criterion: str) -> np.ndarray:
    """Return for each test row of the clients whether its own marks meet a fact."""
    population, fact = _population(str(folder), curve.seed), read_fact(criterion)
    rows = np.concatenate([population.by_name[client].test for client in curve.devices])
    marks = {name: values[rows].tolist() for name, values in population.dataset.marks.items()}
    if fact is None or fact.name not in marks:
        return np.zeros(len(rows), dtype=bool)
    return np.array([(fact.among({fact.name: value}) or 0.0) > 0 for value in marks[fact.name]])


@lru_cache(maxsize=1)
def _population(folder: str, seed: int) -> Population:
    experiment = read_experiment(Path(folder))
    assert isinstance(experiment, LearningDescription)
    return share_out(load(experiment.data), experiment.partition, seed)


def of_lists(folder: Path, measures: Sequence[str]) -> Iterator[Measured]:
    """Yield the measures of a recommender's run."""
    finished = open_run(folder)
    yield from of_users(finished.run_data, finished.lists(LONGEST)[0], measures)
    for name in measures:
        if name.startswith("sent:"):
            yield from _most(name, finished.clients.changes_sent(finished.seed, finished.round))


def of_baseline(
    experiment: RecommendDescription, kind: str, settings: Mapping[str, Any], seed: int, measures: Sequence[str]
) -> Iterator[Measured]:
    """Train a baseline on the rows of an experiment and yield its measures."""
    chosen, data, knowledge = baseline(kind, settings), experiment.run_data(), experiment.knowledge
    known = load_features(knowledge, data.data.items) if chosen.of_features and knowledge is not None else None
    return of_users(data, recommend(chosen, data.split.train, LONGEST, seed, known)[0], measures)


def of_users(data: RunData, lists: Codes, measures: Sequence[str]) -> Iterator[Measured]:
    """Yield the measures of lists."""
    for name in measures:
        kind, _, length = name.partition("@")
        view = data.users.truth.view(lists, int(length or LONGEST))
        if length:
            yield name, 0.0, float(measure(view)[kind])
        elif name.startswith("shown:"):
            yield from _most(name, view.times_shown)


def _most(name: str, counts: Codes) -> Iterator[Measured]:
    """Yield the largest counts with their ranks."""
    for rank, count in enumerate(np.sort(counts)[::-1][: int(name.partition(":")[2])], 1):
        yield name, float(rank), float(count)


def of_releases(entry: Entry) -> Iterator[Value]:
    """Release two counts by the Laplace mechanism, ε = 0.5 (thesis, Figures 3.2 and 3.3): shares, densities, ratio."""
    for system in entry.of(""):
        other, change = (float(system.given["all"][name]) for name in ("count", "change"))
        densities = {
            count: np.exp(-np.abs(AT - count) * EPSILON / change) * EPSILON / change / 2 for count in (100.0, other)
        }
        ratio = densities[100.0] / densities[other]
        yield Value("", system.name, 1, "ratio", 0.0, float(max(ratio.max(), 1 / ratio.min())))
        for count, density in densities.items():
            released = laplace(np.full(RELEASES, count), change, EPSILON, SystemSource())
            shares = np.histogram(released, np.arange(79.5, 126.0))[0] / RELEASES
            for kind, places, values in (("density", AT, density), ("releases", np.arange(80, 126), shares)):
                for at, value in zip(places.tolist(), values.tolist(), strict=True):
                    yield Value(system.name, f"{count:g}, {kind}", 1, "share", at, value)
