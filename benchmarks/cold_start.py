"""New items, ranked by what is known of them alone: VSM, KGFlex and what needs no learning, on items held out.

    python -m benchmarks.cold_start --out FOLDER --data books,yahoo --draws 5

A fifth of the items is drawn; every interaction with them is the test, all others are the training. A system trains on
the rest of the catalogue as if the drawn items did not exist yet, then ranks them, and only them, for each user. What a
collaborative system knows of an item is nothing here. The length of KGFlex' training is chosen on a draw of its own
(draw 0), which is not reported. Each cell is one file under FOLDER; those that are there are not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cold_start_data import Case, Draw, draw, prepared
from steelyard.base.measures import estimate, show_estimate
from steelyard.recommend.baselines.neighbours import Random, Vsm
from steelyard.recommend.clients import LocalRound
from steelyard.recommend.fpl import Learning
from steelyard.recommend.histories import Histories, Users
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.kgflex.clients import KgflexClients, KgflexParts, KgflexServer
from steelyard.recommend.kgflex.model import Knowledge
from steelyard.recommend.kgflex.model import scores as kgflex_scores
from steelyard.recommend.kgflex.selection import KgflexSettings
from steelyard.recommend.knowledge.features import ItemFeatures
from steelyard.recommend.metrics import NDCG, Floats, GroundTruth, HitRate, ItemCoverage, Scores, top
from steelyard.rounds.loop import one_round
from steelyard.rounds.state import Federation, Plan
from steelyard.weighing.rule import Rule, WeighingSettings

CUTOFF, FACTORS, SEED = 10, 10, 1
MOST = (100, 1000)
"""How many features of each hop a user of KGFlex keeps: as in the thesis, and nearly all."""


def judged(drawn: Draw, scores: Scores, block: int = 512) -> dict[str, float]:
    """Rank the new items for each user and return the metrics over users who took one of them."""
    lists: list[Codes] = []
    for start in range(0, drawn.truth.users, block):
        users = np.arange(start, min(start + block, drawn.truth.users))
        found = np.asarray(scores(users), dtype=np.float64)[:, drawn.new]
        lists.append(top(found, np.zeros(found.shape, dtype=bool), CUTOFF))
    view = drawn.truth.view(np.concatenate(lists), CUTOFF)
    return {"ndcg": NDCG()(view), "hit_rate": HitRate()(view), "coverage": ItemCoverage()(view) / len(drawn.new)}


def popular_features(drawn: Draw) -> Scores:
    """Score an item, for everyone alike, by the mean popularity of the old items that share each of its features."""
    old = np.zeros(len(drawn.train.items))
    old[drawn.old] = 1.0
    marks = drawn.features.matrix.astype(np.float64)
    taken = np.asarray(marks.T @ drawn.train.per_item()) / np.maximum(np.asarray(marks.T @ old), 1)
    scores = np.asarray(marks @ taken) / np.maximum(drawn.features.per_item(), 1)
    return lambda users: np.broadcast_to(scores, (len(users), len(scores)))


class Kgflex:
    """KGFlex on one draw, trained by the rounds of FPL with all users; epochs can be added one by one.

    Negatives are drawn from the old items alone, unless `unseen`: then new items are drawn like any other, as happens
    where they stand in the catalogue already.
    """

    def __init__(self, drawn: Draw, case: Case, most: int, threads: int, *, unseen: bool = False) -> None:
        rows = np.arange(len(drawn.train.items)) if unseen else drawn.old
        number = np.full(len(drawn.train.items), -1, dtype=np.int64)
        number[rows] = np.arange(len(rows))
        train = drawn.train
        known = Interactions(train.users, train.items[rows], train.user, number[train.item], train.rating)
        histories = Histories.of(known)
        there = ItemFeatures(drawn.features.matrix[rows], drawn.features.names, drawn.features.hops)
        users = Users(
            histories, GroundTruth.between(known, known), np.ones(histories.users), histories.items.astype(np.int64)
        )
        parts = KgflexParts(there, KgflexSettings(limits=(most, most), others=5.0))
        learning = Learning(case.rate, FACTORS)
        self.clients = KgflexClients(users, learning, LocalRound(case.triples), parts, threads=threads)
        self.server = KgflexServer(there.features, FACTORS)
        self.federation = Federation("EQ", "EQ", SEED, Rule(WeighingSettings(criteria=("EQ",))))
        self.states = {"EQ": self.federation.start(self.server)}
        self.plan = Plan(rounds=1 << 30, fraction=1.0, evaluate_every=1 << 29)
        self.rounds_per_epoch = max(1, round(histories.total / (histories.users * case.triples)))
        self.features, self.epochs = drawn.features, 0

    def train_to(self, epochs: int) -> None:
        """Go on to so many epochs."""
        for number in range(self.epochs * self.rounds_per_epoch + 1, epochs * self.rounds_per_epoch + 1):
            one_round([self.federation], self.states, self.clients, self.server, self.plan, number)
        self.epochs = epochs

    def scores(self, users: Codes) -> Floats:
        """Score all items, new ones too, by their features."""
        table = self.clients.table(self.states["EQ"].parameters)
        known = Knowledge(self.features, self.clients.knowledge(SEED).selection)
        return kgflex_scores(table, self.clients.views("EQ", SEED), known, users).astype(np.float64)


def chosen(case: Case, drawn: Draw, most: int, threads: int) -> dict[str, Any]:
    """Return the number of epochs that ranks the new items of a draw best, and all that were tried."""
    model = Kgflex(drawn, case, most, threads)
    tried: list[dict[str, Any]] = []
    for epochs in case.epochs:
        model.train_to(epochs)
        tried.append({"epochs": epochs, **judged(drawn, model.scores)})
    return {"epochs": max(tried, key=lambda each: each["ndcg"])["epochs"], "tried": tried}


def systems(case: Case, epochs: dict[int, int], threads: int) -> dict[str, Callable[[Draw], Scores]]:
    """Return the systems by name: each takes a draw and returns scores of all items."""

    def kgflex(most: int, unseen: bool = False) -> Callable[[Draw], Scores]:
        def make(drawn: Draw) -> Scores:
            model = Kgflex(drawn, case, most, threads, unseen=unseen)
            model.train_to(epochs[most])
            return model.scores

        return make

    few, many = MOST
    made: Sequence[Callable[[Draw], Scores]] = (
        lambda drawn: Random().scores(drawn.train, 1),
        popular_features,
        lambda drawn: Vsm().scores(drawn.train, 1, drawn.features),
        kgflex(few),
        kgflex(many),
        kgflex(few, unseen=True),
    )
    return dict(zip(names_of(), made, strict=True))


def names_of() -> tuple[str, ...]:
    """Return the names of the systems, in the order of the table."""
    few, many = MOST
    learned = (f"KGFlex, {few} features a hop", f"KGFlex, {many} features a hop")
    return ("random", "popular features", "VSM", *learned, f"KGFlex, {few}, new items as negatives")


def kept_or(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a file holds, or make it and write it."""
    if not path.is_file():
        begun = time.perf_counter()
        found = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**found, "seconds": round(time.perf_counter() - begun, 1)}), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def measure(
    name: str, out: Path, draws: Iterable[int], until: float, threads: int
) -> dict[str, list[dict[str, float]]]:
    """Compute every cell of one data set that is not there yet; none is begun after `until`."""
    case, data, features = prepared(name)
    first = draw(data, features, case, 0)
    epochs: dict[int, int] = {}
    for most in MOST:
        path = out / name / f"chosen-{most}.json"
        epochs[most] = kept_or(path, lambda most=most: chosen(case, first, most, threads))["epochs"]
    print(f"{name}: {data}; {features}; epochs of KGFlex by features a hop: {epochs}", flush=True)
    found: dict[str, list[dict[str, float]]] = {}
    for number in draws:
        drawn = draw(data, features, case, number)
        for system, make in systems(case, epochs, threads).items():
            path = out / name / f"{system.replace(', ', '-').replace(' ', '-')}-{number}.json"
            if path.is_file() or time.monotonic() < until:
                cell = kept_or(path, lambda make=make, drawn=drawn: judged(drawn, make(drawn)))
                found.setdefault(system, []).append(cell)
    return found


def rows(found: dict[str, list[dict[str, float]]]) -> Iterable[str]:
    """Yield the lines of a table: mean ± half the 95 % interval over the draws."""
    yield "| | nDCG@10 | HR@10 | share of the new items shown |"
    yield "|---|---|---|---|"
    for system, cells in found.items():
        told = [
            show_estimate(estimate([cell[metric] for cell in cells]), 4) for metric in ("ndcg", "hit_rate", "coverage")
        ]
        yield f"| {system} | {' | '.join(told)} |"


def main() -> None:
    """Measure the data sets asked for and print a table of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", default="books,yahoo")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument(
        "--only", type=int, help="one of the draws, beside processes with others; 0: choose epochs only"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1000.0, help="begin no cell after so many")
    asked = parser.parse_args()
    until = time.monotonic() + 60 * asked.minutes
    draws = range(1, asked.draws + 1)
    if asked.only is not None:
        draws = [number for number in draws if number == asked.only]
    for name in asked.data.split(","):
        for line in rows(measure(name, asked.out, draws, until, asked.threads)):
            print(line)


if __name__ == "__main__":
    main()
