"""One round of MNIST under every protection: accuracy, time and bytes in one table.

    python -m benchmarks.private_round OUT                    # every cell that OUT/cells.jsonl does not hold yet
    python -m benchmarks.private_round OUT --table            # the table of docs/results/privacy-costs.md

100 clients with 600 random rows each, one local epoch in batches of 10, ten or all hundred of them in the round, equal
weights (FedAvg, as all are of one size). Every cell is a run of its own through the product's own loop, from the same
start and with the same clients; its line is written when it ends. After --minutes no cell is begun.
"""

from __future__ import annotations

import json
import platform
import shutil
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.kit import Kept, start, table, whole_numbers, words
from steelyard.base.measures import estimate, show_estimate
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.runs.history import History

MODELS: dict[str, dict[str, Any]] = {
    "cnn": {"name": "cnn-mnist"},
    "mlp": {"name": "mlp", "hidden": [32]},
}
PARAMETERS = {"cnn": 1_663_370, "mlp": 25_450}
CLIP = {"cnn": 1.0, "mlp": 1.0}
EPSILON, DELTA = 8.0, 1e-5
PROTECTIONS = ("plain", "central", "local", "secure", "ckks")
ENCRYPTED = {"ckks": 1}
NAMES = {
    "plain": "in the open",
    "central": "central noise",
    "local": "local noise",
    "secure": "secure aggregation",
    "ckks": "CKKS",
}


TITLES = ("network", "clients", "", "test accuracy", "round", "a client sends")


def privacy(protection: str, clip: float) -> dict[str, Any] | None:
    """Return the section that asks for a protection; None in the open."""
    budget = {"epsilon": EPSILON, "delta": DELTA}
    if protection == "central":
        # Public cohorts: the same clients as in every other row, and one release of which nothing is amplified.
        central = {"clip": clip, "cohorts": "public", "references": {"DS": 600.0}}
        return {"central": central, "budget": budget}
    if protection == "local":
        return {"local": {"clip": clip}, "criteria": "public", "budget": budget}
    return None if protection == "plain" else {"aggregation": {"kind": protection}}


def experiment(model: str, protection: str, clients: int, seed: int, samples: int = 600) -> dict[str, Any]:
    """Return the document of one round of `clients` of 100 clients."""
    document: dict[str, Any] = {
        "name": f"round-{model}-{protection}-{clients}",
        "seed": seed,
        "data": {"source": "mnist"},
        "partition": {"scheme": "iid", "clients": 100, "samples": samples, "test": "held-out", "test_samples": 100},
        "model": MODELS[model],
        "training": {"learning_rate": 0.1, "epochs": 1, "batch_size": 10},
        "rounds": {"count": 1, "fraction": clients / 100},
        "weighing": {"criteria": ["DS"], "max_shares": 1.0},
    }
    asked = privacy(protection, CLIP[model])
    return document if asked is None else {**document, "privacy": asked}


def cells(cohorts: list[int], models: list[str], protections: list[str]) -> list[tuple[str, str, int]]:
    """Return all cells, the cheap ones first; encryption among ten clients only, as its cost is one of each client."""
    some = [(model, kind, count) for model in models for count in cohorts for kind in protections]
    kept = [cell for cell in some if cell[1] not in ENCRYPTED or cell[2] == min(cohorts)]
    return sorted(kept, key=lambda cell: (ENCRYPTED.get(cell[1], 0), cell[2] * PARAMETERS[cell[0]]))


def measure(folder: Path, model: str, protection: str, clients: int, seed: int, samples: int) -> dict[str, Any]:
    """Run one round and return what it reached, took and sent."""
    shutil.rmtree(folder, ignore_errors=True)
    run(build(experiment(model, protection, clients, seed, samples), "benchmark"), out=folder)
    history = History(folder)
    last = history.rounds.iloc[-1]
    (rule,) = history.rounds["rule"].unique()
    sent = history.cohorts(str(rule), seed).bytes
    noise = json.loads(history.info.get("privacy", "null"))
    found = {
        "model": model,
        "protection": protection,
        "clients": clients,
        "seed": seed,
        "accuracy": float(last["accuracy"]),
        "seconds": float(last["seconds"]),
        "bytes": float(sent.max()) if np.isfinite(sent).any() else 4.0 * PARAMETERS[model],
        "epsilon": None if last["epsilon"] is None else float(last["epsilon"]),
        "promise": noise,
        "samples": samples,
        "machine": machine(),
    }
    shutil.rmtree(folder, ignore_errors=True)
    return found


def machine() -> str:
    """Return what the round was computed on."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"{torch.get_num_threads()} threads"
    return f"{platform.machine()}, {device}"


def costs(lines: list[dict[str, Any]]) -> str:
    """Return the cells as a table in Markdown: means over the seeds, medians of the times."""
    rows: list[dict[str, str]] = []
    for model in MODELS:
        for clients in sorted({line["clients"] for line in lines}):
            for kind in PROTECTIONS:
                mine = [x for x in lines if (x["model"], x["clients"], x["protection"]) == (model, clients, kind)]
                if not mine:
                    continue
                accuracy = [100 * line["accuracy"] for line in mine]
                seconds = statistics.median(line["seconds"] for line in mine)
                size = mine[0]["bytes"]
                shown = f"{size / 1e6:.3f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
                found = (model, str(clients), NAMES[kind], f"{show_estimate(estimate(accuracy))} %")
                rows.append(dict(zip(TITLES, (*found, f"{seconds:.1f} s", shown), strict=True)))
    return table(rows)


def main(
    out: Annotated[Path, typer.Argument()],
    models: str = "cnn,mlp",
    clients: str = "10,100",
    protections: str = ",".join(PROTECTIONS),
    seeds: int = 3,
    samples: Annotated[int, typer.Option(help="rows of a client; fewer for a trial")] = 600,
    minutes: Annotated[float, typer.Option(help="begin no cell after so long")] = 15.0,
    only_table: Annotated[bool, typer.Option("--table")] = False,
) -> None:
    """Run what is missing, or print the table."""
    kept = Kept(out / "cells.jsonl")
    if only_table:
        print(costs(kept.lines))
        return
    known = {(x["model"], x["protection"], x["clients"], x["seed"]) for x in kept.lines}
    begun = time.monotonic()
    for model, kind, count in cells(whole_numbers(clients), words(models), words(protections)):
        # Encryption moves the model by rounding alone, which one seed shows; its time is that of a machine.
        for seed in range(1, 2 if kind in ENCRYPTED else seeds + 1):
            if (model, kind, count, seed) in known or time.monotonic() - begun > 60 * minutes:
                continue
            found = measure(out / "run", model, kind, count, seed, samples)
            kept.add(found)
            print(f"{model} {kind} {count} {seed}: {found['accuracy']:.4f} in {found['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    start(main)
