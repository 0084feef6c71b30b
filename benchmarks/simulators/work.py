"""The benchmarks' work and data, and the gate through which peers take turns; needs NumPy only.

Every peer runs in an environment of its own, so nothing here may import more than that.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bench:
    """One benchmark: how many clients, of what size, and what they train."""

    name: str
    clients: int
    cohort: int
    samples: int
    ragged: bool
    classes: int
    epochs: int
    batch: int
    hidden: int
    convolutional: bool
    rate: float = 0.01


BENCHES = {
    "A": Bench("A", 100, 10, 600, False, 10, 5, 10, 512, True),
    "B": Bench("B", 371, 37, 200, True, 62, 5, 10, 2048, True),
    "C": Bench("C", 10_000, 1000, 20, False, 10, 1, 20, 64, False),
}


@dataclass(frozen=True)
class Data:
    """Samples of all clients, one client after another: client i owns rows begin[i] to begin[i + 1]."""

    features: np.ndarray
    labels: np.ndarray
    begins: np.ndarray

    def size(self, client: int) -> int:
        return int(self.begins[client + 1] - self.begins[client])


def make_data(bench: Bench) -> Data:
    """Draw noisy images around one pattern per class; the same for every peer."""
    draw = np.random.default_rng(7)
    sizes = np.full(bench.clients, bench.samples)
    if bench.ragged:
        sizes = np.clip(draw.normal(bench.samples, 60, bench.clients), 40, 400).astype(int)
    begins = np.concatenate([[0], np.cumsum(sizes)])
    labels = draw.integers(0, bench.classes, begins[-1])
    patterns = draw.standard_normal((bench.classes, 784), dtype=np.float32)
    features = draw.standard_normal((int(begins[-1]), 784), dtype=np.float32)
    for begin in range(0, len(labels), 10_000):
        features[begin : begin + 10_000] += 0.5 * patterns[labels[begin : begin + 10_000]]
    return Data(features, labels, begins)


def pick(bench: Bench, round: int) -> list[int]:
    """Choose the clients of a round, the same for every peer."""
    draw = np.random.default_rng((11, round))
    return sorted(draw.choice(bench.clients, bench.cohort, replace=False).tolist())


def chosen() -> Bench:
    """Return the benchmark that this process was started for."""
    from dataclasses import replace

    bench = BENCHES[os.environ["STEELYARD_BENCH"]]
    epochs = os.environ.get("STEELYARD_BENCH_EPOCHS")
    return replace(bench, epochs=int(epochs)) if epochs else bench


def processor_seconds() -> float:
    """Return the processor time of this process and all below it so far: what a busy machine does not stretch."""
    ticks: dict[int, tuple[int, float]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            ticks[int(entry)] = (int(fields[1]), sum(int(field) for field in fields[11:15]))
    top = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    mine, grown = {top}, True
    while grown:
        below = {process for process, (parent, _) in ticks.items() if parent in mine} | mine
        grown, mine = len(below) > len(mine), below
    return sum(ticks[process][1] for process in mine if process in ticks) / os.sysconf("SC_CLK_TCK")


class Gate:
    """A peer's end of the line to the benchmark: wait for a turn, do a round, say how long it took."""

    def __init__(self, **about: str) -> None:
        self._line = socket.create_connection(("127.0.0.1", int(os.environ["STEELYARD_BENCH_PORT"])))
        self._text = self._line.makefile("rw")
        self._say(about)
        self._begun = self._processor = 0.0

    def _say(self, message: dict[str, str] | dict[str, float]) -> None:
        self._text.write(json.dumps(message) + "\n")
        self._text.flush()

    def wait(self) -> int | None:
        """Block until it is this peer's turn; return the round, or None when there is nothing more to do."""
        word = self._text.readline().strip()
        self._processor = processor_seconds()
        self._begun = time.perf_counter()
        return int(word) if word.isdigit() else None

    def done(self) -> None:
        """Report the seconds since `wait` returned."""
        seconds = time.perf_counter() - self._begun
        self._say({"seconds": seconds, "processor": processor_seconds() - self._processor})

    def serve(self, work: Callable[[int], None]) -> None:
        """Do rounds until told to stop."""
        while (round := self.wait()) is not None:
            work(round)
            self.done()
