"""A recommender beside baselines: settings chosen on validation rows by `sweep`, then tested with some seeds.

    python -m benchmarks.recommend_tables fpl-amazon --out OUT --jobs 2
    python -m benchmarks.recommend_tables fpl-ml1m --out OUT --set fpl.mode=sFPL+ --set fpl.epoch=tables --epochs 1,2,3
    python -m benchmarks.recommend_tables kgflex-yahoo --out OUT --over kgflex.others=1,5
    python -m benchmarks.recommend_tables kgflex-yahoo --out OUT --baselines mf,neumf,kahfm,vae --no-sweep --jobs 4
    python -m benchmarks.recommend_tables kgflex-ml1m --out OUT --baselines mf --no-sweep --grid mf.batch=8192

The experiment is swept over learning rates, factors and epochs (`--over` in place of the first two), baselines over
their own settings (`--grid` changes them); what is best by P@10 on each user's validation rows is trained on all
training rows and tested. Called again with the same OUT it goes on where it was stopped, after the last fit of a
baseline (OUT/fits.json) or cell of the sweep; `--jobs` does as many of them at a time. Prints a table in Markdown and
writes OUT/tables.json after each row, with every metric, at 10 and at 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from steelyard import Experiment
from steelyard.api import RecommendExperiment
from steelyard.recommend.baselines import baseline, recommend
from steelyard.recommend.evaluate import Case, figures
from steelyard.recommend.knowledge.features import ItemFeatures
from steelyard.recommend.knowledge.loading import load_features
from steelyard.recommend.run_data import RunData
from steelyard.report.recommender import open_run

CUTOFF, VALIDATION = 10, 0.2
Grids = Mapping[str, Mapping[str, Sequence[float]]]
SHOWN = ("precision", "recall", "ndcg", "item_coverage", "gini")
GRIDS: Grids = {
    "random": {},
    "popular": {},
    "user-knn": {"neighbours": (10, 30, 50, 70, 100)},
    "item-knn": {"neighbours": (10, 30, 50, 70, 100)},
    "mf": {"batch": (1024,), "factors": (8, 32), "rate": (0.001, 0.005), "decay": (0.0, 1e-5), "epochs": (10, 30)},
    "neumf": {"batch": (1024,), "factors": (8, 32), "rate": (0.001, 0.003), "epochs": (10, 30)},
    "vae": {"hidden": (200, 600), "latent": (50, 200), "rate": (0.001,), "epochs": (50, 150)},
    "kahfm": {"rate": (0.005, 0.02, 0.05), "epochs": (10, 30)},
    "bpr-mf": {"rate": (0.005, 0.05, 0.5), "factors": (10, 20, 50), "epochs": (10, 30, 50)},
    "fcf": {"factors": (10, 20, 50), "epochs": (10, 30, 50)},
}
"""Settings that are tried for each baseline, as in the thesis (§4.5.3)."""
Row = dict[str, Any]


def points(grid: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Give every combination of a grid's values."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def measured(run_data: RunData, lists: Any) -> dict[str, float]:
    """Return the metrics of some lists."""
    data = run_data.data
    case = Case(run_data.users.truth, tuple(data.users), tuple(data.items), lists, None, ())
    found = figures(case, [CUTOFF, 1])
    first = {f"{name}@1": value for name, value in found["1"].items()}
    return {
        name: float(value) for name, value in {**found[str(CUTOFF)], **first}.items() if isinstance(value, int | float)
    }


@dataclass(frozen=True)
class Fit:
    """One training of a baseline, and the rows that it is measured on."""

    kind: str
    part: str
    seed: int
    point: dict[str, Any]

    @property
    def key(self) -> str:
        """Its name in the file of fits."""
        return json.dumps([self.kind, self.part, self.seed, self.point], sort_keys=True)


class Bench:
    """An experiment's rows and features, read when a fit first needs them."""

    def __init__(self, experiment: RecommendExperiment) -> None:
        self.experiment = experiment

    @cached_property
    def choosing(self) -> RunData:
        """The training rows without, and the validation rows."""
        return self.experiment.changed({"interactions.validation": VALIDATION}).run_data()

    @cached_property
    def testing(self) -> RunData:
        """All training rows, and the test rows."""
        return self.experiment.run_data()

    @cached_property
    def known(self) -> ItemFeatures | None:
        """What is known of the items."""
        knowledge = self.experiment.knowledge
        return None if knowledge is None else load_features(knowledge, self.testing.data.items)

    def measure(self, fit: Fit) -> dict[str, float]:
        """Train and return the metrics."""
        rows = self.testing if fit.part == "test" else self.choosing
        chosen = baseline(fit.kind, fit.point)
        known = self.known if chosen.of_features else None
        return measured(rows, recommend(chosen, rows.split.train, CUTOFF, fit.seed, known)[0])


class Fits:
    """Metrics of the baselines' fits, on disk after each, so that a stopped search goes on behind the last one."""

    def __init__(self, path: Path, experiment: RecommendExperiment) -> None:
        self.path, self.bench, self.described = path, Bench(experiment), experiment.model_dump(mode="json")
        held = json.loads(path.read_text()) if path.exists() else {"experiment": self.described, "fits": {}}
        if held["experiment"] != self.described:
            raise SystemExit(f"{path}: of another experiment; give a new folder as --out")
        self.fits: dict[str, dict[str, float]] = held["fits"]

    def get(self, fits: Sequence[Fit], jobs: int = 1) -> list[dict[str, float]]:
        """Return the metrics of some fits, measured unless they are known, so many at a time."""
        missing = [fit for fit in fits if fit.key not in self.fits]
        if jobs == 1 or len(missing) < 2:
            for fit in missing:
                self._keep(fit, self.bench.measure(fit))
        else:
            missing.sort(key=lambda fit: -fit.point.get("epochs", 0))  # the longest first, or the others wait for it
            begin = (self.bench.experiment,)
            with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_begin, initargs=begin) as pool:
                running = {pool.submit(_measure, fit): fit for fit in missing}
                for done in as_completed(running):
                    self._keep(running[done], done.result())
        return [self.fits[fit.key] for fit in fits]

    def _keep(self, fit: Fit, found: dict[str, float]) -> None:
        self.fits[fit.key] = found
        whole = self.path.with_suffix(".part")
        whole.write_text(json.dumps({"experiment": self.described, "fits": self.fits}, indent=1))
        whole.replace(self.path)


_benches: list[Bench] = []
"""The one of a process that was started for fits."""


def _begin(experiment: RecommendExperiment) -> None:
    _benches.append(Bench(experiment))


def _measure(fit: Fit) -> dict[str, float]:
    return _benches[0].measure(fit)


def baselines(kinds: Sequence[str], grids: Grids, fits: Fits, seeds: int, jobs: int) -> list[Row]:
    """Choose each baseline's settings on the validation rows and test them."""
    tried = {kind: [Fit(kind, "validation", 1, point) for point in points(grids[kind])] for kind in kinds}
    fits.get([fit for each in tried.values() for fit in each], jobs)
    best: dict[str, dict[str, Any]] = {}
    for kind, each in tried.items():
        scores = [found["precision"] for found in fits.get(each)]
        best[kind] = each[scores.index(max(scores))].point
    tests = {kind: [Fit(kind, "test", seed, best[kind]) for seed in range(1, seeds + 1)] for kind in kinds}
    fits.get([fit for each in tests.values() for fit in each], jobs)
    return [{"system": kind, "chosen": best[kind], "seeds": fits.get(tests[kind])} for kind in kinds]


def grids_with(changes: Sequence[str]) -> Grids:
    """Return the grids with some values in place of others: "mf.batch=8192,16384"."""
    found = {kind: dict(grid) for kind, grid in GRIDS.items()}
    for entry in changes:
        field, _, values = entry.partition("=")
        kind, _, setting = field.partition(".")
        if setting not in found.get(kind, {}):
            raise SystemExit(f"--grid: got {field}; allowed: a setting of the search, such as mf.factors")
        found[kind][setting] = [json.loads(value) for value in values.split(",")]
    return found


def federated(experiment: RecommendExperiment, over: Mapping[str, Sequence[Any]], arguments: Any) -> Row:
    """Sweep the experiment on the validation rows and run what is best on the test rows."""
    folder: Path = arguments.out / "sweep"
    swept = experiment.sweep(
        *(over,), measure="precision", out=folder, validation=VALIDATION, jobs=arguments.jobs, progress=False
    )
    found: list[dict[str, float]] = []
    for seed in range(1, arguments.seeds + 1):
        out = arguments.out / f"test-{seed}"
        if not out.exists():
            swept.best.changed({"seed": seed}).run(out=out, progress=False)
        finished = open_run(out)
        found.append(measured(finished.run_data, finished.lists(CUTOFF)[0]))
    described = swept.best.model_dump()
    chosen = {field: described[field.split(".")[0]][field.split(".")[1]] for field in over}
    name = "kgflex" if experiment.kgflex is not None else f"{experiment.fpl.mode} ({experiment.fpl.epoch})"
    return {"system": name, "chosen": chosen, "seeds": found}


def table(rows: Sequence[Row]) -> str:
    """Return rows as Markdown: the mean over seeds, and their standard deviation where there are several."""
    lines = ["| system | chosen | " + " | ".join(SHOWN) + " |", "|---" * (len(SHOWN) + 2) + "|"]
    for row in rows:
        chosen = ", ".join(f"{name} {value}" for name, value in row["chosen"].items())
        cells = [[each[name] for each in row["seeds"]] for name in SHOWN]
        shown = [f"{mean(cell):.5g}" + (f" ± {stdev(cell):.2g}" if len(cell) > 1 else "") for cell in cells]
        lines.append(f"| {row['system']} | {chosen} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse, choose, test, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="a recipe, or a TOML file of kind recommend")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="change a field: section.field=value")
    parser.add_argument("--over", action="append", default=[], help="sweep a field: section.field=value,value")
    parser.add_argument("--epochs", default="10,30,50")
    parser.add_argument("--baselines", default="random,popular,user-knn,item-knn,bpr-mf,fcf")
    parser.add_argument("--grid", action="append", default=[], help="values of a baseline: mf.batch=8192")
    parser.add_argument("--no-sweep", action="store_true", help="baselines alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="fits or cells at a time")
    chosen = parser.parse_args()
    experiment = Experiment.load(chosen.experiment, chosen.set)
    if not isinstance(experiment, RecommendExperiment):
        parser.error(f"{chosen.experiment}: not of kind recommend")
    over: dict[str, list[Any]] = {"rounds.epochs": [int(each) for each in chosen.epochs.split(",")]}
    for entry in chosen.over or ("fpl.learning_rate=0.005,0.05,0.5", "fpl.factors=10,20,50"):
        field, _, values = entry.partition("=")
        over[field] = [json.loads(value) for value in values.split(",")]
    chosen.out.mkdir(parents=True, exist_ok=True)
    fits, grids = Fits(chosen.out / "fits.json", experiment), grids_with(chosen.grid)
    rows: list[Row] = []

    def add(more: Sequence[Row]) -> None:
        rows.extend(more)
        (chosen.out / "tables.json").write_text(json.dumps(rows, indent=1))

    kinds = [kind for kind in chosen.baselines.split(",") if kind]
    for together in [kinds] if chosen.jobs > 1 else [[kind] for kind in kinds]:
        add(baselines(together, grids, fits, chosen.seeds, chosen.jobs))
    if not chosen.no_sweep:
        add([federated(experiment, over, chosen)])
    print(table(rows))


if __name__ == "__main__":
    main()
