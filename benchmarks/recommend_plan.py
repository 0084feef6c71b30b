"""What is run for the recommender tables: settings are chosen on the validation rows, then the test set is used.

Per data set three stages, each made from the lines of those before:

1. validation: BPR-MF over the thesis' grid (α, factors; epochs 10 to 50), user- and item-kNN over k, FCF over factors
   and epochs;
2. validation: each mode of FPL with BPR-MF's factors, over α at π = 1, then over π at the best α;
3. test: every system with its chosen settings and three seeds; the modes of FPL over all π with one seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.recommend_systems import Line, Task

RATES = (0.005, 0.05, 0.5)
FACTORS = (10, 20, 50)
EPOCHS = (10, 20, 30, 40, 50)
LONG_EPOCHS = (1, 2, 3)
"""For the + modes on MovieLens 1M as the tables were made: an epoch has 107 million triples."""
SHARES = tuple(round(0.1 * step, 1) for step in range(11))
FEW_SHARES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""For the + modes as the tables were made, which take some forty times as long."""
NEIGHBOURS = tuple(range(10, 101, 10))
SEEDS = (1, 2, 3)
VARIANTS: tuple[tuple[str, str], ...] = (
    *(("sFPL", "formula"), ("pFPL", "formula"), ("sFPL+", "tables"), ("pFPL+", "tables")),
    *(("sFPL+", "formula"), ("pFPL+", "formula")),
)
"""The modes and how their epochs are counted; the plain modes are the same in both counts."""


def epochs_of(data: str, counted: str) -> tuple[int, ...]:
    """Return after which epochs a mode is looked at."""
    return LONG_EPOCHS if (data, counted) == ("ml1m", "tables") else EPOCHS


def shares_of(counted: str) -> tuple[float, ...]:
    """Return the values of π that a mode is run with."""
    return FEW_SHARES if counted == "tables" else SHARES


def task(data: str, use: str, system: str, seed: int = 1, epochs: Sequence[int] = (), **settings: Any) -> Task:
    """Return one task."""
    return {"data": data, "use": use, "system": system, "settings": settings, "seed": seed, "epochs": list(epochs)}


def cost(one: Task) -> float:
    """Return a rough number of what a task costs, so that long ones are begun first."""
    size = {"ml1m": 40.0, "amazon": 3.0, "italy": 3.0, "milan": 1.0}.get(one["data"], 0.5)
    triples = 30.0 if one["settings"].get("epoch") == "tables" else 1.0
    return size * triples * max(one["epochs"], default=10) * one["settings"].get("factors", 20)


def best(lines: Iterable[Line], system: str, **settings: Any) -> Line:
    """Return the validation line of a system with the highest P@10, among those with these settings.

    Of equal ones the one with fewer epochs, then the first by name: the order in which tasks end does not matter.
    """
    chosen = [
        line
        for line in lines
        if (line["use"], line["system"]) == ("validation", system)
        and all(line["settings"].get(name) == value for name, value in settings.items())
    ]
    return min(chosen, key=lambda line: (-line["precision"], line["epoch"] or 0, line["task"]))


def baselines(data: str) -> list[Task]:
    """Return stage 1."""
    found = [task(data, "validation", "bpr-mf", 1, EPOCHS, rate=rate, factors=n) for rate in RATES for n in FACTORS]
    found += [task(data, "validation", kind, neighbours=k) for kind in ("user-knn", "item-knn") for k in NEIGHBOURS]
    return found + [task(data, "validation", "fcf", factors=n, rounds=e) for n in FACTORS for e in (10, 30, 50)]


def rates(data: str, lines: Sequence[Line]) -> list[Task]:
    """Return the first half of stage 2: each mode over α."""
    factors = best(lines, "bpr-mf")["settings"]["factors"]
    return [
        task(data, "validation", mode, 1, epochs_of(data, counted), rate=rate, factors=factors, pi=1.0, epoch=counted)
        for mode, counted in VARIANTS
        for rate in RATES
    ]


def shares(data: str, lines: Sequence[Line]) -> list[Task]:
    """Return the second half of stage 2: each mode over π at its best α."""
    found: list[Task] = []
    for mode, counted in VARIANTS:
        chosen = best(lines, mode, epoch=counted, pi=1.0)["settings"]
        epochs = epochs_of(data, counted)
        found += [
            task(data, "validation", mode, 1, epochs, **(chosen | {"pi": pi})) for pi in shares_of(counted) if pi < 1
        ]
    return found


def tests(data: str, lines: Sequence[Line]) -> list[Task]:
    """Return stage 3, from what was best on the validation rows."""
    found = [task(data, "test", "popular"), *(task(data, "test", "random", seed) for seed in SEEDS)]
    found += [task(data, "test", kind, **best(lines, kind)["settings"]) for kind in ("user-knn", "item-knn")]
    found += [task(data, "test", "fcf", seed, **best(lines, "fcf")["settings"]) for seed in SEEDS]
    chosen = best(lines, "bpr-mf")
    found += [task(data, "test", "bpr-mf", seed, [chosen["epoch"]], **chosen["settings"]) for seed in SEEDS]
    for mode, counted in VARIANTS:
        top = best(lines, mode, epoch=counted)["settings"]["pi"]
        for pi in shares_of(counted):
            line = best(lines, mode, epoch=counted, pi=pi)
            seeds = SEEDS if pi in (top, 1.0) else SEEDS[:1]
            found += [task(data, "test", mode, seed, [line["epoch"]], **line["settings"]) for seed in seeds]
    return found + one_out(data, lines)


def one_out(data: str, lines: Sequence[Line]) -> list[Task]:
    """Return the runs of the second protocol, leave-one-out with sampled negatives, with the settings chosen above."""
    if data not in ("amazon", "ml1m"):
        return []
    found = [task(data, "newest", kind) for kind in ("random", "popular")]
    found += [task(data, "newest", kind, **best(lines, kind)["settings"]) for kind in ("user-knn", "item-knn", "fcf")]
    for system, settings in (("bpr-mf", {}), ("sFPL", {}), ("pFPL+", {"epoch": "formula"})):
        line = best(lines, system, **settings)
        found.append(task(data, "newest", system, 1, [line["epoch"]], **line["settings"]))
    return found


STAGES = (lambda data, lines: baselines(data), rates, shares, tests)
"""What to do next, given all lines of a data set so far."""
