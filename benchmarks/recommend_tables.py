"""A recommender beside baselines: settings chosen on validation rows by `sweep`, then tested with some seeds.

    python -m benchmarks.recommend_tables fpl-amazon --out OUT --jobs 2
    python -m benchmarks.recommend_tables fpl-ml1m --out OUT --set fpl.mode=sFPL+ --set fpl.epoch=tables --epochs 1,2,3
    python -m benchmarks.recommend_tables kgflex-yahoo --out OUT --over kgflex.others=1,5
    python -m benchmarks.recommend_tables kgflex-yahoo --out OUT --baselines mf,neumf,kahfm,vae --no-sweep

The experiment is swept over learning rates, factors and epochs (`--over` in place of the first two), baselines over
their own settings; what is best by P@10 on each user's validation rows is trained on all training rows and tested.
Called again with the same OUT it goes on where it was stopped, after the last fit of a baseline (OUT/fits.json) or cell
of the sweep. Prints a table in Markdown and writes OUT/tables.json after each row, with every metric, at 10 and at 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from steelyard import Experiment
from steelyard.api import RecommendExperiment
from steelyard.recommend.baselines import needs_features, recommend
from steelyard.recommend.evaluate import Case, figures
from steelyard.recommend.knowledge.loading import load_features
from steelyard.recommend.run_data import RunData
from steelyard.report.recommender import open_run

CUTOFF, VALIDATION = 10, 0.2
SHOWN = ("precision", "recall", "ndcg", "item_coverage", "gini")
GRIDS: Mapping[str, Mapping[str, Sequence[float]]] = {
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


class Fits:
    """Metrics of the baselines' fits, on disk after each, so that a stopped search goes on behind the last one."""

    def __init__(self, path: Path, experiment: RecommendExperiment) -> None:
        self.path, self.described = path, experiment.model_dump(mode="json")
        held = json.loads(path.read_text()) if path.exists() else {"experiment": self.described, "fits": {}}
        if held["experiment"] != self.described:
            raise SystemExit(f"{path}: of another experiment; give a new folder as --out")
        self.fits: dict[str, dict[str, float]] = held["fits"]

    def get(self, fit: Sequence[Any], measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return the metrics of a fit, measured unless they are known."""
        key = json.dumps(fit, sort_keys=True)
        if key not in self.fits:
            self.fits[key] = measure()
            whole = self.path.with_suffix(".part")
            whole.write_text(json.dumps({"experiment": self.described, "fits": self.fits}, indent=1))
            whole.replace(self.path)
        return self.fits[key]


def baseline(kind: str, experiment: RecommendExperiment, seeds: int, fits: Fits) -> Row:
    """Choose a baseline's settings on the validation rows and test them."""
    choosing, testing = experiment.changed({"interactions.validation": VALIDATION}).run_data(), experiment.run_data()
    knowledge = experiment.knowledge if needs_features(kind) else None
    known = None if knowledge is None else load_features(knowledge, testing.data.items)

    def tested(run_data: RunData, seed: int, point: dict[str, Any]) -> dict[str, float]:
        part = "test" if run_data is testing else "validation"
        return fits.get(
            [kind, part, seed, point],
            lambda: measured(run_data, recommend(kind, run_data.split.train, CUTOFF, seed, point, known)[0]),
        )

    tried = [(tested(choosing, 1, point)["precision"], point) for point in points(GRIDS[kind])]
    best = max(tried, key=lambda entry: entry[0])[1]
    return {"system": kind, "chosen": best, "seeds": [tested(testing, seed, best) for seed in range(1, seeds + 1)]}


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
    parser.add_argument("--no-sweep", action="store_true", help="baselines alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    chosen = parser.parse_args()
    experiment = Experiment.load(chosen.experiment, chosen.set)
    if not isinstance(experiment, RecommendExperiment):
        parser.error(f"{chosen.experiment}: not of kind recommend")
    over: dict[str, list[Any]] = {"rounds.epochs": [int(each) for each in chosen.epochs.split(",")]}
    for entry in chosen.over or ("fpl.learning_rate=0.005,0.05,0.5", "fpl.factors=10,20,50"):
        field, _, values = entry.partition("=")
        over[field] = [json.loads(value) for value in values.split(",")]
    chosen.out.mkdir(parents=True, exist_ok=True)
    fits = Fits(chosen.out / "fits.json", experiment)
    rows: list[Row] = []
    systems = [partial(baseline, kind, experiment, chosen.seeds, fits) for kind in chosen.baselines.split(",") if kind]
    if not chosen.no_sweep:
        systems.append(partial(federated, experiment, over, chosen))
    for system in systems:
        rows.append(system())
        (chosen.out / "tables.json").write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
