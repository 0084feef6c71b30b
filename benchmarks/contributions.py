"""How far the values of `steelyard contributions` can be trusted: estimates against retrained coalitions.

    python -m benchmarks.contributions --seeds 20

Each scene is run once for all seeds with [contributions], then all coalitions are retrained. A client's estimate covers
the truth where its interval overlaps the retrained value.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit import machine, start, table
from steelyard.contributions.document import Series, add_over_rounds, over_seeds, widened
from steelyard.contributions.replaying import Repetition
from steelyard.experiment.loading import build, load
from steelyard.experiment.running import run
from steelyard.rounds.plan import ContributionSettings
from steelyard.runs.history import RETRAINED, History, read_values
from steelyard.weighing.shapley import Z

Floats = np.ndarray[Any, np.dtype[np.float64]]
FLIPPED = {"kind": "labels-flipped", "how": "pairs"}
SCENES: dict[str, dict[str, Any]] = {
    "flipped labels, the biggest": {"flaws": [{**FLIPPED, "pick": "biggest", "count": 1}]},
    "flipped labels, two": {"flaws": [{**FLIPPED, "pick": "biggest", "count": 2}]},
    "noisy images": {"flaws": [{"kind": "noisy", "amount": 3.0, "pick": "biggest", "count": 1}]},
    "a free rider": {"flaws": [{"kind": "free-rider", "pick": "biggest", "count": 1}]},
    "a copy": {"flaws": [{"kind": "copy", "pick": "biggest", "count": 1}], "partition": {"clients": 5}},
    "clean, Dirichlet 0.3": {"partition": {"scheme": "dirichlet", "alpha": 0.3, "size_spread": None}},
    "four hospitals": {"recipe": "hospitals"},
}


@dataclass(frozen=True)
class Scene:
    """What came of one scene."""

    name: str
    coverage: float
    narrow: float
    """Without the method's own error in the interval."""
    correlation: float
    error: float
    """Median absolute error, as a share of the mean absolute true value."""
    flawed_last: float | None
    holds_zero: float | None
    """Of flawed clients: how often the interval holds 0 or lies below it."""
    alike: float | None
    """Of copies: the median difference to the original, as a share of the mean absolute true value."""
    seconds: float


def experiment(scene: dict[str, Any], clients: int, rounds: int) -> Any:
    """Return a scene: six clients of unequal size on digits, or a recipe; plain FedAvg, loss on the server's rows."""
    if "recipe" in scene:
        measured = {"rounds.count": rounds, "weighing": {"criteria": ["DS"]}, "contributions": {"measure": "loss"}}
        return load(scene["recipe"]).changed({"beside": {}, "store.checkpoint_every": rounds, **measured})
    partition = {"scheme": "iid", "clients": clients, "size_spread": 0.5, "test": "local", "server": "fraction"}
    partition |= {"server_fraction": 0.25} | scene.get("partition", {})
    return build(
        {
            "name": "contributions",
            "data": {"source": "digits"},
            "partition": {name: value for name, value in partition.items() if value is not None},
            "flaws": scene.get("flaws", []),
            "model": {"name": "logistic"},
            "training": {"learning_rate": 0.05, "epochs": 1, "batch_size": 20},
            "rounds": {"count": rounds, "fraction": 1.0, "evaluate_every": rounds},
            "weighing": {"criteria": ["DS"]},
            "contributions": {"measure": "loss"},
            "store": {"checkpoint_every": rounds},
        }
    )


@dataclass(frozen=True, eq=False)
class Compared:
    """The clients of one seed: what was estimated, what retraining found, and who was flawed."""

    guess: Floats
    error: Floats
    """Standard errors of the estimates: of rows and rounds."""
    truth: Floats
    flawed: np.ndarray[Any, np.dtype[np.bool_]]
    apart: list[float]
    """Of copies: the difference to the original, as a share of the mean absolute true value."""


def try_scene(name: str, seeds: int, clients: int, rounds: int, folder: Path) -> list[Compared]:
    """Run a scene for all seeds, retrain every coalition, and return both by seed."""
    described = experiment(SCENES[name], SCENES[name].get("partition", {}).get("clients", clients), rounds)
    run(described, out=folder, seeds=list(range(1, seeds + 1)))
    problem = Repetition(folder).retrain(ContributionSettings())
    assert not problem, problem
    flaws = History(folder).flaws
    stored = [each for each in read_values(folder) if each.found.method == "shapley"]
    found: list[Compared] = []
    for seed in range(1, seeds + 1):
        mine = [each for each in stored if each.seed == seed]
        names = sorted({client for each in mine for client in each.found.clients})
        guess, error = _value([each for each in mine if each.source != RETRAINED], names)
        truth, _ = _value([each for each in mine if each.source == RETRAINED], names)
        here = flaws[flaws["seed"] == seed] if len(flaws) else flaws
        words = dict(zip(here["client"], here["flaw"], strict=True)) if len(here) else {}
        apart: list[float] = []
        for copy, said in words.items():
            original = next((each for each in names if each != copy and each in said), None)
            if "copy" in name and copy in names and original is not None:
                difference = abs(guess[names.index(copy)] - guess[names.index(original)])
                apart.append(float(difference / np.abs(truth).mean()))
        found.append(Compared(guess, error, truth, np.array([client in words for client in names]), apart))
    return found


def _value(stored: list[Any], names: list[str]) -> tuple[Floats, Floats]:
    series = Series.of(stored, names, sorted({each.round for each in stored}))
    return add_over_rounds(series)


def summed_up(name: str, pairs: list[Compared], seconds: float) -> Scene:
    """Return the figures of a scene."""
    intervals = [widened(*over_seeds([(each.guess, each.error)])) for each in pairs]
    covered = [
        (low <= each.truth) & (each.truth <= high) for each, (_, low, high) in zip(pairs, intervals, strict=True)
    ]
    narrow = [np.abs(each.guess - each.truth) <= Z * each.error for each in pairs]
    related = [float(np.corrcoef(each.guess, each.truth)[0, 1]) for each in pairs]
    errors = [np.abs(each.guess - each.truth) / np.abs(each.truth).mean() for each in pairs]
    some = [each for each in pairs if each.flawed.any()]
    last = [float(each.guess[each.flawed].max() < each.guess[~each.flawed].min()) for each in some]
    zero = [low[each.flawed] <= 0 for each, (_, low, _) in zip(pairs, intervals, strict=True) if each.flawed.any()]
    copies = [share for each in pairs for share in each.apart]
    return Scene(
        name,
        float(np.concatenate(covered).mean()),
        float(np.concatenate(narrow).mean()),
        float(np.mean(related)),
        float(np.median(np.concatenate(errors))),
        float(np.mean(last)) if some else None,
        float(np.concatenate(zero).mean()) if some else None,
        None if not copies else float(np.median(copies)),
        seconds,
    )


def main(seeds: int = 20, rounds: int = 10, clients: int = 6, only: str = "") -> None:
    """Run the scenes and print their table."""
    scenes: list[Scene] = []
    for name in SCENES:
        if only.replace("_", " ") in name:
            with tempfile.TemporaryDirectory() as scratch:
                begun = time.perf_counter()
                pairs = try_scene(name, seeds, clients, rounds, Path(scratch) / "run")
                scenes.append(summed_up(name, pairs, time.perf_counter() - begun))
            print(scenes[-1], flush=True)
    print(table([{key: _cell(key, value) for key, value in asdict(scene).items()} for scene in scenes], COLUMNS))
    print(f"{seeds} seeds, {rounds} rounds, {sum(scene.seconds for scene in scenes):.0f} s; {machine()}")


COLUMNS = {
    "name": "scene",
    "coverage": "interval holds the truth",
    "narrow": "without the method's error",
    "correlation": "correlation",
    "error": "median error",
    "flawed_last": "flawed last",
    "holds_zero": "holds 0 or below",
    "alike": "copy and original apart",
}


def _cell(key: str, value: Any) -> Any:
    if value is None:
        return "–"
    return value if key in ("name", "correlation") else f"{value:.1%}" if key == "alike" else f"{value:.0%}"


if __name__ == "__main__":
    start(main)
