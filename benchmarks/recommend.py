"""An epoch of pFPL+ against an epoch of implicit's BPR: MovieLens 1M, a million triples, 20 factors, 2 threads each.

    python -m benchmarks.recommend --format json
    python -m benchmarks.recommend --modes        # an epoch of each mode of FPL

Ours is a whole round of the loop (draw, local passes, admit, weigh, combine) without evaluation; theirs is the time
that `implicit` itself reports per iteration. The two take turns, so that a busy machine slows both alike; medians are
compared. Memory is the peak of a process of our own that does nothing but read the data and run three epochs. The last
line is one JSON document: {"ratio": {"implicit": ours / theirs}, ...}.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import typer

from benchmarks.kit import Format, alone, machine, peak_mb, start, timed
from steelyard.data.files import find
from steelyard.recommend.clients import LocalRound, RecommendClients, RecommendServer
from steelyard.recommend.fpl import MODES, Learning
from steelyard.recommend.histories import Histories, Users
from steelyard.recommend.interactions import Interactions, read
from steelyard.recommend.metrics import GroundTruth
from steelyard.rounds.loop import one_round
from steelyard.rounds.state import Federation, Plan, RoundState
from steelyard.weighing.rule import Rule, WeighingSettings

FACTORS, RATE, THREADS, DATA = 20, 0.05, 2, "movielens_1m/ratings.dat.gz"


def data(rows: int | None = None) -> Interactions:
    """Read all ratings of MovieLens 1M as positives, or the first of them."""
    table = read(find(None, "MovieLens 1M: ratings.dat.gz", DATA))
    return table if rows is None else table.select(np.arange(len(table)) < rows)


class Ours:
    """A mode of FPL on all users, through the round loop."""

    def __init__(self, table: Interactions, mode: str = "pFPL+") -> None:
        histories = Histories.of(table)
        truth = GroundTruth.between(table, table)
        schedule = MODES[mode].schedule(histories.users, histories.total)
        self.epoch_triples = schedule.triples * schedule.users * schedule.rounds_per_epoch
        # Rounds of one user are bundled, an epoch to a round of the loop, as an experiment does it.
        local = LocalRound(schedule.triples, sequential=schedule.rounds_per_epoch if schedule.users == 1 else None)
        self.rounds = schedule.rounds_per_epoch if local.sequential is None else 1
        users = Users(histories, truth, np.ones(histories.users), histories.items.astype(np.int64))
        self.clients = RecommendClients(users, Learning(RATE, FACTORS), local, threads=THREADS)
        self.server = RecommendServer(histories.catalogue, FACTORS)
        self.federation = Federation("EQ", "EQ", 1, Rule(WeighingSettings(criteria=("EQ",))))
        self.states: dict[str, RoundState] = {"EQ": self.federation.start(self.server)}
        self.plan = Plan(rounds=1 << 30, fraction=1.0, evaluate_every=1 << 29)
        self.round = 0

    def epoch(self) -> float:
        """Do one epoch and return its seconds."""
        begun = time.perf_counter()
        for _ in range(self.rounds):
            self.round += 1
            one_round([self.federation], self.states, self.clients, self.server, self.plan, self.round)
        return time.perf_counter() - begun


class Theirs:
    """implicit's BPR, one iteration at a time on the same model."""

    def __init__(self, table: Interactions) -> None:
        from implicit.bpr import BayesianPersonalizedRanking

        from steelyard.recommend.baselines.neighbours import matrix

        self.matrix = matrix(table)
        self.model = BayesianPersonalizedRanking(
            factors=FACTORS, learning_rate=RATE, iterations=1, num_threads=THREADS, random_state=1, use_gpu=False
        )

    def epoch(self) -> float:
        """Fit one more iteration and return the seconds that the library reports for it."""
        seen: list[float] = []
        self.model.fit(self.matrix, show_progress=False, callback=lambda *told: seen.append(float(told[1])))
        return seen[-1]


def measure(repeats: int, rows: int | None) -> dict[str, Any]:
    """Time both in turns, after one epoch each to warm up."""
    memory = alone("recommend", "--memory", *([] if rows is None else ["--rows", rows]))
    table = data(rows)
    ours, theirs = Ours(table), Theirs(table)
    ours.epoch(), theirs.epoch()
    mine: list[float] = []
    peer: list[float] = []
    for _ in range(repeats):
        mine.append(ours.epoch())
        peer.append(theirs.epoch())
    own, other = statistics.median(mine), statistics.median(peer)
    return {
        "ratio": {"implicit": round(own / other, 3)},
        "seconds": {"steelyard": round(own, 4), "implicit": round(other, 4)},
        "memory_mb": round(memory),
        "triples": ours.epoch_triples,
        "interactions": len(table),
        "factors": FACTORS,
        "threads": THREADS,
        "repeats": repeats,
        "machine": machine(),
    }


def modes(table: Interactions) -> Iterator[dict[str, Any]]:
    """Time one epoch of each mode, after one to warm up; processor time beside, for busy machines."""
    for mode in MODES:
        ours = Ours(table, mode)
        ours.epoch()
        took = timed(ours.epoch)
        found = {"mode": mode, "seconds": round(took.clock, 3), "processor": round(took.processor, 3)}
        yield found | {"triples": ours.epoch_triples, "machine": machine()}


def main(
    format: Format = "text",
    repeats: int = 7,
    memory: Annotated[bool, typer.Option("--memory", help="run three epochs of ours and print the peak in MB")] = False,
    each_mode: Annotated[bool, typer.Option("--modes", help="time an epoch of each mode of FPL instead")] = False,
    rows: Annotated[int | None, typer.Option(help="only so many ratings")] = None,
) -> None:
    """Measure and print."""
    if each_mode:
        for found in modes(data(rows)):
            print(json.dumps(found), flush=True)
        return
    if memory:
        ours = Ours(data(rows))
        for _ in range(3):
            ours.epoch()
        print(json.dumps(peak_mb()))
        return
    found = measure(repeats, rows)
    if format == "text":
        print(
            f"steelyard {found['seconds']['steelyard']:.3f} s, implicit {found['seconds']['implicit']:.3f} s per epoch"
        )
        print(f"ratio {found['ratio']['implicit']:.2f} (at most 3), peak memory {found['memory_mb']} MB (under 1000)")
    print(json.dumps(found))


if __name__ == "__main__":
    start(main)
