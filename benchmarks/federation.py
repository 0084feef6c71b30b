"""Where the time of a federation goes: `python -m benchmarks.federation [--nodes N] [--rounds R] [--tls]`.

A small model on nodes of this machine, as `steelyard federate local` runs it. The last line is JSON: seconds to the
first tested model, the median and the longest round after it, and the whole with starting and ending.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 0.02


def measure(nodes: int, rounds: int, *, tls: bool) -> dict[str, Any]:
    """Run one federation and return its times."""
    from steelyard.experiment.loading import build
    from steelyard.federate.local import run_local
    from steelyard.federate.local_follow import rounds_of

    described = build(
        {
            "name": "small",
            "partition": {"scheme": "iid", "clients": 2 * nodes},
            "model": {"name": "logistic"},
            "rounds": {"count": rounds, "fraction": 1.0},
            "compute": {"engine": "loop", "device": "cpu"},
        }
    )
    stored: dict[int, float] = {}
    done = threading.Event()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"

        def watch() -> None:
            while not done.wait(_LOOK_SECONDS):
                stored.setdefault(rounds_of(folder)[0], time.perf_counter())

        watcher = threading.Thread(target=watch, daemon=True)
        begun = time.perf_counter()
        watcher.start()
        run_local(described, nodes=nodes, tls=tls, out=folder)
        ended = time.perf_counter()
        done.set()
        watcher.join()
        stored.setdefault(rounds_of(folder)[0], ended)
    times = [stored[round] for round in sorted(stored) if round >= 0]
    each = [later - earlier for earlier, later in itertools.pairwise(times)]
    return {
        "nodes": nodes,
        "rounds": rounds,
        "tls": tls,
        "load": os.getloadavg()[0],
        "first_model_sec": round(times[0] - begun, 2),
        "median_round_sec": round(statistics.median(each), 2),
        "longest_round_sec": round(max(each), 2),
        "total_sec": round(ended - begun, 2),
    }


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tls", action="store_true")
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.nodes, chosen.rounds, tls=chosen.tls)))


if __name__ == "__main__":
    main()
