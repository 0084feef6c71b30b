"""Seconds of a round by the number of processes: `python -m benchmarks.ranks [--ranks 1,2,4,8,16] [--bench A]`.

Whole rounds of the product, tests on all clients among them, on the simulator's benchmarks A (convolutional network of
1.7 million parameters, 10 clients of 600 rows), B (6.6 million, 37 clients of 200 rows) and C (small network, 1,000
clients of 20 rows), each with all cores of the machine, by torchrun. The first round, in which the engine is chosen, is
not counted. The last line is JSON. With --device cuda and one GPU the ranks share it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import tomli_w

from benchmarks.simulators.work import BENCHES, Bench, make_data
from steelyard.runs.history import History


def experiment(bench: Bench, data: Path, device: str, engine: str, rounds: int) -> str:
    """Return a benchmark of the simulator as an experiment file."""
    model = {"name": "cnn-mnist"} if bench.convolutional else {"name": "mlp", "hidden": [bench.hidden]}
    return tomli_w.dumps(
        {
            "name": f"ranks-{bench.name}",
            "data": {"source": "npz", "path": str(data), "features": "x", "labels": "y"},
            "partition": {"scheme": "iid", "clients": bench.clients, "test": "local", "test_fraction": 0.1},
            "model": model,
            "training": {"learning_rate": bench.rate, "epochs": bench.epochs, "batch_size": bench.batch},
            "rounds": {"count": rounds, "fraction": bench.cohort / bench.clients},
            "store": {"checkpoint_every": rounds},
            "compute": {"device": device, "engine": engine},
            "weighing": {"criteria": ["DS", "LD", "MD"]},
        }
    )


def write_data(bench: Bench, path: Path) -> None:
    """Write the images of a benchmark as an npz file."""
    data = make_data(bench)
    side = (-1, 28, 28) if bench.convolutional else (-1, 784)
    np.savez(path, x=data.features.reshape(side), y=data.labels)


def measure(ranks: int, described: Path, folder: Path) -> dict[str, float]:
    """Run an experiment on so many ranks; return seconds of a round, and gigabytes that rank 0 took at most."""
    python = [sys.executable, "-m"]
    several = [*python, "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    words = ["steelyard", "-q", "run", str(described), "--out", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run([*(several if ranks > 1 else python), *words], check=True, stdout=subprocess.PIPE, env=environment)
    history = History(folder)
    seconds = history.rounds.query("round > 1")["seconds"]
    return {"ranks": ranks, "seconds": statistics.median(seconds), "gigabytes": float(history.info["memory_peak_gb"])}


def main() -> None:
    """Print a table, then all of it as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,4,8,16", help="numbers of processes")
    parser.add_argument("--bench", default="A", choices=sorted(BENCHES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="local epochs; default: the benchmark's")
    parser.add_argument("--clients", type=int, help="registered clients; default: the benchmark's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="auto")
    given = parser.parse_args()
    bench = BENCHES[given.bench]
    clients = given.clients or bench.clients
    bench = replace(bench, epochs=given.epochs or bench.epochs, clients=clients, cohort=min(bench.cohort, clients))
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as place:
        data, described = Path(place) / "data.npz", Path(place) / "experiment.toml"
        write_data(bench, data)
        text = experiment(bench, data, given.device, given.engine, given.rounds)
        described.write_text(text, encoding="utf-8")
        print(f"bench {given.bench}, {given.device}, {os.cpu_count()} cores\nranks  s a round  times  GB of rank 0")
        for ranks in map(int, given.ranks.split(",")):
            one = measure(ranks, described, Path(place) / f"ranks-{ranks}")
            found.append(one)
            times = found[0]["seconds"] / one["seconds"]
            print(f"{ranks:5}  {one['seconds']:9.3f}  {times:5.2f}  {one['gigabytes']:12.2f}", flush=True)
    print(json.dumps({"bench": given.bench, "device": given.device, "cores": os.cpu_count(), "found": found}))


if __name__ == "__main__":
    main()
