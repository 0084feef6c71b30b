"""How long `steelyard check` takes for a large table in four files, reading included, and how much memory.

    python -m benchmarks.data_check            # 1,000,000 rows x 100 columns at four sites

10⁶ rows × 100 columns took 17.7 s, 19.8 processor seconds and 1,405 MB at most, 1.8 times the table's 763 MB: half of
the time reads the files in one thread, half looks at them in two (two quiet x86 cores, November 2026).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas

EXPERIMENT = """
[data]
source = "csv"
path = "sites"
labels = "y"
[partition]
scheme = "natural"
"""


def write(folder: Path, rows: int, columns: int) -> int:
    """Write four files of numbers with a category and a label; return how much memory their table takes."""
    chance, size = np.random.default_rng(1), 0
    (folder / "sites").mkdir()
    (folder / "my.toml").write_text(EXPERIMENT)
    for site in ("east", "north", "south", "west"):
        frame = pandas.DataFrame({f"c{at}": chance.normal(50, 10, rows // 4).round(3) for at in range(columns - 2)})
        frame = frame.assign(sex=chance.choice(["f", "m"], len(frame)), y=chance.integers(0, 2, len(frame)))
        frame.to_csv(folder / "sites" / f"{site}.csv", index=False)
        size += int(frame.memory_usage().sum())
    return size


def main() -> None:
    """Measure once and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write(Path(folder), given.rows, given.columns)
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "steelyard", "check", "my.toml"], cwd=folder, check=True)
        took, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(f"{took:.1f} s, {cpu:.1f} processor seconds; {used.ru_maxrss >> 10} MB at most, the table is {size >> 20} MB")


if __name__ == "__main__":
    main()
