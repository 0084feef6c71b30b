"""The numbers of docs/results/recommend.md: the thesis' chapter 4 with settings chosen on validation rows.

    STEELYARD_DATA=DATA python -m benchmarks.recommend_tables OUT --jobs 16 --minutes 8

Many processes with one core each; lines of JSON go to OUT/lines.jsonl as tasks end, and a run that was stopped goes on
where it was. Data sets in the order of their importance (--data italy,amazon for some of them, in that order); what
has not begun after --minutes is left for the next call. Needs a C compiler (see fpl_compiled).
`python -m benchmarks.recommend_pages OUT` writes the tables of the page from the lines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from benchmarks.recommend_data import SOURCES, load, scratch
from benchmarks.recommend_plan import FACTORS, STAGES, cost
from benchmarks.recommend_systems import Line, Task, key, perform

Work = dict[Future[list[Line]], tuple[str, Task]]


def read_lines(path: Path) -> list[Line]:
    """Return the lines written so far; a last line that was cut off is dropped."""
    found: list[Line] = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


class Progress:
    """What is done and what is next, for each data set by itself: its next stage waits for its own lines alone."""

    def __init__(self, names: Iterable[str], lines: list[Line]) -> None:
        self.lines: dict[str, list[Line]] = {name: [] for name in names}
        for line in lines:
            self.lines.setdefault(line["data"], []).append(line)
        self.stage = dict.fromkeys(names, 0)
        self.open: dict[str, set[str]] = {name: set() for name in names}
        self.waiting: list[tuple[int, float, str, Task]] = []
        self.rank = {name: rank for rank, name in enumerate(names)}
        for name in names:
            self.advance(name)

    def advance(self, name: str) -> None:
        """Begin the next stage of a data set whose tasks are all done, passing over what is already there."""
        while not self.open[name] and self.stage[name] < len(STAGES):
            tasks = STAGES[self.stage[name]](name, self.lines[name])
            self.stage[name] += 1
            done = {line["task"] for line in self.lines[name]}
            left = {key(task): task for task in tasks if key(task) not in done}
            self.open[name] = set(left)
            self.waiting += [(self.rank[name], -cost(task), mark, task) for mark, task in left.items()]
        self.waiting.sort(key=lambda entry: entry[:3])

    def ended(self, name: str, task: Task, found: list[Line]) -> None:
        """Take in the lines of a task."""
        self.lines[name] += found
        self.open[name].discard(key(task))
        self.advance(name)


def carry_out(progress: Progress, out: Path, jobs: int, until: float) -> None:
    """Keep `jobs` processes busy until nothing is left or the time is over."""
    running: Work = {}
    # Forked, so that the data that was read here is there in every process.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool, out.open("a") as file:
        while running or (progress.waiting and time.time() < until):
            while progress.waiting and len(running) < jobs and time.time() < until:
                *_, task = progress.waiting.pop(0)
                running[pool.submit(perform, task)] = (task["data"], task)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name, task = running.pop(future)
                if (error := future.exception()) is not None:
                    # The data set goes no further, but the others do.
                    print(f"{key(task)}: {error!r}", flush=True)
                    continue
                found = future.result()
                file.writelines(json.dumps(line) + "\n" for line in found)
                file.flush()
                progress.ended(name, task, found)


def compile_all() -> None:
    """Compile the C code once, before many processes want it."""
    from benchmarks.fpl_compiled import library

    for factors in FACTORS:
        library(factors, scratch())


def main() -> None:
    """Parse and go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", default=",".join(SOURCES), help=f"some of {', '.join(SOURCES)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=1e6)
    chosen = parser.parse_args()
    begun = time.time()
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "lines.jsonl"
    compile_all()
    names = list(dict.fromkeys(chosen.data.split(",")))
    if unknown := [name for name in names if name not in SOURCES]:
        parser.error(f"--data: {', '.join(unknown)} is none of {', '.join(SOURCES)}")
    for name in names:
        load(name, "validation")
        load(name, "test")
    progress = Progress(names, read_lines(path))
    carry_out(progress, path, chosen.jobs, begun + 60 * chosen.minutes)
    left = len(progress.waiting)
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    summary = {"machine": machine, "jobs": chosen.jobs, "seconds": round(time.time() - begun), "left": left}
    with (chosen.out / "machine.jsonl").open("a") as file:
        file.write(json.dumps(summary | {"stages": progress.stage}) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
