"""How long the command line takes to start: `python -m benchmarks.startup [--repeats 7] [--slowest 15]`.

Measured are `steelyard --help`, `import torch` alone, and `steelyard run quickstart` until its first round is written.
Each is started several times, in turns. The clock is what a user waits for, and says little on a busy machine; the
processor time beside it (user and system, of the process and its children) is nearly the same on any. The least of the
repeats is shown: what else ran only adds. The aims are for two idle cores. `--slowest` adds which imports take longest.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HELP, TORCH = ("-m", "steelyard", "--help"), ("-c", "import torch")
FIRST_ROUND = "steelyard run quickstart, until round 1"
AIMS = {"steelyard --help": 0.35}
OVER_TORCH = 1.5
"""Seconds that the first round may take beyond torch's own import."""
Took = tuple[float, float]
"""Seconds on the clock, and of the processor."""


def _timed(work: Callable[[], object]) -> Took:
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start(*words: str) -> Took:
    """Start Python with these words and wait for its end."""
    return _timed(lambda: subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL))


def first_round(scratch: Path) -> Took:
    """Run the quickstart with one round; writing its summary afterwards is not counted on the clock.

    The run's progress on standard error names the round when it is written.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch)) / "run"
    words = ("-m", "steelyard", "run", "quickstart", "--set", "rounds.count=1", "--out", str(folder))
    begun, ended = time.perf_counter(), 0.0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, bufsize=1
    )
    assert process.stderr is not None
    for line in process.stderr:
        if not ended and re.search(r"round 1/1\b.*\d%", line):
            ended = time.perf_counter()
    if process.wait():
        raise SystemExit("the quickstart failed")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (ended or time.perf_counter()) - begun, used


def slowest(count: int) -> list[str]:
    """Return the modules whose own import takes longest for `steelyard --help`, in milliseconds."""
    command = [sys.executable, "-X", "importtime", *HELP]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    rows = [(int(own), name.strip()) for own, name in re.findall(r"import time: +(\d+) \| +\d+ \| (.*)", text)]
    return [f"{own / 1000:7.1f} ms  {name}" for own, name in sorted(rows, reverse=True)[:count]]


def main() -> None:
    """Measure in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--slowest", type=int, default=0, help="also name so many of the slowest imports")
    chosen = parser.parse_args()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    found: dict[str, list[Took]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        steps: dict[str, Callable[[], Took]] = {
            "steelyard --help": lambda: start(*HELP),
            "import torch": lambda: start(*TORCH),
            FIRST_ROUND: lambda: first_round(Path(scratch)),
        }
        for _ in range(chosen.repeats):
            for name, step in steps.items():
                found.setdefault(name, []).append(step())
    print("\n| | seconds (least) | processor seconds (least) | aim |\n|---|---|---|---|")
    least = {name: (min(t for t, _ in took), min(p for _, p in took)) for name, took in found.items()}
    aims = AIMS | {FIRST_ROUND: least["import torch"][0] + OVER_TORCH}
    for name, (seconds, processor) in least.items():
        print(f"| {name} | {seconds:.2f} | {processor:.2f} | {f'{aims[name]:.2f} s' if name in aims else ''} |")
    if chosen.slowest:
        print("\nslowest imports of --help, each without what it imports itself:")
        print("\n".join(slowest(chosen.slowest)))


if __name__ == "__main__":
    main()
