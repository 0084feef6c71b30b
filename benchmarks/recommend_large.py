"""Recommenders at the size of MovieLens 20M: an epoch of FPL, its memory, and implicit's BPR at equal quality.

    python -m benchmarks.recommend_large                       # 138,493 users, 26,744 items, 20 million interactions
    python -m benchmarks.recommend_large --users 300 --items 200 --rows 5000 --epochs 2 --quiet

The interactions are made here: users of fifty tastes, items by Zipf's law. A fifth of each user's items is held out.
Both systems take turns, an epoch each, and nDCG@10 on a sample of users is computed after each. "Equal quality" is the
best nDCG of the worse of the two, less a hundredth: what counts is the time that each has trained when it first gets
there, on the clock and of the processor. That is its epochs times the median of those after the first: what is set up
before is counted on neither side. Tests are not timed. Memory is the peak of a process that trains ours alone. The last
line is one JSON document.
"""

from __future__ import annotations

import json
import statistics
import time
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.kit import alone, machine, peak_mb, start, table
from benchmarks.recommend import FACTORS, RATE, THREADS, Ours, Theirs
from steelyard.recommend.interactions import Interactions

TASTES, OWN, CUTOFF, JUDGED = 50, 0.7, 10, 2000
Floats = NDArray[np.floating[Any]]


def interactions(users: int, items: int, rows: int, seed: int = 1) -> tuple[Interactions, Interactions]:
    """Return made-up training and test interactions, about so many in all; no pair comes twice."""
    draw = np.random.default_rng(seed)
    sizes = draw.lognormal(0.0, 1.0, users)
    user = np.repeat(np.arange(users), draw.multinomial(int(1.15 * rows), sizes / sizes.sum()))
    popular = np.cumsum(1.0 / np.arange(1, items + 1) ** 0.8)
    ranks = np.searchsorted(popular, draw.random(len(user)) * popular[-1]).clip(max=items - 1)
    # A taste is an order of the items of its own; the first orders of all are one: what everybody likes.
    orders = np.stack([np.arange(items), *(draw.permutation(items) for _ in range(TASTES))])
    taste = draw.integers(1, TASTES + 1, users)[user] * (draw.random(len(user)) < OWN)
    pairs = np.unique(user.astype(np.int64) * items + orders[taste, ranks])
    pairs = np.sort(draw.choice(pairs, min(rows, len(pairs)), replace=False))
    names = np.arange(users).astype(np.str_), np.arange(items).astype(np.str_)
    test = draw.random(len(pairs)) < 0.2

    def table(some: NDArray[np.int64]) -> Interactions:
        return Interactions(*names, some // items, some % items, np.ones(len(some)))

    return table(pairs[~test]), table(pairs[test])


class Judge:
    """nDCG@10 of scores on a sample of the users, items that they trained on left out."""

    def __init__(self, train: Interactions, test: Interactions) -> None:
        having = np.unique(test.user)
        self.users = np.sort(np.random.default_rng(2).choice(having, min(JUDGED, len(having)), replace=False))
        self._seen, self._wanted = (self._flags(table) for table in (train, test))

    def _flags(self, table: Interactions) -> NDArray[np.bool_]:
        flags = np.zeros((len(self.users), len(table.items)), dtype=np.bool_)
        mine = np.isin(table.user, self.users)
        flags[np.searchsorted(self.users, table.user[mine]), table.item[mine]] = True
        return flags

    def ndcg(self, scores: Floats) -> float:
        """Return the mean over the users of scores [users, items]."""
        unseen = np.where(self._seen, np.inf, -scores)
        some = np.argpartition(unseen, CUTOFF, axis=1)[:, :CUTOFF]
        order = np.argsort(np.take_along_axis(unseen, some, axis=1), axis=1, kind="stable")
        best = np.take_along_axis(some, order, axis=1)
        gains = 1 / np.log2(np.arange(2, CUTOFF + 2))
        found = np.take_along_axis(self._wanted, best, axis=1) @ gains
        ideal = np.cumsum(gains)[np.minimum(self._wanted.sum(axis=1), CUTOFF) - 1]
        return float((found / ideal).mean())


def reached(courses: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the level that both reach, and the epochs that each needs for it, at what an epoch takes."""
    level = 0.99 * min(max(step["ndcg"] for step in course) for course in courses.values())
    first: dict[str, dict[str, float]] = {}
    for name, course in courses.items():
        epochs = next(number for number, step in enumerate(course, 1) if step["ndcg"] >= level)
        first[name] = {"epochs": epochs, **{key: epochs * each for key, each in later_epochs(course).items()}}
    ours, theirs = first["steelyard"], first["implicit"]
    return {
        "ndcg": round(level, 4),
        "until": first,
        "times_as_fast": {key: round(theirs[key] / ours[key], 2) for key in ("seconds", "processor")},
    }


def later_epochs(course: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of the epochs after the first, which also sets up."""
    steps = list(pairwise(course))
    return {
        key: round(statistics.median(after[key] - before[key] for before, after in steps), 4)
        for key in ("seconds", "processor")
    }


def measure(users: int, items: int, rows: int, epochs: int, most: float, mode: str) -> dict[str, Any]:
    """Train both in turns and return what each took and reached."""
    train, test = interactions(users, items, rows)
    judge = Judge(train, test)
    ours, theirs = Ours(train, mode), Theirs(train)
    courses: dict[str, list[dict[str, float]]] = {"steelyard": [], "implicit": []}
    Ours(interactions(50, 40, 500)[0], mode).epoch()  # compiled before anything is timed
    started = time.perf_counter()
    for epoch in range(epochs):
        # Two epochs at least: what an epoch takes is the median after the first.
        if epoch > 1 and time.perf_counter() - started > most:
            break
        for name, system in (("steelyard", ours), ("implicit", theirs)):
            course = courses[name]
            begun = time.process_time()
            seconds, processor = system.epoch(), time.process_time() - begun
            before = course[-1] if course else {"seconds": 0.0, "processor": 0.0}
            if isinstance(system, Ours):
                scores = system.clients.scores("EQ", 1, system.states["EQ"].parameters, judge.users)
            else:
                scores = system.model.user_factors[judge.users] @ system.model.item_factors.T
            course.append(
                {
                    "seconds": round(before["seconds"] + seconds, 3),
                    "processor": round(before["processor"] + processor, 3),
                    "ndcg": round(judge.ndcg(scores), 4),
                }
            )
    return {
        "users": users,
        "items": items,
        "interactions": len(train),
        "mode": mode,
        "factors": FACTORS,
        "rate": RATE,
        "threads": THREADS,
        "courses": courses,
        "epoch": {name: later_epochs(course) for name, course in courses.items()},
        "equal_quality": reached(courses),
        "machine": machine(),
    }


def main(
    users: int = 138_493,
    items: int = 26_744,
    rows: int = 20_000_263,
    epochs: int = 15,
    seconds: Annotated[float, typer.Option(help="no epoch begins after so many seconds of training")] = 200,
    mode: str = "sFPL+",
    memory: Annotated[bool, typer.Option("--memory", help="train two epochs of ours and print the peak in MB")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="JSON alone")] = False,
) -> None:
    """Measure and print."""
    if memory:
        ours = Ours(interactions(users, items, rows)[0], mode)
        for _ in range(2):
            ours.epoch()
        print(json.dumps(peak_mb()))
        return
    given = ("--users", users, "--items", items, "--rows", rows, "--mode", mode)
    found = measure(users, items, rows, epochs, seconds, mode)
    found["memory_mb"] = round(alone("recommend_large", "--memory", *given))
    if not quiet:
        titles = ("steelyard: s", "processor s", "nDCG@10", "implicit: s", "processor s ", "nDCG@10 ")
        lines = [
            {"epoch": number, **dict(zip(titles, [value for step in steps for value in step.values()], strict=True))}
            for number, steps in enumerate(zip(*found["courses"].values(), strict=True), 1)
        ]
        print(table(lines))
        each, their = found["epoch"]["steelyard"], found["epoch"]["implicit"]
        print(f"\nan epoch after the first: {each['seconds']} s (processor {each['processor']}), implicit", end=" ")
        print(f"{their['seconds']} s ({their['processor']})")
        fast = found["equal_quality"]["times_as_fast"]
        print(f"at equal quality {fast['seconds']} times as fast ({fast['processor']} by the processor)")
        print(f"peak memory of ours {found['memory_mb']} MB, the interactions included\n")
    print(json.dumps(found))


if __name__ == "__main__":
    start(main)
