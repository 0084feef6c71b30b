"""How long the command line takes to start: `python -m benchmarks.startup [--repeats 7] [--slowest 15]`.

Measured are `steelyard --help`, `import torch` alone, and `steelyard run quickstart` until its first round is written.
Each is started several times, in turns. The clock is what a user waits for, and says little on a busy machine; the
processor time beside it (user and system, of the process and its children) is nearly the same on any. The least of the
repeats is shown: what else ran only adds. The aims are for two idle cores. `--slowest` adds which imports take longest.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.kit import Took, machine, start, table, timed

HELP, TORCH = ("-m", "steelyard", "--help"), ("-c", "import torch")
FIRST_ROUND = "steelyard run quickstart, until round 1"
AIMS = {"steelyard --help": 0.35}
OVER_TORCH = 1.5
"""Seconds that the first round may take beyond torch's own import."""


def begun(*words: str) -> Took:
    """Start Python with these words and wait for its end."""
    command = [sys.executable, *words]
    return timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), children=True)


def first_round(scratch: Path) -> Took:
    """Run the quickstart with one round; writing its summary afterwards is not counted on the clock.

    The run's progress on standard error names the round when it is written.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch)) / "run"
    words = ("-m", "steelyard", "run", "quickstart", "--set", "rounds.count=1", "--out", str(folder))
    first, ended = time.perf_counter(), list[float]()

    def run() -> None:
        command = [sys.executable, *words]
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, bufsize=1) as ran:
            assert ran.stderr is not None
            ended.extend(time.perf_counter() for line in ran.stderr if re.search(r"round 1/1\b.*\d%", line))
        if ran.returncode:
            raise SystemExit("the quickstart failed")

    took = timed(run, children=True)
    return Took(ended[0] - first, took.processor) if ended else took


def slowest(count: int) -> list[str]:
    """Return the modules whose own import takes longest for `steelyard --help`, in milliseconds."""
    command = [sys.executable, "-X", "importtime", *HELP]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    rows = [(int(own), name.strip()) for own, name in re.findall(r"import time: +(\d+) \| +\d+ \| (.*)", text)]
    return [f"{own / 1000:7.1f} ms  {name}" for own, name in sorted(rows, reverse=True)[:count]]


def main(
    repeats: int = 7,
    most: Annotated[int, typer.Option("--slowest", help="also name so many of the slowest imports")] = 0,
) -> None:
    """Measure in turns and print a table."""
    print(f"{machine()}\n")
    found: dict[str, list[Took]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        steps: dict[str, Callable[[], Took]] = {
            "steelyard --help": lambda: begun(*HELP),
            "import torch": lambda: begun(*TORCH),
            FIRST_ROUND: lambda: first_round(Path(scratch)),
        }
        for _ in range(repeats):
            for name, step in steps.items():
                found.setdefault(name, []).append(step())
    least = {name: [min(each) for each in zip(*took, strict=True)] for name, took in found.items()}
    aims = AIMS | {FIRST_ROUND: least["import torch"][0] + OVER_TORCH}
    titles = ("", "seconds (least)", "processor seconds (least)", "aim, s")
    rows = [(name, *(f"{one:.2f}" for one in took), aims.get(name)) for name, took in least.items()]
    print(table([dict(zip(titles, row, strict=True)) for row in rows]))
    if most:
        print("\nslowest imports of --help, each without what it imports itself:")
        print("\n".join(slowest(most)))


if __name__ == "__main__":
    start(main)
