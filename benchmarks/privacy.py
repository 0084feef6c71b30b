"""What a promise costs in accuracy: MNIST under client-level noise at several budgets, plain and weighed rules.

    python -m benchmarks.privacy OUT --seeds 3             # central noise at ε = 1, 2, 4, 8, 16 and none; local noise
    python -m benchmarks.privacy OUT --table               # the tables of docs/results/privacy.md from what OUT holds

Small clients of unequal worth in number: 2,000 with about 30 rows each, Dirichlet over labels, a tenth of them a round.
Every cell is a run folder; what is there already is not run again, so the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from steelyard import UserError
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.runs.reader import History

EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)
ROUNDS = 100
RULES: dict[str, dict[str, Any]] = {
    # The cap is what the noise must cover: with an equal say nobody passes 1/m, so EQ needs the least noise.
    "EQ": {"criteria": ["EQ"], "max_shares": 1.0},
    "DS (FedAvg)": {"criteria": ["DS"], "max_shares": 2.0},
    "LD>DS": {"criteria": ["LD", "DS"], "normalise": "max", "max_shares": 1.5},
    "MD": {"criteria": ["MD"], "max_shares": 1.5},
}
REFERENCES = {"DS": 30.0, "LD": 6.0, "MD": 0.8}


def experiment(cell: str, clients: int, rounds: int, seed: int, rules: list[str]) -> dict[str, Any]:
    """Return the document of one cell: "none", "central-4", "cohort-4", "local-4"."""
    main, *beside = [(name, RULES[name]) for name in rules]
    document: dict[str, Any] = {
        "name": f"privacy-{cell}",
        "seed": seed,
        "data": {"source": "mnist"},
        "partition": {"scheme": "dirichlet", "alpha": 1.0, "clients": clients, "minimum": 2, "test": "held-out"},
        "model": {"name": "mlp", "hidden": [32]},
        "training": {"learning_rate": 0.1, "epochs": 2, "batch_size": 10},
        "rounds": {"count": rounds, "fraction": 0.1, "sampling": "poisson", "evaluate_every": 10, "min_clients": 0},
        "store": {"checkpoint_every": 1000, "clients_every": 1000},
        "weighing": {**main[1], "name": main[0]},
        "beside": {name: {**rule, "name": name} for name, rule in beside},
    }
    kind, _, epsilon = cell.partition("-")
    budget = {"epsilon": float(epsilon or 1), "delta": 1e-5}
    if kind == "central":
        document["privacy"] = {"central": {"clip": CLIP, "references": REFERENCES}, "budget": budget}
    elif kind == "cohort":
        central = {"clip": CLIP, "weights": "cohort", "cohorts": "public"}
        document["privacy"] = {"central": central, "criteria": "public", "budget": budget}
        document["beside"].pop("MD", None)  # comes out of the training, so it cannot be public
    elif kind == "local":
        document["privacy"] = {"local": {"clip": CLIP}, "criteria": "public", "budget": budget}
    return document


CLIP = 0.5


def cells() -> list[str]:
    """Return all cells, the most wanted first."""
    central = [f"central-{epsilon:g}" for epsilon in (8.0, 2.0, 1.0, 16.0, 4.0)]
    # A device that is asked a hundred times needs an ε in the thousands before anything is learnt.
    return ["none", *central, "local-8", "local-1000", "cohort-8", "local-10000", "local-100"]


def main() -> None:
    """Run what is missing, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cells", default="")
    parser.add_argument("--rules", default=",".join(RULES), help="fewer for noise on devices, where each costs minutes")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no cell after so long")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(options.out))
        return
    begun = time.monotonic()
    for cell in options.cells.split(",") if options.cells else cells():
        folder = options.out / cell
        if (options.out / f"{cell}.json").exists() or time.monotonic() - begun > 60 * options.minutes:
            continue
        shutil.rmtree(folder, ignore_errors=True)  # begun and not ended
        started = time.monotonic()
        described = build(experiment(cell, options.clients, options.rounds, 1, options.rules.split(",")), "benchmark")
        try:
            run(described, out=folder, seeds=list(range(1, options.seeds + 1)), progress=True)
        except UserError as error:
            print(f"{cell}: {error}", flush=True)
            continue
        seconds = time.monotonic() - started
        (options.out / f"{cell}.json").write_text(json.dumps({**account(folder), "seconds": seconds}))
        print(f"{cell}: {seconds:.0f} s", flush=True)


def account(folder: Path) -> dict[str, Any]:
    """Return the last accuracies by rule, one per seed, with what was spent."""
    history = History(folder)
    found: dict[str, Any] = {"accuracy": {}, "epsilon": {}}
    for (rule, _), mine in history.rounds.groupby(["rule", "seed"], sort=False):
        known = mine[mine["accuracy"].notna()]
        found["accuracy"].setdefault(rule, []).append(float(known["accuracy"].iloc[-1]))
        spent = mine["epsilon"].iloc[-1]
        found["epsilon"].setdefault(rule, []).append(None if spent is None else float(spent))
    return found | {"promise": json.loads(history.info.get("privacy", "null"))}


def table(out: Path) -> str:
    """Return accuracies against ε as a table in Markdown."""
    lines = [f"| noise | ε | z | {' | '.join(RULES)} |", "|---" * (len(RULES) + 3) + "|"]
    known = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    for name in sorted(known, key=lambda cell: (cell.partition("-")[0], -float(cell.partition("-")[2] or math.inf))):
        document = known[name]
        kind, _, epsilon = name.partition("-")
        noise = sorted(set((document["promise"] or {}).get("noise", {}).values()))
        texts: list[str] = []
        for rule in RULES:
            values = 100 * np.array(document["accuracy"].get(rule, []))
            spread = f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else ""
            texts.append(f"{values.mean():.1f}{spread}" if len(values) else "–")
        shown = f"{noise[0]:.3g}" if noise else "–"
        lines.append(f"| {kind} | {epsilon or '–'} | {shown} | {' | '.join(texts)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
