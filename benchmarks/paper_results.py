"""Run the papers' image experiments, part by part, and keep what their tables and figures are made of.

    python -m benchmarks.paper_results results --parts mnist-noniid,mnist-iid --seconds 300
    python -m benchmarks.paper_pages results

Each part is one `steelyard compare`, printed before it runs, in a run folder of its own under --work. A part that
outlasts its time is stopped as a user would stop it; the same command goes on where it stopped, as long as its run
folder is there. What a part has recorded so far is left in the results folder as one small archive: the run's store
without models and without what single clients sent; `paper_pages` makes tables and figures of the archives.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

TF32 = ("--set", "compute.precision=tf32")
BF16 = ("--set", "compute.precision=bfloat16")
ON_GPU = ("--set", "compute.engine=stacked", "--set", "store.checkpoint_every=50", "--set", "store.clients_every=50")
AUTHORS = ("--set", "model.name=cnn-mnist-authors")
CRITERIA = ("DS", "LD", "MD")
ORDERS = [">".join(order) for order in permutations(CRITERIA)]
FIFTEEN = ",".join([*CRITERIA, *ORDERS, *(f"online({order})" for order in ORDERS)])
"""Paper 003's Table 1: three single criteria, six fixed orders, online adjustment from each of the six."""


def _mnist(recipe: str, rounds: int, *rest: str) -> tuple[str, ...]:
    return (recipe, "--seeds", "3", "--set", f"rounds.count={rounds}", "--set", "compute.memory_gb=40", *rest)


PARTS: dict[str, tuple[str, ...]] = {
    "mnist-noniid-authors": (*_mnist("mnist-noniid", 300, *AUTHORS), *ON_GPU, *BF16),
    "mnist-noniid": (*_mnist("mnist-noniid", 300), *ON_GPU, *BF16),
    "mnist-iid-authors": (*_mnist("mnist-iid", 100, *AUTHORS), *ON_GPU, *BF16),
    "mnist-iid": (*_mnist("mnist-iid", 100), *ON_GPU, *BF16),
}
FACES = {
    "a": "DS,CB,IS,DS>CB>IS,DS>IS>CB",
    "b": "CB>DS>IS,CB>IS>DS,IS>DS>CB,IS>CB>DS,online(DS>CB>IS)",
}
# Seeds, and half of the rules, apart: the models of all cohorts of a round must fit a third of the memory of a run,
# or they go to the memory of the host, which takes fifty times as long.
for seed in (1, 2, 3):
    one = ("--set", f"seed={seed}", *ON_GPU)
    PARTS[f"unipen62-seed{seed}"] = (
        *("unipen62", "--rules", FIFTEEN, "--set", "rounds.count=300", "--set", "compute.memory_gb=37"),
        *(*one, *BF16),
    )
    for half, rules in FACES.items():
        PARTS[f"celeba-seed{seed}-{half}"] = (
            *("celeba", "--rules", rules, "--set", "compute.memory_gb=55"),
            *(*one, *TF32),
        )
# One federation each, the one that stopped the run above, in full precision: is it the precision or the network?
for name, rule, seed, rounds in (("mnist-iid", "DS", 1, 100), ("mnist-noniid", "LD", 2, 200)):
    PARTS[f"{name}-authors-float32"] = (
        *(name, "--rules", rule, "--set", f"seed={seed}", "--set", f"rounds.count={rounds}"),
        *("--set", "compute.memory_gb=8", *AUTHORS, *ON_GPU),
    )
for number in (1, 2, 3):
    five = (f"adafed-{number}", "--seeds", "5", "--set", "compute.memory_gb=16", *ON_GPU, *BF16)
    PARTS[f"adafed-{number}"] = five
    PARTS[f"adafed-{number}-adam"] = (
        *five, "--set", "training.optimiser=adam", "--set", "training.learning_rate=0.001"
    )  # fmt: skip
PARTS["adafed-regression"] = ("adafed-regression", "--seeds", "10", "--set", "compute.device=cpu")


def run_part(name: str, out: Path, work: Path, seconds: float, extra: list[str]) -> dict[str, Any]:
    """Run one part or go on with it, stop it when its time is up, and keep what it recorded."""
    folder = work / name
    recipe, *rest = PARTS[name]
    command = ["steelyard", "compare", recipe, *rest, *extra]
    print(f"{name}: {' '.join(command)}", flush=True)
    call = ["resume", str(folder)] if (folder / "run.sqlite").is_file() else [*command[1:], "--out", str(folder)]
    begun = time.perf_counter()
    with (out / f"{name}.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "steelyard", *call], stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            stop(process)
    told = {"part": name, "seconds": round(time.perf_counter() - begun, 1), "command": " ".join(command)}
    try:
        return told | keep(folder, out / f"{name}.tar.xz", told)
    except Exception as error:
        return {**told, "error": f"{type(error).__name__}: {error}"}


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a run as Ctrl-C would; one that does not listen is killed, which loses no round that was committed."""
    os.kill(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def keep(folder: Path, archive: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Write a run's store without what single clients sent, and what is known of the run, into one archive."""
    with tempfile.TemporaryDirectory() as place:
        copied = Path(place) / "run"
        copied.mkdir()
        shutil.copy(folder / "experiment.toml", copied)
        with sqlite3.connect(folder / "run.sqlite") as source, sqlite3.connect(copied / "run.sqlite") as target:
            source.backup(target)
            # The losses of test sets are in no table, and random digits are all that would take room.
            target.executescript(
                "DELETE FROM updates; DELETE FROM checkpoints; UPDATE evaluations SET loss = zeroblob(length(loss));"
            )
            known = dict(target.execute("SELECT key, value FROM info"))
            done = target.execute("SELECT MAX(round), COUNT(DISTINCT federation) FROM rounds").fetchone()
        with sqlite3.connect(copied / "run.sqlite") as target:
            target.execute("VACUUM")
        facts = {key: known[key] for key in ("status", "device", "engine_choice", "notes") if key in known}
        facts |= {"rounds": done[0], "federations": done[1]}
        (copied / "told.json").write_text(json.dumps(told | facts))
        # Under its own name only when it is whole: others wait for it to be there.
        part = archive.with_suffix(".part")
        with tarfile.open(part, "w:xz") as packed:
            packed.add(copied, archive.name.removesuffix(".tar.xz"))
        part.replace(archive)
    return facts


def main() -> None:
    """Read the options, run the parts, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, with commas")
    parser.add_argument("--work", type=Path, help="folder for the run folders (default: OUT/runs)")
    parser.add_argument("--seconds", default="600", help="time limit of each part, or one per part, with commas")
    parser.add_argument("--total", type=float, default=86400.0, help="time limit of everything, in seconds")
    parser.add_argument("--jobs", type=int, default=1, help="parts that run at the same time")
    parser.add_argument("--set", action="append", default=[], help="further changes, as for steelyard compare")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    # A shell's background job ignores Ctrl-C and hands that on: the runs must hear it, or they cannot be stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--parts: got {', '.join(unknown)}; allowed: {', '.join(PARTS)}")
    limits = [float(part) for part in options.seconds.split(",")]
    limits = limits * len(names) if len(limits) == 1 else limits
    work = options.work or options.out / "runs"
    work.mkdir(parents=True, exist_ok=True)
    extra = [word for change in options.set for word in ("--set", change)]
    ends = time.perf_counter() + options.total

    def go(name: str, seconds: float) -> dict[str, Any]:
        left = ends - time.perf_counter()
        if left <= 5:
            return {"part": name, "left out": True}
        return run_part(name, options.out, work, min(seconds, left), extra)

    with ThreadPoolExecutor(options.jobs) as pool:
        for told in pool.map(go, names, limits):
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
