"""The tables of docs/results/recommend.md: four modes, the curve over π, and the baselines, as JSON lines.

    python -m benchmarks.recommend_tables modes fpl-amazon --epochs 10,20,30,40,50
    python -m benchmarks.recommend_tables shares fpl-amazon --mode pFPL+ --epochs 50
    python -m benchmarks.recommend_tables baselines fpl-amazon

A recipe's runs go through the round loop as `steelyard run` does; only nothing is stored. One line is printed per
system and epoch, with all metrics at 10 and what was sent.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from steelyard.experiment.loading import load
from steelyard.experiment.recommend import RecommendDescription
from steelyard.experiment.running import federations_of, plan_of
from steelyard.recommend.baselines import recommend
from steelyard.recommend.metrics import bias_disparity, measure
from steelyard.recommend.ranking import View
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import RoundRecord, RoundState

CUTOFF = 10
MODES = ("sFPL", "sFPL+", "pFPL", "pFPL+")
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
BASELINES: tuple[tuple[str, Mapping[str, float | int]], ...] = (
    ("random", {}),
    ("popular", {}),
    ("user-knn", {"neighbours": 50}),
    ("item-knn", {"neighbours": 50}),
    ("bpr", {"factors": 20, "rate": 0.05, "decay": 0.0025, "epochs": 50}),
    ("bpr", {"factors": 20, "rate": 0.005, "decay": 0.00025, "epochs": 10}),
    ("vae", {"hidden": 200, "latent": 100, "epochs": 50}),
    ("fcf", {"factors": 20, "epochs": 30}),
)
"""With the settings that are printed; BPR with two learning rates of the thesis' grid."""


def figures(view: View) -> dict[str, Any]:
    """Return the metrics of a view, bias disparity of the ten largest categories, and the popularity curve."""
    found: dict[str, Any] = {name: float(f"{value:.6g}") for name, value in measure(view).items()}
    if view.ground.categories:
        bias = bias_disparity(view)
        size = np.bincount(view.ground.member_category, minlength=len(bias.categories))
        largest = np.argsort(-size, kind="stable")[:10]
        found["bias"] = {bias.categories[i]: round(float(bias.disparity[i]), 3) for i in largest}
    shown = np.sort(view.times_shown)[::-1]
    found["popularity_curve"] = {str(k): round(float(shown[:k].sum() / shown.sum()), 4) for k in (1, 10, 50, 100, 250)}
    return found


class Printer:
    """A recorder that prints a line at the epochs asked for and stores nothing."""

    def __init__(
        self, experiment: RecommendDescription, clients: Any, label: Mapping[str, Any], epochs: set[int]
    ) -> None:
        self.experiment, self.clients, self.label, self.epochs = experiment, clients, label, epochs
        self.each = 1 if experiment.one_by_one else experiment.schedule().rounds_per_epoch
        self.begun = time.perf_counter()

    def commit(
        self,
        round: int,
        records: Sequence[RoundRecord],
        states: Mapping[str, RoundState],
        snapshot: Callable[[], Mapping[str, torch.Tensor]],
        *,
        last: bool,
    ) -> None:
        """Print the figures of the first federation if this round ends an epoch that was asked for."""
        if round == 0 or round % self.each or round // self.each not in self.epochs:
            return
        name = records[0].federation
        lists, _ = self.clients.lists(name, self.experiment.seed, states[name].parameters, CUTOFF)
        sent = self.clients.traffic(name)
        line = {
            **self.label,
            "epoch": round // self.each,
            **figures(self.clients.users.ground.view(lists, CUTOFF)),
            "vectors": sent.vectors,
            "bytes": sent.down_bytes + sent.up_bytes,
            "seconds": time.perf_counter() - self.begun,
        }
        print(json.dumps(line), flush=True)


def federated(recipe: str, changes: list[str], epochs: list[int], **label: Any) -> None:
    """Run one configuration and print it at each of the epochs."""
    last = [f"rounds.epochs={max(epochs)}", f"rounds.evaluate_every={max(epochs)}"]
    experiment = load(recipe, [*changes, *last])
    assert isinstance(experiment, RecommendDescription)
    clients, server = experiment.assemble()
    printer = Printer(experiment, clients, {"recipe": recipe, **label}, set(epochs))
    run_rounds(federations_of(experiment), {}, clients, server, plan_of(experiment), printer)


def centralised(recipe: str, names: list[str]) -> None:
    """Train the baselines on the recipe's split and print them."""
    experiment = load(recipe)
    assert isinstance(experiment, RecommendDescription)
    prepared = experiment.prepare()
    for name, settings in BASELINES:
        if name not in names:
            continue
        begun = time.perf_counter()
        lists, _ = recommend(name, prepared.split.train, CUTOFF, experiment.seed, settings)
        view = prepared.users.ground.view(lists, CUTOFF)
        line = {
            "recipe": recipe,
            "system": name,
            "settings": settings,
            **figures(view),
            "seconds": time.perf_counter() - begun,
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    """Parse and go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("modes", "shares", "baselines"))
    parser.add_argument("recipe")
    parser.add_argument("--epochs", default="50")
    parser.add_argument("--mode", default="", help="one mode in place of all four, or several joined by commas")
    parser.add_argument("--set", action="append", default=[], help="a change of the recipe: fpl.factors=50")
    parser.add_argument("--systems", default=",".join(dict(BASELINES)))
    chosen = parser.parse_args()
    epochs = [int(part) for part in chosen.epochs.split(",")]
    if chosen.table == "baselines":
        centralised(chosen.recipe, chosen.systems.split(","))
        return
    for mode in chosen.mode.split(",") if chosen.mode else MODES:
        for share in SHARES if chosen.table == "shares" else (None,):
            changes = [*chosen.set, f"fpl.mode={mode}", *([] if share is None else [f"fpl.pi={share}"])]
            federated(chosen.recipe, changes, epochs, system=mode, **({} if share is None else {"pi": share}))


if __name__ == "__main__":
    main()
