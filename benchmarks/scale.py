"""What grows and what does not: many clients, a large model, a long history. Each part prints JSON lines and a table.

    python -m benchmarks.scale clients [--registered 10000,100000,1000000] [--cohorts 1000,3000,10000] [--rounds 20]
    python -m benchmarks.scale large [--parameters 100000000] [--clients 20] [--rounds 3]
    python -m benchmarks.scale history [--rounds 10000] [--clients 1000]

clients: a small MLP on made-up rows, five for each client. The largest cohort is drawn from each number of registered
clients, and each cohort from the largest number. A round is the processor time between two of them, the median; memory
is that of the process after the second round and after the last. Each case has a process of its own.
large: a dense network, all clients asked, models of a cohort in a file beyond 2 GB. Memory that no file stands behind
(`RssAnon`) is looked at every 20 ms; it is also given in models.
history: a run of one rule with four criteria, everybody asked and tested in every round, written by `benchmarks.store`;
then, each in a process of its own, what its chain, the report, the page and the exports take. The chain comes first, as
at the end of every run: reports remember it while nobody writes to the run. Libraries are read before.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.kit import alone, peak_mb, start, table, timed, whole_numbers, words

ROWS, FEATURES, CLASSES = 5, 8, 4
CLIENTS = {
    "registered": "registered",
    "cohort": "a round",
    "set_up": "set up, processor s",
    "round_seconds": "round, s",
    "round_processor": "round, processor s",
    "mb_early": "MB after 2 rounds",
    "mb_late": "after the last",
    "mb_peak": "peak",
    "disk_kb_a_round": "KB on the disk a round",
}
LARGE = {
    "parameters": "parameters",
    "clients": "clients a round",
    "model_mb": "a model, MB",
    "cohort_mb": "all of a round's",
    "anon_mb": "most memory, MB",
    "models": "in models",
    "round_processor": "round, processor s",
}
STEPS = ("chain", "report", "page", "summary", "parquet")


def memory(field: str = "VmRSS") -> float:
    """Return a figure of this process's memory in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def described(registered: int, cohort: int, rounds: int, **sections: Any) -> Any:
    """Return an experiment on rows from memory in which so many of the registered clients train."""
    from steelyard.experiment.loading import build

    document: dict[str, Any] = {
        "name": "scale",
        "data": {"source": "memory"},
        "partition": {"scheme": "iid", "clients": registered},
        "model": {"name": "mlp", "hidden": [16]},
        "training": {"epochs": 1, "batch_size": 4, "learning_rate": 0.1},
        "rounds": {"count": rounds, "fraction": min(1.0, cohort / registered)},
        "store": {"checkpoint_every": 10},
        "weighing": {"criteria": ["DS"]},
    }
    return build({**document, **sections})


def made_rows(rows: int, features: int) -> Any:
    """Return rows of a few classes that a small network can tell apart."""
    import numpy as np

    from steelyard import in_memory

    draw = np.random.default_rng(1)
    labels = draw.integers(0, CLASSES, rows)
    means = draw.normal(size=(CLASSES, features))
    found = draw.standard_normal((rows, features), dtype=np.float32)
    return in_memory(found + means[labels].astype(np.float32), labels, classes=CLASSES)


def one_population(registered: int, cohort: int, rounds: int) -> dict[str, float]:
    """Run some rounds and return what setting up and a round took, and the memory early and late."""
    from steelyard.experiment.running import run

    marks: list[tuple[float, float, float]] = []

    def mark(round: int, scores: Mapping[str, float | None]) -> None:
        marks.append((time.perf_counter(), time.process_time(), memory()))

    begun = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        data = made_rows(ROWS * registered, FEATURES)
        run(described(registered, cohort, rounds), out=Path(scratch) / "run", dataset=data, progress=mark)
        size = (Path(scratch) / "run" / "run.sqlite").stat().st_size
    clock, processor = ([b[at] - a[at] for a, b in pairwise(marks[1:])] for at in (0, 1))
    return {
        "registered": registered,
        "cohort": cohort,
        "set_up": round(marks[0][1] - begun, 2),
        "round_seconds": round(statistics.median(clock), 4),
        "round_processor": round(statistics.median(processor), 4),
        "mb_early": round(marks[2][2]),
        "mb_late": round(marks[-1][2]),
        "mb_peak": round(memory("VmHWM")),
        "disk_kb_a_round": round(size / 1024 / rounds),
    }


def clients(registered: Sequence[int], cohorts: Sequence[int], rounds: int) -> None:
    """Measure each population and cohort in a process of its own."""
    cases = [(number, cohorts[-1]) for number in registered if number >= cohorts[-1]]
    cases += [(registered[-1], cohort) for cohort in cohorts[:-1]]
    found = [_alone("clients", number, cohort, rounds) for number, cohort in cases]
    print(table(found, CLIENTS | {"mb_late": f"after {rounds}"}))


def one_large(parameters: int, cohort: int, rounds: int) -> dict[str, float]:
    """Run a network of so many parameters and return what it takes."""
    import_module("torch")  # its own memory is not a model's
    from steelyard.experiment.running import run

    features = 64
    width = int(((features + CLASSES) ** 2 + 4 * parameters) ** 0.5 - (features + CLASSES)) // 2
    model = {"name": "mlp", "hidden": [width, width]}
    compute = {"engine": "loop", "device": "cpu", "memory_gb": 4.0}
    base, peak, marks, done = memory("RssAnon"), 0.0, list[float](), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, memory("RssAnon"))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with tempfile.TemporaryDirectory() as scratch:
        experiment = described(cohort, cohort, rounds, model=model, compute=compute, partition=_local(cohort))
        mark: Callable[..., None] = lambda round, scores: marks.append(time.process_time())  # noqa: E731
        run(experiment, out=Path(scratch) / "run", dataset=made_rows(20 * cohort, features), progress=mark)
    done.set()
    watcher.join()
    size = 4 * (features * width + width * width + width * CLASSES + 2 * width + CLASSES) / 2**20
    return {
        "parameters": round(size * 2**18),
        "clients": cohort,
        "model_mb": round(size),
        "cohort_mb": round(size * cohort),
        "anon_mb": round(peak - base),
        "models": round((peak - base) / size, 1),
        "round_processor": round(statistics.median(b - a for a, b in pairwise(marks)), 1),
    }


def _local(cohort: int) -> dict[str, Any]:
    return {"scheme": "iid", "clients": cohort}


def one_step(step: str, folder: Path) -> dict[str, float]:
    """Do one thing with a run's folder; returns its seconds and the peak memory of this process."""
    import pandas as pd

    from steelyard.experiment.loading import read_experiment
    from steelyard.page.overview import Figures
    from steelyard.report import figures
    from steelyard.report.curves import chain_of
    from steelyard.report.html import html
    from steelyard.report.result import computed
    from steelyard.report.view import RunView
    from steelyard.runs.export import export_run
    from steelyard.runs.history import History

    done: dict[str, Callable[[], object]] = {
        # As the end of a run does it; while nobody writes to the run, reports remember it.
        "chain": lambda: chain_of(History(folder)),
        "report": lambda: html(RunView([folder])),
        # What a browser has the page do: open the run, and draw every figure of it.
        "page": lambda: figures.draw_all(Figures(folder.parent).view([folder.name])),
        "summary": lambda: computed(folder, read_experiment(folder)),
        "parquet": lambda: export_run(History(folder), "parquet", folder / "tables"),
    }
    pd.DataFrame({"warm": [1]}).groupby("warm").sum()
    took = timed(done[step])
    return {"seconds": round(took.clock, 2), "processor": round(took.processor, 2), "peak_mb": round(peak_mb())}


def history(rounds: int, clients: int, steps: Sequence[str]) -> None:
    """Write a long run and time what reads it."""
    from benchmarks.store import write_run
    from steelyard.experiment.loading import to_toml

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        each = write_run(folder, rounds, clients)
        (folder / "experiment.toml").write_text(to_toml(described(clients, clients, 1)))
        size = sum(path.stat().st_size for path in folder.glob("run.sqlite*")) / 1e6
        asked = f"{rounds:,} rounds x {clients:,} clients"
        print(f"{asked}; {size:,.0f} MB; {1000 * each:.1f} ms a round", flush=True)
        found = [{"step": step, **_alone("history", step, folder)} for step in steps]
    print(table(found, {"step": "", "seconds": "seconds", "processor": "processor s", "peak_mb": "peak memory, MB"}))


def _alone(part: str, *given: object) -> dict[str, Any]:
    return alone("scale", part, "--one", ",".join(map(str, given)))


def main(
    part: Annotated[Literal["clients", "large", "history"], typer.Argument()],
    registered: Annotated[str, typer.Option(help="clients: how many there are")] = "10000,100000,1000000",
    cohorts: Annotated[str, typer.Option(help="clients: how many train in a round")] = "1000,3000,10000",
    rounds: Annotated[int, typer.Option(help="0: 20, 3 or 10,000, by the part")] = 0,
    parameters: Annotated[int, typer.Option(help="large: of the network")] = 100_000_000,
    cohort: Annotated[int, typer.Option("--clients", help="large: 20, history: 1,000")] = 0,
    steps: Annotated[str, typer.Option(help="history: what is done with the run")] = ",".join(STEPS),
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure a part, or one case of it in this process, and print."""
    if one:
        ones: dict[str, Callable[..., dict[str, float]]] = {"clients": one_population, "large": one_large}
        given = words(one)
        print(json.dumps(one_step(given[0], Path(given[1])) if part == "history" else ones[part](*map(int, given))))
    elif part == "clients":
        clients(sorted(whole_numbers(registered)), sorted(whole_numbers(cohorts)), rounds or 20)
    elif part == "large":
        print(table([_alone("large", parameters, cohort or 20, rounds or 3)], LARGE))
    else:
        history(rounds or 10_000, cohort or 1_000, words(steps))


if __name__ == "__main__":
    start(main)
