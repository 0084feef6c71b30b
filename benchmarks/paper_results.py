"""Run the papers' experiments and keep what their tables are made of: where docs/results comes from.

    python benchmarks/paper_results.py results --parts mnist-noniid,mnist-iid --seconds 300
    python benchmarks/paper_results.py results --tables

Each part is one `steelyard compare`, printed before it runs. A part that outlasts its time is stopped as a user would
stop it; its table is then made of the rounds that it finished, and says so. A part leaves one .npz with its curves;
`--tables` writes a Markdown and a JSON file beside each, without running anything.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

FAST = ("--set", "compute.precision=tf32")
ORDERS = "DS,MD>DS>LD,online(MD>DS>LD)"
PARTS: dict[str, tuple[str, ...]] = {
    "mnist-noniid": ("mnist-noniid", "--seeds", "3", "--set", "rounds.count=300", *FAST),
    "mnist-iid": ("mnist-iid", "--seeds", "3", "--set", "rounds.count=300", *FAST),
    "unipen62": ("unipen62", "--seeds", "3", "--rules", ORDERS, "--set", "rounds.count=100", *FAST),
    "celeba": ("celeba", "--seeds", "3", *FAST),
    "adafed-1": ("adafed-1", "--seeds", "5"),
    "adafed-2": ("adafed-2", "--seeds", "5"),
    "adafed-3": ("adafed-3", "--seeds", "5"),
    "adafed-regression": ("adafed-regression", "--seeds", "10", "--set", "compute.device=cpu"),
}


def run_part(name: str, out: Path, seconds: float, extra: list[str]) -> dict[str, Any]:
    """Run one part, stop it when its time is up, and keep its curves."""
    folder = Path(tempfile.mkdtemp(prefix="steelyard-results-")) / name
    command = ["steelyard", "compare", *PARTS[name], *extra]
    print(f"{name}: {' '.join(command)}", flush=True)
    begun = time.perf_counter()
    call = [sys.executable, "-m", *command, "--out", str(folder)]
    with (out / "log.txt").open("a") as log:
        process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGINT)
            process.wait(timeout=60)
    told = {"part": name, "command": " ".join(command), "seconds": round(time.perf_counter() - begun, 1)}
    try:
        return {**told, **keep(folder, out / f"{name}.npz", told)}
    except Exception as error:
        return {**told, "error": f"{type(error).__name__}: {error}"}


def keep(folder: Path, path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Write the curves of a run folder and what is known of the run into one file."""
    from steelyard.experiment.running import read_experiment
    from steelyard.report.comparison import find_baseline, read_curves
    from steelyard.runs.reader import History

    history, rounds = History(folder), read_experiment(folder).rounds
    arrays: dict[str, np.ndarray] = {}
    heads: list[dict[str, Any]] = []
    for place, curve in enumerate(read_curves(history)):
        rest = {"tests": curve.tests, "orders": dict(curve.orders), "server": dict(curve.server)}
        heads.append({"rule": curve.rule, "seed": curve.seed, **rest})
        arrays |= {f"rounds{place}": curve.rounds, f"scores{place}": curve.scores, f"overall{place}": curve.overall}
        if curve.hits is not None:
            arrays[f"hits{place}"] = curve.hits
    facts = {key: history.info[key] for key in ("status", "device", "engine_choice", "notes") if key in history.info}
    shown = {"rounds": max(int(arrays[f"rounds{i}"][-1]) for i in range(len(heads))), **facts}
    about = {
        **told,
        **shown,
        "limit": rounds.count,
        "targets": rounds.all_targets,
        "shares": rounds.shares,
        "baseline": find_baseline(history, None),
        "curves": heads,
    }
    np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)
    return shown


def tables(path: Path) -> None:
    """Write the tables of one part as Markdown and JSON."""
    from steelyard.report.comparison import Curve, describe
    from steelyard.report.tables import write_tables

    with np.load(path, allow_pickle=False) as kept:
        about = json.loads(str(kept["about"]))
        curves = [
            Curve(
                rounds=kept[f"rounds{place}"],
                scores=kept[f"scores{place}"],
                overall=kept[f"overall{place}"],
                hits=kept.get(f"hits{place}"),
                **head,
            )
            for place, head in enumerate(about.pop("curves"))
        ]
    document = about | describe(curves, about["baseline"], about["targets"], about["shares"], about["limit"])
    path.with_suffix(".json").write_text(json.dumps(document))
    path.with_suffix(".md").write_text(write_tables(document, "markdown"))


def main() -> None:
    """Read the options, run the parts, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, with commas")
    parser.add_argument("--seconds", default="600", help="time limit of each part, or one per part, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="parts that run at the same time")
    parser.add_argument("--set", action="append", default=[], help="further changes, as for steelyard compare")
    parser.add_argument("--tables", action="store_true", help="only write the tables of what is there")
    options = parser.parse_args()
    if options.tables:
        for path in sorted(options.out.glob("*.npz")):
            tables(path)
        return
    names = options.parts.split(",")
    limits = [float(part) for part in options.seconds.split(",")]
    limits = limits * len(names) if len(limits) == 1 else limits
    options.out.mkdir(parents=True, exist_ok=True)
    extra = [word for change in options.set for word in ("--set", change)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for told in pool.map(lambda name, seconds: run_part(name, options.out, seconds, extra), names, limits):
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
