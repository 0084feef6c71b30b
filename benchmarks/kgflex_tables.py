"""The tables of docs/results/kgflex.md: settings chosen on a validation part, then the test with three seeds.

    python -m benchmarks.kgflex_tables OUT --jobs 16 [--data yahoo,books,ml1m] [--stages search,test] [--epochs 40]

Stage `search` runs a grid of settings on each user's validation part and looks after some numbers of epochs. Stage
`test` takes the best of them by nDCG@10, and the best of those with the thesis' own selection (as many others as items,
features of more than ten items), trains on the whole training part and tests with three seeds; beside it run the
baselines, the ablation over hops and embedding sizes, and users weighed by expertise. Every cell is one line of
OUT/cells.jsonl; a cell that is there is not done again. `--show` prints what is there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from steelyard.experiment.loading import load
from steelyard.experiment.recommend import RecommendDescription
from steelyard.experiment.running import federations_of, plan_of
from steelyard.recommend.baselines import BASELINES, recommend
from steelyard.recommend.kgflex import explain
from steelyard.recommend.kgflex.clients import KgflexClients
from steelyard.recommend.kgflex.selection import Selection
from steelyard.recommend.knowledge.loading import load_features
from steelyard.recommend.metrics import measure
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import RoundRecord, RoundState

Cell = dict[str, Any]
CUTOFFS, SEEDS, TOPS = (10, 1), (1, 2, 3), (None, 100, 50, 10, 5)
THESIS = {"knowledge.min_items": 11, "knowledge.counted": "source", "kgflex.others": 1.0}
"""How the thesis chose features: more than ten items, counted over all that are described; as many others as items."""
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
    "ml1m": {
        "knowledge": (("source", 11),),
        "kgflex.limits": ((100, 100),),
        "kgflex.others": (1.0, 5.0),
        "fpl.learning_rate": (0.01, 0.03),
    },
}
LOOKS: Mapping[str, tuple[int, ...]] = {"yahoo": (5, 10, 20, 40), "books": (5, 10, 20, 40), "ml1m": (2, 5, 10)}
"""After how many epochs a cell of the search is looked at; the last is where it ends."""
HOPS = {"1": [100, 0], "2": [0, 100], "1+2": [100, 100]}
FACTORS = (1, 10, 50)
SYSTEMS: tuple[tuple[str, Mapping[str, float | int]], ...] = (
    ("random", {}),
    ("popular", {}),
    ("vsm", {}),
    *(("item-knn", {"neighbours": count}) for count in (20, 50, 100)),
    *(("user-knn", {"neighbours": count}) for count in (50, 100)),
    *(
        ("bpr-mf", {"factors": 20, "rate": rate, "epochs": epochs})
        for rate, epochs in ((0.02, 50), (0.05, 20), (0.05, 50))
    ),
)


def describe(cell: Cell) -> RecommendDescription:
    """Return the experiment of a cell."""
    changes = {**cell["set"], "seed": cell.get("seed", 1), "fpl.threads": 1, "rounds.evaluate_every": 1 << 20}
    if cell.get("epochs"):
        changes["rounds.epochs"] = max(cell["epochs"])
    if cell["stage"] == "search" or cell.get("validation"):
        changes["interactions.validation"] = 0.2
    experiment = load(f"kgflex-{cell['data']}").changed(changes)
    assert isinstance(experiment, RecommendDescription)
    return experiment


class Looker:
    """A recorder that stores nothing and looks at the lists after some epochs."""

    def __init__(self, experiment: RecommendDescription, clients: KgflexClients, epochs: Sequence[int]) -> None:
        self.experiment, self.clients, self.epochs = experiment, clients, set(epochs)
        self.each = 1 if experiment.bundled else experiment.schedule().rounds_per_epoch
        self.found: dict[str, Any] = {}

    def commit(
        self,
        round: int,
        records: Sequence[RoundRecord],
        states: Mapping[str, RoundState],
        snapshot: Callable[[], Mapping[str, torch.Tensor]],
        *,
        last: bool,
    ) -> None:
        """Look if this round ends an epoch that was asked for."""
        epoch, rest = divmod(round, self.each)
        if rest or epoch not in self.epochs:
            return
        name = records[0].federation
        lists, _ = self.clients.lists(name, self.experiment.seed, states[name].parameters, max(CUTOFFS))
        view = self.clients.users.ground.view
        self.found[str(epoch)] = {str(k): rounded(measure(view(lists, k))) for k in CUTOFFS}
        if last:
            self.found["kept"] = self.kept(lists)

    def kept(self, lists: np.ndarray) -> dict[str, Any]:
        """Return the quartiles of Table 6.2 in both readings."""
        seed, parts = self.experiment.seed, self.clients.parts
        known = self.clients.knowledge(seed)
        after = explain.after_lists(known, lists, self.clients.users.histories.names, seed, parts.settings)
        flags = {"shown": explain.shown(known, lists), "again": explain.informative_again(known, after)}
        before, then = (set(np.argsort(-explain.cloud(each))[:100].tolist()) for each in (known.selection, after))
        quartiles = {
            name: {str(top): _quartiles(known.selection, flag, top) for top in TOPS} for name, flag in flags.items()
        }
        features = known.selection.sizes.mean()
        return {**quartiles, "cloud": len(before & then) / 100, "features_per_user": round(float(features), 1)}


def _quartiles(selection: Selection, flags: np.ndarray, top: int | None) -> list[float]:
    return [round(float(each), 4) for each in np.nanpercentile(explain.kept(selection, flags, top), (25, 50, 75))]


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    """Return metrics short enough for a line."""
    return {name: float(f"{value:.5g}") for name, value in figures.items()}


def work(cell: Cell) -> Cell:
    """Do one cell and return it with what was found."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    experiment = describe(cell)
    if cell["stage"] == "baseline":
        found = baseline(experiment, cell)
    else:
        clients, server = experiment.assemble()
        assert isinstance(clients, KgflexClients)
        looker = Looker(experiment, clients, cell["epochs"])
        run_rounds(federations_of(experiment), {}, clients, server, plan_of(experiment), looker)
        found = {**looker.found, "features": str(clients.parts.features)}
    return {**cell, "found": found, "seconds": round(time.perf_counter() - begun, 1)}


def baseline(experiment: RecommendDescription, cell: Cell) -> dict[str, Any]:
    """Train a baseline on the recipe's split."""
    prepared = experiment.prepare()
    assert experiment.knowledge is not None
    features = load_features(experiment.knowledge, prepared.data.items) if cell["system"] == "vsm" else None
    lists, _ = recommend(cell["system"], prepared.split.train, 10, cell["seed"], cell["settings"], features)
    return {"0": {str(k): rounded(measure(prepared.users.ground.view(lists, k))) for k in CUTOFFS}}


def grid(data: str) -> Iterator[dict[str, Any]]:
    """Yield the changes of each cell of the search."""
    names = list(GRIDS[data])
    for values in itertools.product(*GRIDS[data].values()):
        changes = dict(zip(names, values, strict=True))
        counted, least = changes.pop("knowledge")
        limits = list(changes.pop("kgflex.limits"))
        yield {"knowledge.counted": counted, "knowledge.min_items": least, "kgflex.limits": limits, **changes}


def best(cells: Sequence[Cell], data: str, like: Mapping[str, Any]) -> tuple[dict[str, Any], int] | None:
    """Return the settings and epochs with the highest nDCG@10 on the validation part, among those like these."""
    scored = [
        (figures["10"]["ndcg"], -int(epoch), json.dumps(cell["set"]))
        for cell in cells
        if cell["stage"] == "search" and cell["data"] == data and like.items() <= cell["set"].items()
        for epoch, figures in cell["found"].items()
        if epoch.isdigit()
    ]
    if not scored:
        return None
    _, epoch, settings = max(scored)
    return json.loads(settings), -epoch


def wanted(stage: str, data: str, done: Sequence[Cell], epochs: int | None) -> Iterator[Cell]:
    """Yield the cells of a stage, with what the search found where they need it."""
    if stage == "search":
        looks = [look for look in LOOKS[data] if epochs is None or look <= epochs] or [epochs]
        yield from ({"stage": "search", "data": data, "set": each, "epochs": looks} for each in grid(data))
        return
    for name, settings in SYSTEMS:
        for validation in (True, False) if settings else (False,):
            for seed in SEEDS if not validation and name in ("bpr-mf", "random") else (1,):
                cell = {"stage": "baseline", "data": data, "set": {}, "system": name, "settings": dict(settings)}
                yield {**cell, "seed": seed, "validation": validation}
    chosen, thesis = best(done, data, {}), best(done, data, THESIS)
    assert chosen is not None
    assert thesis is not None
    for name, (settings, epoch) in (("chosen", chosen), ("thesis", thesis)):
        for seed in SEEDS:
            cell = {"stage": "test", "data": data, "set": settings, "epochs": [epoch]}
            yield {**cell, "seed": seed, "name": name}
            for rule in ("EX", "DS") if name == "chosen" and data != "ml1m" else ():
                weighed = {**settings, "weighing.criteria": [rule]}
                yield {**cell, "set": weighed, "seed": seed, "name": rule}
    settings, epoch = thesis
    for (hops, limits), factors in itertools.product(HOPS.items(), FACTORS):
        if data == "yahoo" and hops != "1":
            continue  # its features are all of one hop
        changed = {**settings, "kgflex.limits": limits, "fpl.factors": factors}
        yield {"stage": "ablation", "data": data, "set": changed, "epochs": [epoch], "hops": hops, "factors": factors}


def key(cell: Cell) -> str:
    """Return what names a cell."""
    return json.dumps({name: value for name, value in cell.items() if name not in ("found", "seconds")}, sort_keys=True)


def read(out: Path) -> list[Cell]:
    """Return the cells that are done."""
    file = out / "cells.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line] if file.exists() else []


def main() -> None:
    """Parse, do what is missing, one stage after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--data", default="ml1m,yahoo,books")
    parser.add_argument("--stages", default="search,test")
    parser.add_argument("--epochs", type=int, help="no more epochs than this in the search, for a trial")
    parser.add_argument("--first", type=int, help="only so many cells of each stage and data set, for a trial")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this; the next call goes on")
    parser.add_argument("--show", action="store_true")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.show:
        show(read(chosen.out))
        return
    end = time.monotonic() + chosen.seconds
    with ProcessPoolExecutor(chosen.jobs) as pool, (chosen.out / "cells.jsonl").open("a") as file:
        for stage in chosen.stages.split(","):
            done = read(chosen.out)
            known = {key(cell) for cell in done}
            cells = [
                cell
                for data in chosen.data.split(",")
                for cell in itertools.islice(wanted(stage, data, done, chosen.epochs), chosen.first)
                if key(cell) not in known and (cell["stage"] != "baseline" or cell["system"] in BASELINES)
            ]
            print(f"{stage}: {len(cells)} cells", flush=True)
            submitted = [pool.submit(work, cell) for cell in cells]
            try:
                for future in as_completed(submitted, max(end - time.monotonic(), 0)):
                    file.write(json.dumps(future.result()) + "\n")
                    file.flush()
            except TimeoutError:
                print(f"{stage}: out of time, {sum(not each.done() for each in submitted)} cells left", flush=True)
                # What is being worked at is done anew by the next call.
                for process in multiprocessing.active_children():
                    process.terminate()
                os._exit(0)


def show(cells: Sequence[Cell]) -> None:
    """Print a line per cell."""
    for cell in sorted(cells, key=lambda each: (each["data"], each["stage"], str(each.get("name")))):
        what = cell.get("name") or cell.get("system") or cell.get("hops") or ""
        for epoch, figures in cell["found"].items():
            if not epoch.isdigit():
                continue
            ten, one = figures["10"], figures["1"]
            numbers = [ten["ndcg"], one["ndcg"], ten["item_coverage"], one["item_coverage"], ten["gini"], ten["aclt"]]
            about = {**cell["set"], **cell.get("settings", {})}
            print(cell["data"], cell["stage"], what, f"e{epoch}", *numbers, json.dumps(about), f"{cell['seconds']}s")


if __name__ == "__main__":
    main()
