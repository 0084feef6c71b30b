"""Others' tables, cell by cell, in pieces that stop and go on.

    python -m benchmarks.published OUT --table A --data mnist,fashion-mnist --seconds 500 --part 0/4

Each part writes OUT/TABLE-PART.jsonl, a line a cell: accuracy of every rule, seed and round. Runs lie in --work
(OUT/work unless given): a part that is started again goes on where it stopped. `python -m benchmarks.published.page`
makes the page. Needs MNIST, Fashion-MNIST (Debian: dataset-fashion-mnist) or CIFAR-10 (JPEG) in $STEELYARD_DATA.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pandas as pd  # here, and not where it is first used: that may be when a part must end
import torch

from benchmarks.published.cells import TABLES
from benchmarks.published.protocols import Cell
from benchmarks.published.rules_2026 import with_noise
from benchmarks.scaffold.__main__ import pack
from steelyard import UserError
from steelyard.base.errors import Stopped
from steelyard.experiment.loading import build
from steelyard.experiment.rules import seeds_of, with_rules
from steelyard.experiment.running import resume, run
from steelyard.runs.history import History

VARIANTS = Path(__file__).parent.parent / "scaffold"
"""Where SCAFFOLD with one step taken differently is."""


def packed(work: Path, every: int, *, noise: bool = False) -> Path:
    """Return CIFAR-10 as one npz below `work`, or FedSCS' noisy one; made once, by whichever part comes first."""
    plain = work / f"cifar10-{every}" / "cifar10.npz"
    noisy = plain.with_name("cifar10-noise.npz")
    plain.parent.mkdir(parents=True, exist_ok=True)
    with (plain.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not plain.exists():
            pack(plain.with_suffix(".new.npz"), every)
            plain.with_suffix(".new.npz").rename(plain)
        if noise and not noisy.exists():
            with_noise(plain, noisy.with_suffix(".new.npz"))
            noisy.with_suffix(".new.npz").rename(noisy)
    return noisy if noise else plain


def described(cell: Cell, options: argparse.Namespace) -> Any:
    """Return the experiment of a cell with what the command line says about rounds and machines."""
    document = json.loads(json.dumps(cell.document))
    if options.rounds:
        document["rounds"]["count"] = options.rounds
        if options.rounds < document["rounds"].get("evaluate_every", 1):
            del document["rounds"]["evaluate_every"]
    if options.updates:
        document["training"] |= {"updates": options.updates, "epochs": 1}
    if options.tiny:
        document["model"] = {"name": "lenet"}
        document["training"]["batch_size"] = 2
        if "test_fraction" in document["partition"]:
            document["partition"]["test_fraction"] = 0.1
    if "samples" in document["partition"]:
        document["partition"]["samples"] //= options.every
    if (table := document["partition"].get("table")) and options.every > 1 and (options.tiny or cell.data == "cifar10"):
        small = [[-(-rows // options.every) for rows in line] for line in table]
        document["partition"] |= {"table": small, "overlap": document["partition"]["test"] != "local"}
    if cell.data == "cifar10":
        path = packed(options.work, options.every, noise="owner" in document["data"])
        document["data"]["path"] = str(path.resolve())
    document["compute"] = {"device": options.device, "engine": options.engine, "precision": options.precision}
    if options.chunk:
        document["compute"]["chunk"] = options.chunk
    for section in ("algorithm", "weighing"):
        if plugins := document.get(section, {}).get("plugins"):
            document[section]["plugins"] = [str(VARIANTS / name) for name in plugins]
    return with_rules(build(document), cell.rules)


def _curves(rows: Any, column: str) -> dict[str, list[list[float | None]]]:
    """Return a column round after round, for each rule a list a seed; NaN and what was not tested are null."""
    found: dict[str, list[list[float | None]]] = {}
    for (rule, _), mine in rows.sort_values("round").groupby(["rule", "seed"], sort=False):
        values = mine[column].astype(float)
        found.setdefault(str(rule), []).append([None if math.isnan(value) else round(value, 5) for value in values])
    return found


def line(cell: Cell, history: History, before: float) -> dict[str, Any]:
    """Return what is kept of a run: its curves, its machine, its time."""
    rounds: Any = history.rounds
    measure, worst = "server_accuracy", {}
    curves, tests = _curves(rounds, measure), cast("Any", history.evaluations)
    if not rounds[measure].notna().any():
        measure = "clients' accuracy"
        tests["right"] = tests["score"] * tests["samples"]
        sums: pd.DataFrame = tests.groupby(["rule", "seed", "round"], sort=False, as_index=False)[
            ["right", "samples"]
        ].sum()
        sums["score"] = sums["right"] / sums["samples"]
        curves = _curves(sums, "score")
    if len(tests):
        least = tests.groupby(["rule", "seed", "round"], sort=False, as_index=False)["score"].min()
        worst = {rule: [seed[-1] for seed in found] for rule, found in _curves(least, "score").items()}
    info = history.info
    names = ("device", "engine_choice", "precision", "version_torch", "version_steelyard")
    facts = {name.removesuffix("_choice").removeprefix("version_"): str(info.get(name, "")) for name in names}
    return {
        "cell": cell.name,
        "table": cell.table,
        "data": cell.data,
        "split": cell.split,
        "measure": measure,
        "finished": info.get("status") == "finished",
        "rounds": history.last_round,
        "curves": curves,
        "worst": worst,
        "ended": {f"{rule}/{seed}": list(how) for (rule, seed), how in history.ended.items()},
        "seconds": round(float(rounds.groupby("round")["seconds"].max().sum()), 1),
        "wall": round(time.monotonic() - before, 1),
        **facts,
    }


def measure(cell: Cell, options: argparse.Namespace, deadline: float) -> tuple[dict[str, Any] | None, bool]:
    """Run a cell, or go on with it, until it is done or stopped; return its line, if it has a round, and which."""
    # A choice of rules is another run than the whole cell, and both may lie side by side.
    folder: Path = options.work / "-".join([cell.name, *(cell.rules if options.rules else ())])
    before = last = time.monotonic()
    quickest = math.inf

    def watch(round: int, scores: Mapping[str, float | None]) -> None:
        nonlocal last, quickest
        now = time.monotonic()
        if round > 1:  # the first one makes programs, too
            quickest = min(quickest, now - last)
        print(f"{cell.name}: round {round}, {now - before:.0f} s", file=sys.stderr, flush=True)
        if now + (quickest if quickest < math.inf else 0) > deadline:
            raise KeyboardInterrupt
        last = now

    try:
        if (folder / "experiment.toml").exists() and not options.fresh:
            resume(folder, progress=watch, accept_changes=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            experiment = described(cell, options)
            run(experiment, out=folder, seeds=seeds_of(experiment, options.seeds or cell.seeds), progress=watch)
        stopped = False
    except (Stopped, KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the line is still to be written
        print(f"{cell.name}: stopped", file=sys.stderr)
        stopped = True
    if not (folder / "run.sqlite").exists() or not (history := History(folder)).last_round:
        return None, stopped
    return line(cell, history, before), stopped


def main() -> None:
    """Run the cells of a part, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--table", choices=sorted(TABLES), default="A")
    parser.add_argument("--data", default="mnist,fashion-mnist", help="with commas")
    parser.add_argument("--mu", default="0.001,0.01,0.1,1", help="FedProx's μ, with commas")
    parser.add_argument("--splits", default="", help="only these, separated by /, such as IID/#C=2")
    parser.add_argument("--rules", default="", help="only these, with commas, such as fedavg,fednova")
    parser.add_argument("--seeds", type=int, default=0, help="in place of the cell's own number")
    parser.add_argument("--rounds", type=int, default=0, help="in place of the protocol's")
    parser.add_argument("--updates", type=int, default=0, help="steps a round in place of epochs, for a try")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round that would end later")
    parser.add_argument("--part", default="0/1", help="I/N: the I-th of N parts, counted from 0")
    parser.add_argument("--work", type=Path, help="where the runs lie; default OUT/work")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32", "bfloat16"))
    parser.add_argument("--chunk", type=int, default=0, help="clients in one stack")
    parser.add_argument("--every", type=int, default=1, help="CIFAR-10: take each so-manieth image, for a try")
    parser.add_argument("--fresh", action="store_true", help="begin anew, also where there is a run to go on with")
    parser.add_argument("--list", action="store_true", help="name the part's cells and end")
    parser.add_argument("--tiny", action="store_true", help="one seed, round and step, a small network: a try")
    options = parser.parse_args()
    if options.tiny:
        options.seeds = options.rounds = options.updates = 1
        options.every, options.device, options.engine = 50, "cpu", "loop"
    # Whoever must end it sends SIGTERM: what a shell starts in the background does not hear Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A protocol takes hours in the plain loop: better to end at once and be started with another engine.
    warnings.filterwarnings("error", message="engine .* does not take this model")
    deadline = time.monotonic() + options.seconds
    options.work = options.work or options.out / "work"
    values = [float(word) for word in options.mu.split(",")]
    cells = list(TABLES[options.table](options.data.split(","), options.seeds or 3, values))
    wanted = [word for word in options.splits.split("/") if word]
    cells = [cell for cell in cells if not wanted or cell.split in wanted]
    if chosen := [word for word in options.rules.split(",") if word]:
        cells = [replace(cell, rules=[rule for rule in cell.rules if rule in chosen]) for cell in cells]
        cells = [cell for cell in cells if cell.rules]
    number, parts = (int(word) for word in options.part.split("/"))
    mine = sorted(cells, key=lambda cell: -cell.cost)[number::parts]
    if options.list:
        print("\n".join(f"{cell.name}: {', '.join(cell.rules)}" for cell in mine))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(max(1, torch.get_num_threads() // parts))
    target = options.out / f"{options.table}-{number}-of-{parts}.jsonl"
    failed = stopped = False
    for cell in mine:
        if stopped or time.monotonic() > deadline:
            break
        try:
            found, stopped = measure(cell, options, deadline)
        except (UserError, UserWarning) as error:
            failed, found = True, {"cell": cell.name, "failed": str(error)}
            print(f"{cell.name}: {error}", file=sys.stderr)
        if found is not None:
            with target.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(found) + "\n")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
