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

TF32 = ("--set", "compute.precision=tf32")
BF16 = ("--set", "compute.precision=bfloat16")
MNIST = ("--seeds", "3", "--set", "rounds.count=300", *BF16)
ORDERS = "DS,MD>DS>LD,online(MD>DS>LD)"
FACES = "DS,CB,online(DS>CB>IS)"
PARTS: dict[str, tuple[str, ...]] = {
    "mnist-noniid": ("mnist-noniid", *MNIST),
    "mnist-iid": ("mnist-iid", *MNIST),
    "unipen62": ("unipen62", "--seeds", "3", "--rules", ORDERS, "--set", "rounds.count=100", *TF32),
    "celeba": ("celeba", "--seeds", "3", "--rules", FACES, "--set", "compute.memory_gb=95", *TF32),
    "adafed-1": ("adafed-1", "--seeds", "5", *TF32),
    "adafed-2": ("adafed-2", "--seeds", "5", *TF32),
    "adafed-3": ("adafed-3", "--seeds", "5", *TF32),
    "adafed-regression": ("adafed-regression", "--seeds", "10", "--set", "compute.device=cpu"),
}
# The papers give no learning rate for CelebA and AdaFed: these short runs of the baseline choose it.
for rate in ("0.01", "0.03", "0.1", "0.2"):
    chosen = ("--set", "rounds.count=30", "--set", f"training.learning_rate={rate}", *TF32)
    PARTS[f"grid-celeba-{rate}"] = ("celeba", "--rules", "DS", *chosen)
for rate in ("0.01", "0.03", "0.1"):
    PARTS[f"grid-adafed-{rate}"] = ("adafed-2", "--set", f"training.learning_rate={rate}", *TF32)


def run_part(name: str, out: Path, seconds: float, extra: list[str]) -> dict[str, Any]:
    """Run one part, stop it when its time is up, and keep its curves."""
    folder = Path(tempfile.mkdtemp(prefix="steelyard-results-")) / name
    recipe, *rest = PARTS[name]
    command = ["steelyard", "compare", recipe, *extra, *rest]
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
        kept = folder.parent if name.startswith("grid-") else out
        return {**told, **keep(folder, kept / f"{name}.npz", told)}
    except Exception as error:
        return {**told, "error": f"{type(error).__name__}: {error}"}


def keep(folder: Path, path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Write the curves of a run folder and what is known of the run into one file."""
    from steelyard.experiment.loading import read_experiment
    from steelyard.report.comparison import find_baseline
    from steelyard.report.curves import read_curves
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
    final = {
        f"{head['rule']}#{head['seed']}": round(float(arrays[f"overall{i}"][-1]), 4) for i, head in enumerate(heads)
    }
    return {**shown, "final": final}


def tables(name: str, paths: list[Path]) -> None:
    """Write the tables of one part, or of the runs that make it up, as Markdown and JSON."""
    from steelyard.report.comparison import Curve, describe
    from steelyard.report.tables import write_tables

    curves: list[Curve] = []
    about: dict[str, Any] = {}
    for path in paths:
        with np.load(path, allow_pickle=False) as kept:
            about = json.loads(str(kept["about"]))
            for place, head in enumerate(about.pop("curves")):
                parts = {name: kept[f"{name}{place}"] for name in ("rounds", "scores", "overall")}
                curves.append(Curve(**head, **parts, hits=kept.get(f"hits{place}")))
    document = about | describe(curves, about["baseline"], about["targets"], about["shares"], about["limit"])
    (paths[0].parent / f"{name}.json").write_text(json.dumps(document))
    (paths[0].parent / f"{name}.md").write_text(write_tables(document, "markdown"))


def main() -> None:
    """Read the options, run the parts, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, with commas")
    parser.add_argument("--seconds", default="600", help="time limit of each part, or one per part, with commas")
    parser.add_argument("--total", type=float, default=86400.0, help="time limit of everything, in seconds")
    parser.add_argument("--jobs", type=int, default=1, help="parts that run at the same time")
    parser.add_argument("--set", action="append", default=[], help="further changes, as for steelyard compare")
    parser.add_argument("--tables", action="store_true", help="only write the tables of what is there")
    options = parser.parse_args()
    if options.tables:
        found: dict[str, list[Path]] = {}
        for path in sorted(options.out.glob("*.npz")):
            found.setdefault(path.stem.split("-seed")[0], []).append(path)
        for name, paths in found.items():
            tables(name, paths)
        return
    names = options.parts.split(",")
    limits = [float(part) for part in options.seconds.split(",")]
    limits = limits * len(names) if len(limits) == 1 else limits
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.perf_counter() + options.total

    def work(name: str, seconds: float) -> dict[str, Any]:
        left = ends - time.perf_counter()
        return run_part(name, options.out, min(seconds, left), extra) if left > 5 else {"part": name, "left out": True}

    extra = [word for change in options.set for word in ("--set", change)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for told in pool.map(work, names, limits):
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
