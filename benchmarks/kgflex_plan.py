"""What the tables of docs/results/kgflex.md are made of: parts, each some cells, in the order in which they are done.

A cell is a dictionary that names one training or one baseline: its stage, its data, what it changes in the recipe, its
seed. Cells of a later part may depend on what earlier ones found; those are offered once that is there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.cold_start import MOST, names_of
from benchmarks.cold_start_data import CASES

Cell = dict[str, Any]
Settings = dict[str, Any]
SEEDS = (1, 2, 3)
THESIS = {"knowledge.min_items": 11, "knowledge.counted": "source", "kgflex.others": 1.0}
"""How the thesis chose features: more than ten items, counted over all that are described; as many others as items."""
LIMITS = [100, 100]
GRIDS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "yahoo": {
        "knowledge": (("source", 11), ("data", 5), ("data", 3), ("data", 2)),
        "kgflex.limits": ((100, 100), (200, 200)),
        "kgflex.others": (1.0, 5.0),
        "fpl.learning_rate": (0.1,),
    },
    "books": {
        "knowledge": (("source", 11), ("data", 5)),
        "kgflex.limits": ((100, 100), (200, 200)),
        "kgflex.others": (1.0, 5.0),
        "fpl.learning_rate": (0.05, 0.1),
    },
}
_SMALL = {"rounds.fraction": 0.005}
"""Thirty users in a round of MovieLens 1M: steps of the sum over them may be long without running away."""
LISTED: Mapping[str, Sequence[Settings]] = {
    "ml1m": [
        {**THESIS, "kgflex.limits": LIMITS, **_SMALL, "fpl.learning_rate": 0.2},
        {**THESIS, "kgflex.limits": [200, 0], **_SMALL, "fpl.learning_rate": 0.2},
        {**THESIS, "kgflex.limits": LIMITS, **_SMALL, "fpl.learning_rate": 0.05},
        {**THESIS, "kgflex.limits": [200, 0], **_SMALL, "fpl.learning_rate": 0.05},
        {**THESIS, "kgflex.limits": [400, 0], **_SMALL, "fpl.learning_rate": 0.2},
        {**THESIS, "kgflex.limits": [200, 0], "kgflex.own_rate": 2.0, **_SMALL, "fpl.learning_rate": 0.2},
        {**THESIS, "knowledge.counted": "data", "knowledge.min_items": 3, "kgflex.others": 5.0}
        | {"kgflex.limits": [200, 0], **_SMALL, "fpl.learning_rate": 0.2},
        {**THESIS, "kgflex.limits": LIMITS, "rounds.fraction": 1.0, "fpl.triples": 5, "fpl.learning_rate": 0.02},
    ],
}
"""Where the settings to try are a list, not a grid: an epoch takes too long for all combinations."""
LOOKS: Mapping[str, tuple[int, ...]] = {"yahoo": (5, 10, 20, 40), "books": (5, 10, 20, 40), "ml1m": (1, 2, 4, 6, 9, 12)}
"""After how many epochs a cell of the search is looked at; the last is where it ends."""
CHOSEN: Mapping[tuple[str, str], tuple[Settings, int]] = {
    ("yahoo", "chosen"): ({}, 40),
    ("yahoo", "thesis"): ({**THESIS, "kgflex.limits": LIMITS}, 20),
    ("books", "chosen"): ({"kgflex.limits": [200, 200], "fpl.learning_rate": 0.05}, 40),
    ("books", "thesis"): ({}, 20),
    ("ml1m", "chosen"): ({}, 2),
    ("ml1m", "thesis"): ({"kgflex.limits": LIMITS}, 2),
}
"""What the search of 2026 chose on validation parts (docs/results/kgflex.md), as changes of the recipes, and epochs."""
HOPS = {"1": [100, 0], "2": [0, 100], "1+2": [100, 100]}
FACTORS = (1, 10, 50)
SYSTEMS: tuple[tuple[str, Mapping[str, float | int]], ...] = (
    ("random", {}),
    ("popular", {}),
    ("vsm", {}),
    *(("item-knn", {"neighbours": count}) for count in (20, 50, 100)),
    *(("user-knn", {"neighbours": count}) for count in (50, 100)),
    *(
        ("bpr-mf", {"factors": factors, "rate": rate, "epochs": epochs})
        for factors, rate, epochs in ((20, 0.02, 30), (20, 0.05, 10), (20, 0.05, 30), (50, 0.05, 30))
    ),
    ("vae", {}),
)
COLD_DRAWS = 3


def search(data: str, done: Sequence[Cell]) -> Iterator[Cell]:
    """Yield the cells on the validation part."""
    del done
    for settings in LISTED.get(data) or grid(data):
        yield {"stage": "search", "data": data, "set": settings, "epochs": list(LOOKS[data])}


def grid(data: str) -> Iterator[Settings]:
    """Yield the changes of each cell of a grid."""
    names = list(GRIDS[data])
    for values in itertools.product(*GRIDS[data].values()):
        changes = dict(zip(names, values, strict=True))
        counted, least = changes.pop("knowledge")
        limits = list(changes.pop("kgflex.limits"))
        yield {"knowledge.counted": counted, "knowledge.min_items": least, "kgflex.limits": limits, **changes}


def best(done: Sequence[Cell], data: str, like: Mapping[str, Any]) -> tuple[Settings, int] | None:
    """Return the settings and epochs with the highest nDCG@10 on the validation part, among those like these."""
    scored = [
        (figures["10"]["ndcg"], -int(epoch), json.dumps(cell["set"]))
        for cell in done
        if cell["stage"] == "search" and cell["data"] == data and like.items() <= cell["set"].items()
        for epoch, figures in cell["found"].items()
        if epoch.isdigit()
    ]
    if not scored:
        return None
    _, epoch, settings = max(scored)
    return json.loads(settings), -epoch


def settled(done: Sequence[Cell], data: str, name: str) -> tuple[Settings, int] | None:
    """Return what was chosen: by the search if it is there, else as the page says; None if neither."""
    like = {**THESIS, "kgflex.limits": LIMITS} if name == "thesis" else {}
    return best(done, data, like) or CHOSEN.get((data, name))


def tests(data: str, done: Sequence[Cell]) -> Iterator[Cell]:
    """Yield the tests of what was chosen, three seeds each."""
    for seed, name in itertools.product(SEEDS, ("chosen", "thesis")):
        found = settled(done, data, name)
        if found is not None:
            settings, epoch = found
            yield {"stage": "test", "data": data, "set": settings, "epochs": [epoch], "seed": seed, "name": name}


def weighed(data: str, done: Sequence[Cell]) -> Iterator[Cell]:
    """Yield the chosen settings with users weighed by expertise and by size."""
    found = settled(done, data, "chosen")
    if found is None:
        return
    for seed, rule in itertools.product(SEEDS, ("EX", "DS")):
        changes = {**found[0], "weighing.criteria": [rule]}
        yield {"stage": "test", "data": data, "set": changes, "epochs": [found[1]], "seed": seed, "name": rule}


def hops(data: str, done: Sequence[Cell]) -> Iterator[Cell]:
    """Yield Figure 6.3: hops and lengths of vectors, with the thesis' limits."""
    found = settled(done, data, "thesis")
    if found is None:
        return
    for (name, limits), factors in itertools.product(HOPS.items(), FACTORS):
        if data == "yahoo" and name != "1":
            continue  # its features are all of one hop
        changed = {**found[0], "kgflex.limits": limits, "fpl.factors": factors}
        cell = {"stage": "ablation", "data": data, "set": changed, "epochs": [found[1]]}
        yield {**cell, "hops": name, "factors": factors}


def last(data: str, done: Sequence[Cell]) -> Iterator[Cell]:
    """Yield the last cell of Figure 6.3 alone."""
    yield from (cell for cell in hops(data, done) if (cell["hops"], cell["factors"]) == ("1+2", FACTORS[-1]))


def baselines(data: str, done: Sequence[Cell]) -> Iterator[Cell]:
    """Yield the baselines on the validation part, and those that were the best of their kind on the test part."""

    def cell(name: str, settings: Mapping[str, float | int], seed: int, validation: bool) -> Cell:
        about = {"stage": "baseline", "data": data, "set": {}, "system": name, "settings": dict(settings)}
        return {**about, "seed": seed, "validation": validation}

    tried: dict[str, list[Mapping[str, float | int]]] = {}
    for name, settings in SYSTEMS:
        tried.setdefault(name, []).append(settings)
    for name, choices in tried.items():
        chosen: Mapping[str, float | int] | None = choices[0]
        if len(choices) > 1:
            yield from (cell(name, settings, 1, True) for settings in choices)
            chosen = best_baseline(done, data, name)
        for seed in (SEEDS if name in ("bpr-mf", "random", "vae") else (1,)) if chosen is not None else ():
            yield cell(name, chosen or {}, seed, False)


def best_baseline(done: Sequence[Cell], data: str, name: str) -> Mapping[str, float | int] | None:
    """Return a baseline's best settings on the validation part once all of them are there."""
    mine = [each for each in done if each["stage"] == "baseline" and each["data"] == data and each["system"] == name]
    mine = [each for each in mine if each["validation"] and "0" in each["found"]]
    if len(mine) < sum(name == each for each, _ in SYSTEMS):
        return None
    return max(mine, key=lambda each: each["found"]["0"]["10"]["ndcg"])["settings"]


def cold(data: str, done: Sequence[Cell]) -> Iterator[Cell]:
    """Yield new items ranked by their features: the length of training on draw 0, then all systems on other draws."""
    choices = [
        {"stage": "cold-choice", "data": data, "most": most, "epochs": list(CASES[data].epochs)} for most in MOST
    ]
    yield from choices
    ended = {each["most"]: each["found"]["epochs"] for each in done if ended_choice(each, data)}
    if len(ended) < len(MOST):
        return
    epochs = {str(most): ended[most] for most in MOST}
    for draw, system in itertools.product(range(1, COLD_DRAWS + 1), names_of()):
        yield {"stage": "cold", "data": data, "system": system, "draw": draw, "epochs": epochs}


def ended_choice(cell: Cell, data: str) -> bool:
    """Whether a cell is a finished choice of the length of training for new items."""
    return cell["stage"] == "cold-choice" and cell["data"] == data and "epochs" in cell["found"]


PARTS: Mapping[str, Callable[[str, Sequence[Cell]], Iterator[Cell]]] = {
    "search": search,
    "test": tests,
    "weighed": weighed,
    "baselines": baselines,
    "hops": hops,
    "last": last,
    "cold": cold,
}
"""The parts by name; each takes a data set and the cells that are done."""


def key(cell: Cell) -> str:
    """Return what names a cell."""
    left_out = ("found", "seconds", "end")
    return json.dumps({name: value for name, value in cell.items() if name not in left_out}, sort_keys=True)
