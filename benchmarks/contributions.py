"""How far the values of `steelyard contributions` can be trusted: estimates against retrained coalitions.

    python -m benchmarks.contributions --seeds 20 --out docs/results/contributions.md

Each scene is run once for all seeds with [contributions], then all coalitions are retrained. A client's estimate covers
the truth where its interval overlaps the retrained value.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.contributions.intervals import Series, add_over_rounds
from steelyard.contributions.retraining import retrain
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.rounds.contributions import ContributionSettings
from steelyard.runs.reader import History
from steelyard.runs.valued import RETRAINED, read_values
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
}


@dataclass(frozen=True)
class Scene:
    """What came of one scene."""

    name: str
    coverage: float
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
    """Return a scene on digits: six clients of unequal size, plain FedAvg, loss on the server's rows."""
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


def try_scene(name: str, seeds: int, clients: int, rounds: int, folder: Path) -> Scene:
    """Run a scene for all seeds, retrain every coalition, and hold the two against each other."""
    begun = time.perf_counter()
    described = experiment(SCENES[name], SCENES[name].get("partition", {}).get("clients", clients), rounds)
    run(described, out=folder, seeds=list(range(1, seeds + 1)))
    problem = retrain(folder, ContributionSettings())
    assert not problem, problem
    history = History(folder)
    stored = [each for each in read_values(folder) if each.found.method == "shapley"]
    flaws = history.flaws
    pairs: list[tuple[Floats, Floats, Floats, Floats]] = []
    copies: list[float] = []
    for seed in range(1, seeds + 1):
        mine = [each for each in stored if each.seed == seed]
        names = sorted({client for each in mine for client in each.found.clients})
        guess, error = _value([each for each in mine if each.source != RETRAINED], names)
        truth, _ = _value([each for each in mine if each.source == RETRAINED], names)
        known = set(flaws[flaws["seed"] == seed]["client"]) if len(flaws) else set[str]()
        flawed = np.array([client in known for client in names])
        pairs.append((guess, error, truth, flawed))
        here = flaws[flaws["seed"] == seed] if "copy" in name else flaws[:0]
        words = dict(zip(here["client"], here["flaw"], strict=True))
        for copy, said in words.items():
            original = next((each for each in names if each != copy and each in said), None)
            if copy in names and original is not None:
                apart = abs(guess[names.index(copy)] - guess[names.index(original)])
                copies.append(float(apart / np.abs(truth).mean()))
    return _scene(name, pairs, copies, time.perf_counter() - begun)


def _value(stored: list[Any], names: list[str]) -> tuple[Floats, Floats]:
    series = Series.of(stored, names, sorted({each.round for each in stored}))
    return add_over_rounds(series)


def _scene(name: str, pairs: list[tuple[Floats, Floats, Floats, Floats]], copies: list[float], seconds: float) -> Scene:
    covered = [np.abs(guess - truth) <= Z * error for guess, error, truth, _ in pairs]
    related = [float(np.corrcoef(guess, truth)[0, 1]) for guess, _, truth, _ in pairs]
    errors = [np.abs(guess - truth) / np.abs(truth).mean() for guess, _, truth, _ in pairs]
    some = [pair for pair in pairs if pair[3].any()]
    last = [float(guess[flawed].max() < guess[~flawed].min()) for guess, _, _, flawed in some]
    zero = [guess[flawed] - Z * error[flawed] <= 0 for guess, error, _, flawed in some]
    return Scene(
        name,
        float(np.concatenate(covered).mean()),
        float(np.mean(related)),
        float(np.median(np.concatenate(errors))),
        float(np.mean(last)) if some else None,
        float(np.concatenate(zero).mean()) if some else None,
        None if not copies else float(np.median(copies)),
        seconds,
    )


def page(scenes: list[Scene], seeds: int, rounds: int) -> str:
    """Return the results as Markdown: a verdict, the table, then what it was made with."""
    bad = [scene for scene in scenes if any(word in scene.name for word in ("flipped", "noisy", "free rider"))]
    good = [scene for scene in scenes if scene not in bad]
    lines = [
        "# What each client added: estimate against retrained truth",
        "",
        f"Where clients are flawed, the interval holds the retrained value for {_range(bad)} of the clients. "
        f"Elsewhere it holds it for {_range(good)}: read those values as an order, not as amounts.",
        "",
        "| scene | interval holds the truth | correlation | median error | flawed last | holds 0 or below |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {scene.name} | {scene.coverage:.0%} | {scene.correlation:.2f} | {scene.error:.0%} | "
        f"{_cell(scene.flawed_last)} | {_cell(scene.holds_zero)} |"
        for scene in scenes
    ]
    copies = [scene.alike for scene in scenes if scene.alike is not None]
    lines += [
        "",
        "The median error is a share of the mean absolute true value. Correlations are means over seeds, over clients.",
        "Flawed last: how often every flawed client stands below all others.",
        *(f"A copy and its original differ by {value:.1%} of the mean value in the median." for value in copies),
        "",
        f"Digits, six clients, {rounds} rounds, {seeds} seeds, FedAvg, loss on the server's rows; all coalitions were "
        "retrained.",
        f"Made with `python -m benchmarks.contributions --seeds {seeds} --rounds {rounds}` in "
        f"{sum(scene.seconds for scene in scenes):.0f} s on {os.cpu_count()} cores ({platform.machine()}).",
        "",
    ]
    return "\n".join(lines)


def _range(scenes: list[Scene]) -> str:
    found = [scene.coverage for scene in scenes]
    return f"{min(found):.0%} to {max(found):.0%}" if found else "none"


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def main() -> None:
    """Run the scenes and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--only", default="", help="scenes whose names hold this")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    scenes: list[Scene] = []
    for name in SCENES:
        if given.only.replace("_", " ") in name:
            with tempfile.TemporaryDirectory() as scratch:
                scenes.append(try_scene(name, given.seeds, given.clients, given.rounds, Path(scratch) / "run"))
            print(scenes[-1], flush=True)
    text = page(scenes, given.seeds, given.rounds)
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
