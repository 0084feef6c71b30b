"""How long `steelyard check` looks at a large table, and how much memory it takes beside it.

    python -m benchmarks.data_check            # 1,000,000 rows x 100 columns at four sites

10⁶ rows × 100 columns took 9.2 processor seconds on two threads, and 288 MB beside a table of 763 MB, on two x86 cores
that others kept busy (November 2026). Reading the file comes before it.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from steelyard.data.tables import Table
from steelyard.experiment.data_check import check_table
from steelyard.experiment.learning import LearningDescription


def table(rows: int, columns: int) -> pandas.DataFrame:
    """Return a table of numbers with a category, a site and a label."""
    chance = np.random.default_rng(1)
    frame = pandas.DataFrame({f"c{at}": chance.normal(50, 10, rows) for at in range(columns - 3)}, copy=False)
    more = {
        "site": np.arange(rows) * 4 // rows,
        "sex": chance.choice(["f", "m"], rows),
        "y": chance.integers(0, 2, rows),
    }
    return frame.assign(**more)


def resident() -> int:
    """Return the memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    """Measure once and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=100)
    given = parser.parse_args()
    frame = table(given.rows, given.columns)
    fields: dict[str, Any] = {
        "data": {"source": "csv", "path": "large.csv", "labels": "y", "owner": "site"},
        "partition": {"scheme": "natural"},
    }
    experiment: Any = LearningDescription(**fields)
    check_table(experiment, Table(Path("small.csv"), table(1000, 5)), experiment.data)  # imports are not measured
    before, peak, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, worked = time.perf_counter(), time.process_time()
    looked = check_table(experiment, Table(Path("large.csv"), frame), experiment.data)
    took, cpu = time.perf_counter() - began, time.process_time() - worked
    done.set()
    watcher.join()
    print(looked.lines()[-1])
    size = int(frame.memory_usage().sum())
    print(f"{took:.1f} s, {cpu:.1f} processor seconds; {(peak[0] - before) >> 20} MB beside {size >> 20} MB")


if __name__ == "__main__":
    main()
