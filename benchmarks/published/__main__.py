"""Others' tables, cell by cell, in pieces that stop and go on.

    python -m benchmarks.published OUT --table A --data mnist,fashion-mnist --seconds 500 --part 0/4
    python -m benchmarks.published benchmarks/results/published --summary

Each part writes OUT/TABLE-PART.jsonl, a line a cell: accuracy of every rule, seed and round. Runs lie in --work
(OUT/work unless given): a part that is started again goes on where it stopped, and --seconds lets no round begin that
would end later. --splits, with / between them, --rules and --mu choose among a table's; --every takes each so-manieth
image of CIFAR-10, and --tiny one seed, round and step of a small network: a try.

--summary prints what OUT holds: best and last round of every rule, mean and deviation over seeds in percent, and the
gain of the last round over FedAvg, paired by seed, with p after Holm's correction within the cell. Needs MNIST,
Fashion-MNIST (Debian: dataset-fashion-mnist) or CIFAR-10 (JPEG) in $STEELYARD_DATA.
"""

from __future__ import annotations

import fcntl
import io
import json
import math
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import pandas as pd  # here, and not where it is first used: that may be when a part must end
import torch
import typer
from PIL import Image

from benchmarks.kit import Kept, read_lines, share, start, table, words
from benchmarks.published.cells import TABLES, Cell, with_noise
from steelyard import UserError
from steelyard.base.errors import Stopped
from steelyard.base.measures import estimate, show_estimate
from steelyard.data.files import find
from steelyard.experiment.loading import build
from steelyard.experiment.rules import seeds_of, with_rules
from steelyard.experiment.running import resume, run
from steelyard.report.statistics import holm, paired_p, verdict
from steelyard.runs.history import History


def pack(path: Path, every: int) -> None:
    """Write both parts of CIFAR-10 (JPEG), each `every`-th image, as one npz: images, labels, which are test rows."""
    folder = find(Path("cifar10_jpeg"), "CIFAR-10 re-encoded as JPEG: train.npz and test.npz")
    images: list[Any] = []
    labels: list[Any] = []
    for part in ("train", "test"):
        with np.load(folder / f"{part}.npz") as arrays:
            stored, begins = arrays["jpeg"].tobytes(), arrays["begins"].tolist()
            labels.append(arrays["labels"][::every])
        pairs = list(pairwise(begins))[::every]
        images += [np.asarray(Image.open(io.BytesIO(stored[begin:end])).convert("RGB")) for begin, end in pairs]
    test = np.repeat([False, True], [len(part) for part in labels])
    np.savez(path, x=np.stack(images), y=np.concatenate(labels), test=test)


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


@dataclass(frozen=True)
class How:
    """What the command line says about rounds, machines and sizes; it holds for every cell."""

    work: Path
    compute: Mapping[str, Any]
    rounds: int = 0
    every: int = 1
    tiny: bool = False


def described(cell: Cell, how: How) -> Any:
    """Return the experiment of a cell as it is run here."""
    document = json.loads(json.dumps(cell.document))
    partition, training, rounds = document["partition"], document["training"], document["rounds"]
    if how.rounds:
        rounds["count"] = how.rounds
        if how.rounds < rounds.get("evaluate_every", 1):
            del rounds["evaluate_every"]
    if how.tiny:
        document["model"] = {"name": "lenet"}
        training |= {"batch_size": 2, "updates": 1, "epochs": 1}
        partition |= {"test_fraction": 0.1} if "test_fraction" in partition else {}
        partition |= {"clients": 20, "minimum": 1} if partition.get("clients", 0) > 20 else {}
    if "samples" in partition:
        partition["samples"] //= how.every
    if (shares := partition.get("table")) and how.every > 1 and (how.tiny or cell.data == "cifar10"):
        small = [[-(-rows // how.every) for rows in line] for line in shares]
        partition |= {"table": small, "overlap": partition["test"] != "local"}
    if cell.data == "cifar10":
        document["data"]["path"] = str(packed(how.work, how.every, noise="owner" in document["data"]).resolve())
    document["compute"] = dict(how.compute)
    if plugins := document.get("algorithm", {}).get("plugins"):
        document["algorithm"]["plugins"] = [str(Path(__file__).with_name(name)) for name in plugins]
    return with_rules(build(document), cell.rules)


def _curves(rows: Any, column: str) -> dict[str, list[list[float | None]]]:
    """Return a column round after round, for each rule a list a seed; NaN and what was not tested are null."""
    found: dict[str, list[list[float | None]]] = {}
    for (rule, _), mine in rows.sort_values("round").groupby(["rule", "seed"], sort=False):
        values = mine[column].astype(float)
        found.setdefault(str(rule), []).append([None if math.isnan(value) else round(value, 5) for value in values])
    return found


def line(cell: Cell, history: History, wall: float) -> dict[str, Any]:
    """Return what is kept of a run: its curves, its machine, its time."""
    rounds: Any = history.rounds
    measure, worst = "server_accuracy", {}
    curves, tests = _curves(rounds, measure), cast("Any", history.evaluations)
    of_round = ["rule", "seed", "round"]
    if not rounds[measure].notna().any():
        measure = "clients' accuracy"
        tests["right"] = tests["score"] * tests["samples"]
        sums: pd.DataFrame = tests.groupby(of_round, sort=False, as_index=False)[["right", "samples"]].sum()
        sums["score"] = sums["right"] / sums["samples"]
        curves = _curves(sums, "score")
    if len(tests):
        least = tests.groupby(of_round, sort=False, as_index=False)["score"].min()
        worst = {rule: [seed[-1] for seed in found] for rule, found in _curves(least, "score").items()}
    info = history.info
    names = ("device", "engine_choice", "precision", "version_torch", "version_steelyard")
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
        "wall": round(wall, 1),
        **{name.removesuffix("_choice").removeprefix("version_"): str(info.get(name, "")) for name in names},
    }


def measure(cell: Cell, how: How, folder: Path, seeds: int, deadline: float) -> tuple[dict[str, Any] | None, bool]:
    """Run a cell, or go on with it, until it is done or stopped; return its line, if it has a round, and which."""
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

    stopped = False
    try:
        if (folder / "experiment.toml").exists():
            resume(folder, progress=watch, accept_changes=True)
        else:
            experiment = described(cell, how)
            run(experiment, out=folder, seeds=seeds_of(experiment, seeds or cell.seeds), progress=watch)
    except (Stopped, KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the line is still to be written
        print(f"{cell.name}: stopped", file=sys.stderr)
        stopped = True
    if not (folder / "run.sqlite").exists() or not (history := History(folder)).last_round:
        return None, stopped
    return line(cell, history, time.monotonic() - before), stopped


def tested(curves: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Return each seed's tested rounds in percent; a seed that ended before its first test is left out."""
    found = [[100 * value for value in curve if value is not None] for curve in curves]
    return [curve for curve in found if curve]


def shown(values: Sequence[float], digits: int = 2) -> str:
    """Write mean and deviation over seeds, as the published tables do."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}" if values else "–"


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the best and the last round of every rule, and its gain over FedAvg; of a cell's lines the longest."""
    longest = {
        (each["cell"], *sorted(each["curves"])): each
        for each in sorted((each for each in lines if "curves" in each), key=lambda each: each["rounds"])
    }
    rows: list[dict[str, Any]] = []
    for each in sorted(longest.values(), key=lambda each: each["cell"]):
        seeds = {rule: tested(curves) for rule, curves in each["curves"].items()}
        last = {rule: [curve[-1] for curve in curves] for rule, curves in seeds.items()}
        base = last.get("fedavg", [])
        gains = {
            rule: [a - b for a, b in zip(values, base, strict=True)]
            for rule, values in last.items()
            if rule != "fedavg" and base and len(values) == len(base)
        }
        p = dict(zip(gains, holm([paired_p(gain) for gain in gains.values()]), strict=True))
        for rule, curves in seeds.items():
            row = {"cell": each["cell"], "rule": f"`{rule}`", "seeds": len(curves), "rounds": each["rounds"]}
            row |= {"best": shown([max(curve) for curve in curves]), "last": shown(last[rule])}
            gain = estimate(gains[rule]) if rule in gains else None
            row |= {"gain": "" if gain is None else show_estimate(gain, 2, signed=True), "p": p.get(rule)}
            rows.append(row | {"": "" if gain is None else verdict(gain.mean, p[rule])})
    heart = [each for each in lines if each["table"] == "D"]
    hospitals = [{"method": each["method"], **{h: shown(v, 3) for h, v in each["accuracy"].items()}} for each in heart]
    return "\n\n".join(table(found) for found in (rows, hospitals) if found)


def main(
    out: Path,
    summary_only: Annotated[bool, typer.Option("--summary")] = False,
    table: Literal["A", "A-later", "A-drawn", "A-normalised", "B", "2026", "C", "scaffold"] = "A",
    data: str = "mnist,fashion-mnist",
    mu: str = "0.001,0.01,0.1,1",
    splits: str = "",
    rules: str = "",
    seeds: int = 0,
    rounds: int = 0,
    seconds: float = math.inf,
    part: str = "0/1",
    work: Path | None = None,
    device: str = "auto",
    engine: str = "auto",
    precision: Literal["float32", "tf32", "bfloat16"] = "float32",
    chunk: int = 0,
    every: int = 1,
    tiny: bool = False,
) -> None:
    """Run the cells of a part, as long as there is time, or print what there is."""
    if summary_only:
        print(summary([line for path in sorted(out.glob("*.jsonl")) for line in read_lines(path)]))
        return
    if tiny:
        seeds, rounds, every, device, engine = 1, 1, 50, "cpu", "loop"
    # Whoever must end it sends SIGTERM: what a shell starts in the background does not hear Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A protocol takes hours in the plain loop: better to end at once and be started with another engine.
    warnings.filterwarnings("error", message="engine .* does not take this model")
    deadline = time.monotonic() + seconds
    compute = {"device": device, "engine": engine, "precision": precision} | ({"chunk": chunk} if chunk else {})
    how = How(work or out / "work", compute, rounds, every, tiny)
    cells = list(TABLES[table](words(data), seeds or 3, [float(word) for word in words(mu)]))
    cells = [cell for cell in cells if not splits or cell.split in splits.split("/")]
    if chosen := words(rules):
        cells = [replace(cell, rules=[rule for rule in cell.rules if rule in chosen]) for cell in cells]
    mine = share(sorted((cell for cell in cells if cell.rules), key=lambda cell: -cell.cost), part)
    torch.set_num_threads(max(1, torch.get_num_threads() // int(part.split("/")[1])))
    kept, failed, stopped = Kept(out / f"{table}-{part.replace('/', '-of-')}.jsonl"), False, False
    for cell in mine:
        if stopped or time.monotonic() > deadline:
            break
        try:
            # A choice of rules is another run than the whole cell, and both may lie side by side.
            found, stopped = measure(cell, how, how.work / "-".join([cell.name, *chosen]), seeds, deadline)
        except (UserError, UserWarning) as error:
            failed, found = True, {"cell": cell.name, "table": table, "failed": str(error)}
            print(f"{cell.name}: {error}", file=sys.stderr)
        if found is not None:
            kept.add(found)
    sys.exit(int(failed))


if __name__ == "__main__":
    start(main)
