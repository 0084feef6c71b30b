"""Faults at every step and at random moments: `python -m benchmarks.faults steps|power|full|random [--part I/N]`.

`steps` kills (SIGKILL, writes torn) a comparison with two seeds at each call that changes its folder, set-up and
commits alike; `power` also takes from the database, its log and its journal what had not been flushed, sector by
sector, as a power cut does; `full` lets the disk be full from a step on; `random` kills at random moments, every second
time with the power cut. What was flushed is never taken: no power cut does that. Each time the folder must be no run,
and free for the command to be given again, or a run that resumes to the same bits as one that was left alone; no
traceback, ever. Needs Linux and a C compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

LIBRARY = "STEELYARD_FAULTS"
"""Environment variable with the library that counts steps; the process that has it loaded does the work."""
LOADED = (
    *("pandas", "safetensors.torch", "scipy.stats", "steelyard.api", "steelyard.cli.main"),
    *("steelyard.clients.local.simulation", "steelyard.experiment.node", "steelyard.federate"),
    *("steelyard.report.tables", "tests.runs.contents"),
)
"""Modules that are loaded once, before the forks; nothing is computed in that process."""
SECTOR = 512
"""Bytes that a disk writes whole or not at all."""
RULES = ("--rules", "DS,LD>DS", "--seeds", "2")
TEXT = """
name = "small"
seed = 3
[data]
source = "npz"
path = "{data}"
[partition]
scheme = "iid"
clients = 3
[model]
name = "logistic"
[training]
learning_rate = 0.2
epochs = 1
batch_size = 40
[rounds]
count = {rounds}
fraction = 1.0
[store]
checkpoint_every = {every}
[compute]
engine = "loop"
device = "cpu"
threads = 1
[weighing]
criteria = ["DS", "LD"]
"""


class Bench:
    """A folder with an experiment, the run that was left alone, and commands in processes of their own."""

    def __init__(self, scratch: Path, rounds: int, every: int) -> None:
        self.scratch, self.whole = scratch, scratch / "whole"
        self.document = scratch / "small.toml"
        self.inside(lambda: write_data(scratch / "data.npz"))
        self.document.write_text(TEXT.format(data=scratch / "data.npz", rounds=rounds, every=every))
        began = time.monotonic()
        code, told = self.command("compare", self.document, *RULES, "--out", self.whole)
        self.seconds = time.monotonic() - began
        assert code == 0, told

    def inside(self, work: Callable[[], object], seconds: float | None = None) -> int:
        """Do something in a forked process and return its exit code, or minus the signal that ended it."""
        child = os.fork()
        if child == 0:
            try:
                work()
            except SystemExit as end:
                os._exit(end.code if isinstance(end.code, int) else 1)
            except BaseException:
                traceback.print_exc()
                os._exit(99)
            os._exit(0)
        if seconds is not None:
            time.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def command(
        self,
        *words: object,
        at: int = 0,
        full: bool = False,
        counted: Path | None = None,
        flushed: Path | None = None,
        seconds: float | None = None,
    ) -> tuple[int, str]:
        """Give a command; with `at` it meets its fault at that step, with `seconds` after that time.

        `flushed` is a folder that gets what of the database has been flushed.
        """
        output = self.scratch / "output"

        def work() -> None:
            library = ctypes.CDLL(os.environ[LIBRARY])
            library.fault_count.restype = ctypes.c_long
            with output.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            if at or counted or flushed:
                folder = str(words[words.index("--out") + 1] if "--out" in words else words[1])
                library.fault_arm(folder.encode(), ctypes.c_long(at), int(full))
                if flushed:
                    library.fault_shadow(str(flushed).encode())
            from steelyard.cli.main import main

            sys.argv = ["steelyard", *map(str, words)]
            try:
                main()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                if counted:
                    counted.write_text(str(library.fault_count()))

        return self.inside(work, seconds), output.read_text()

    def settle(self, part: Path, *, again: bool) -> str:
        """Go on with what a fault left; returns "resumed" or "no run", and raises where neither is clean."""
        from tests.runs.contents import assert_same_bits

        code, told = self.command("resume", part)
        outcome = "resumed"
        if not (part / "run.sqlite").is_file():
            assert code == 2, (code, told)
            assert "no run here" in told, told
            assert len(told.strip().splitlines()) == 1, told
            outcome = "no run"
            if not again:
                return outcome
            code, told = self.command("compare", self.document, *RULES, "--out", part)
        assert code == 0, (code, told)
        assert "Traceback" not in told, told
        assert self.inside(lambda: assert_same_bits(part, self.whole)) == 0, "other bits than the run left alone"
        return outcome


def cut_power(folder: Path, flushed: Path, draw: random.Random) -> None:
    """Take from the files of a run's database any sectors that were not flushed; those that were stay."""
    (folder / "run.sqlite-shm").unlink(missing_ok=True)
    for path in sorted(folder.glob("run.sqlite*")):
        copy = flushed / path.name
        old, new = copy.read_bytes() if copy.is_file() else b"", path.read_bytes()
        ends = sorted((len(old), len(new)))
        size = draw.choice((*ends, draw.randint(*ends)))
        share = draw.choice((0.0, 0.5, 0.95, 1.0))
        content = b"".join(
            (new if draw.random() < share else old)[at : at + SECTOR].ljust(SECTOR, b"\0")
            for at in range(0, size, SECTOR)
        )
        path.write_bytes(content[:size])
    shutil.rmtree(flushed)


def write_data(path: Path) -> None:
    """Write a few samples of three classes."""
    import numpy as np

    draw = np.random.default_rng(0)
    labels = np.arange(120) % 3
    np.savez(path, x=draw.normal(size=(120, 5)).astype(np.float32) + labels[:, None], y=labels)


def at_steps(bench: Bench, kind: str, *, part: tuple[int, int], stride: int, begin: int) -> Counter[str]:
    """Let the fault come at each step of a run, or each so many, from one on."""
    counted, flushed = bench.scratch / "count", bench.scratch / "flushed"
    folder = bench.scratch / "counted"
    code, told = bench.command("compare", bench.document, *RULES, "--out", folder, counted=counted)
    assert code == 0, told
    steps = int(counted.read_text())
    print(f"{steps} steps", flush=True)
    found: Counter[str] = Counter()
    for at in range(begin + part[0] * stride, steps + 1, part[1] * stride):
        folder = bench.scratch / f"at-{at:05d}"
        flushed.mkdir(exist_ok=True)
        code, told = bench.command(
            *("compare", bench.document, *RULES, "--out", folder), at=at, full=kind == "full", flushed=flushed
        )
        if kind == "full" and code == 0:
            outcome = "not needed"  # what found no room was to be thrown away
        elif kind == "full":
            lines = [line for line in told.strip().splitlines() if not line.startswith("round ")]
            assert code == 2, (at, code, told)
            assert len(lines) == 1, (at, told)
            outcome = bench.settle(folder, again=True)
        else:
            assert code == -signal.SIGKILL, (at, code, told)
            if kind == "power":
                cut_power(folder, flushed, random.Random(at))
            outcome = bench.settle(folder, again=at % 5 == 0)
        found[outcome] += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(flushed, ignore_errors=True)
        if found.total() % 20 == 0:
            print(f"step {at}: {dict(found)}", flush=True)
    return found


def at_random(bench: Bench, count: int, part: tuple[int, int]) -> Counter[str]:
    """Kill at random moments of a run; every second time the power is cut as well."""
    draw = random.Random(part[0])
    flushed = bench.scratch / "flushed"
    found: Counter[str] = Counter()
    for number in range(count // part[1]):
        folder = bench.scratch / f"random-{number:04d}"
        flushed.mkdir(exist_ok=True)
        # The clock of one run is not that of the next: where it was too late, an earlier moment is tried.
        longest, code, told = bench.seconds, 0, ""
        while code == 0:
            shutil.rmtree(folder, ignore_errors=True)
            moment = draw.uniform(0.0, longest)
            code, told = bench.command(
                *("compare", bench.document, *RULES, "--out", folder), flushed=flushed, seconds=moment
            )
            longest *= 0.9
        assert code == -signal.SIGKILL, (code, told)
        power = number % 2 == 1
        if power:
            cut_power(folder, flushed, draw)
        try:
            outcome = bench.settle(folder, again=number % 5 == 0)
        except AssertionError:
            print(f"kill {number} after {moment:.3f} s, power cut: {power}", flush=True)
            raise
        found[outcome + (", power cut" if power else "")] += 1
        shutil.rmtree(folder, ignore_errors=True)
        if found.total() % 20 == 0:
            print(f"{found.total()} kills: {dict(found)}", flush=True)
    return found


def main() -> None:
    """Compile the library, load it into a process of its own, and do what was asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("steps", "power", "full", "random"))
    parser.add_argument("--part", default="0/1", help="this part of so many: 0/4 to 3/4")
    parser.add_argument("--stride", type=int, default=1, help="all but random: each so many steps")
    parser.add_argument("--from", type=int, default=1, dest="begin", help="all but random: the first step")
    parser.add_argument("--count", type=int, default=200, help="random: so many kills, over all parts")
    asked = parser.parse_args()
    index, parts = (int(word) for word in asked.part.split("/"))
    if LIBRARY not in os.environ:
        with tempfile.TemporaryDirectory() as scratch:
            library = Path(scratch) / "faults.so"
            source = Path(__file__).with_name("faults.c")
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
            environment = {**os.environ, LIBRARY: str(library), "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "benchmarks.faults", *sys.argv[1:]]
            sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    for name in LOADED:
        importlib.import_module(name)
    began = time.monotonic()
    # In memory where there is such a folder: what is counted are calls, and hundreds of real flushes take minutes.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        if asked.kind == "random":
            found = at_random(Bench(Path(scratch), rounds=9, every=3), asked.count, (index, parts))
        else:
            bench = Bench(Path(scratch), rounds=3, every=1)
            found = at_steps(bench, asked.kind, part=(index, parts), stride=asked.stride, begin=asked.begin)
    print(f"{asked.kind} {asked.part}: {dict(found)}, all sound, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
