"""The tables of docs/results/kgflex.md: settings chosen on a validation part, then the test with three seeds.

    python -m benchmarks.kgflex_tables OUT --jobs 16 --parts search:ml1m,test:ml1m,hops:ml1m [--seconds 1200]
    python -m benchmarks.kgflex_tables OUT --tables --figures docs/results

A part is a stage and a data set (yahoo, books, ml1m); parts are done in the order given as far as what they need is
there. `search` runs settings on each user's validation part and looks after some numbers of epochs; `test` takes the
best of them by nDCG@10, and the best of those with the thesis' own limits, trains on the whole training part and tests
with three seeds; `weighed` gives users a say by expertise or size; `baselines`, `hops` (Figure 6.3; `last`: its last
cell alone) and `cold` (new items) stand beside. What a cell finds is a line of OUT/cells.jsonl at once, so that a run
that is cut loses nothing; a cell that is there is not done again. `--tables` prints the page's tables,
`--figures FOLDER` draws its pictures.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.kgflex_pages import pages
from benchmarks.kgflex_plan import PARTS, Cell, key

ALL = (
    *("search:ml1m", "weighed:yahoo", "last:books", "test:ml1m", "baselines:yahoo", "baselines:books"),
    *("baselines:ml1m", "hops:ml1m", "cold:ml1m", "test:yahoo", "test:books"),
)


def append(out: Path, cell: Cell) -> None:
    """Add a line; several processes may do so at once."""
    with (out / "cells.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(cell) + "\n")


def read(out: Path) -> list[Cell]:
    """Return the cells that are there, what was found of each put together."""
    file = out / "cells.jsonl"
    found: dict[str, Cell] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        cell = json.loads(line)
        whole = found.setdefault(key(cell), {**cell, "found": {}})
        whole["found"].update(cell["found"])
        whole["seconds"] = cell["seconds"]
        whole["end"] = whole.get("end", False) or cell.get("end", False)
    return list(found.values())


def do(cell: Cell, out: Path, until: float) -> None:
    """Do a cell in a process of its own and write what it finds."""
    # For speed of start: printing tables needs no torch.
    from benchmarks.kgflex_work import OutOfTime, work

    begun = time.perf_counter()

    def tell(found: Mapping[str, Any], end: bool = False) -> None:
        append(out, {**cell, "found": dict(found), "seconds": round(time.perf_counter() - begun, 1), "end": end})

    try:
        work(cell, tell, until)
    except OutOfTime:
        return
    tell({}, end=True)


def parts_of(text: str) -> list[tuple[str, str]]:
    """Return stage and data set of each part named."""
    parts = [(stage, data) for stage, _, data in (each.partition(":") for each in text.split(","))]
    for stage, data in parts:
        if stage not in PARTS or data not in ("yahoo", "books", "ml1m"):
            sys.exit(f"--parts: got {stage}:{data}; allowed: one of {', '.join(PARTS)}, then :yahoo, :books or :ml1m")
    return parts


def open_cells(
    parts: Sequence[tuple[str, str]], done: Sequence[Cell], running: set[str], given_up: set[str], over: bool
) -> Iterator[Cell]:
    """Yield the cells that can be done now, in order; what rests on a search waits until it has ended or is over."""
    left_out = given_up | {key(cell) for cell in done if cell["end"]}
    waiting: set[str] = set()
    for stage, data in parts:
        cells = [cell for cell in PARTS[stage](data, done) if key(cell) not in left_out]
        if stage == "search":
            cells = [cell for cell in cells if not over or key(cell) in running]
            waiting |= {data} if cells else set()
        if stage not in ("test", "weighed", "hops", "last") or data not in waiting:
            yield from (cell for cell in cells if key(cell) not in running)


def go(out: Path, parts: Sequence[tuple[str, str]], jobs: int, seconds: float, search_seconds: float) -> None:
    """Keep the processes busy until all is done or time is over."""
    start = time.time()
    ended: set[str] = set()
    running: dict[Future[None], str] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        while True:
            over = time.time() > start + search_seconds
            for cell in open_cells(parts, read(out), set(running.values()), ended, over):
                if len(running) >= jobs:
                    break
                until = start + (search_seconds if cell["stage"] == "search" else seconds)
                running[pool.submit(do, cell, out, until)] = key(cell)
                print(f"{time.time() - start:6.0f} s  {key(cell)}", flush=True)
            if not running:
                return
            if time.time() > start + seconds:
                print("out of time", flush=True)
                for process in multiprocessing.active_children():
                    process.terminate()
                os._exit(0)
            finished, _ = wait(running, timeout=5, return_when=FIRST_COMPLETED)
            for future in finished:
                name = running.pop(future)
                if future.exception() is not None:
                    print(f"failed: {name}: {future.exception()!r}", flush=True)
                # A cell that was cut or failed is not begun again in this call.
                ended.add(name)


def main() -> None:
    """Parse, then print tables or do what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--parts", default=",".join(ALL), help="what to do, in this order")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after this; the next call goes on")
    parser.add_argument("--search-seconds", type=float, default=1e9, help="choose from what the search has by then")
    parser.add_argument("--tables", action="store_true", help="print the page's tables of what is there")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw Figures 6.2 and 6.3 of what is there")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.tables:
        print("\n".join(pages(read(chosen.out))))
    if chosen.figures:
        # For speed of start: only pictures need altair and pandas.
        from benchmarks.kgflex_figures import draw

        draw(read(chosen.out), chosen.figures)
    if chosen.tables or chosen.figures:
        return
    go(chosen.out, parts_of(chosen.parts), chosen.jobs, chosen.seconds, chosen.search_seconds)


if __name__ == "__main__":
    main()
