"""Kills of a federation's server at random moments: `python -m benchmarks.server_kills [--kills 15] [--seed 1]`.

Two hospitals with TLS, as real processes. One run is left alone. Then runs of the same experiment are killed, again and
again at random moments of their whole time: `serve` itself, its SuperLink or its server app. Each time the server is
served again where it is gone, and the run goes on by itself, or is submitted again where it stopped. In the end every
run must have the same rows, states and models as the one that was left alone, bit by bit.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from tests.federate.real_federation import Federation, hospitals, server_apps
from tests.runs.contents import checkpoint, rows

from benchmarks.kit import start
from steelyard.federate.queue import ServerFolder, ServerRun, runs_of
from steelyard.federate.workers import is_running

PARTS = {"superlink": b"steelyard.federate.server", "server app": b"flwr-serverapp"}
"""Parts of a server beside `serve` itself, by a word of their command."""
KILLS_OF_A_RUN = 3
PATIENCE = 600.0
ROUNDS = ("--set", "rounds.count=12")


class Bench:
    """A server with two hospitals, and the runs that are submitted to it."""

    def __init__(self, federation: Federation) -> None:
        self.federation, self.server = federation, ServerFolder(federation.root / "server")
        begun = time.monotonic()
        done = federation.steelyard("submit", "server", "hospitals.toml", *ROUNDS, "--out", "whole")
        assert done.returncode == 0, done.stderr
        self.seconds = time.monotonic() - begun

    def submit(self, *words: str) -> ServerRun:
        """Put a run into the queue and leave it to the server."""
        before = len(runs_of(self.server))
        process = self.federation.start_and_listen("submit", "server", *words)
        self._until(lambda: len(runs_of(self.server)) > before or process.poll() is not None, "it is not submitted")
        process.kill()
        _, printed = process.communicate()
        assert len(runs_of(self.server)) > before, printed
        return runs_of(self.server)[-1]

    def kill(self, rng: random.Random) -> str | None:
        """Kill a part of the server; returns which, or None where no such part is there now."""
        name = rng.choice(["serve", *PARTS])
        found = self._serving() if name == "serve" else server_apps(self.federation.root, PARTS[name])
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._until(lambda: not any(map(is_running, found)), f"{name} lives on")
        return name if found else None

    def go_on(self, run: ServerRun) -> ServerRun:
        """Serve again where nobody does, and submit the run again where it stopped."""
        if not self.server.is_served():
            self._until(
                lambda: not self._serving() and not server_apps(self.federation.root, b""), "the server lives on"
            )
            listen = f"127.0.0.1:{self.federation.port}"
            self.federation.start("serve", "serve", "server", "--tls", "tls", "--listen", listen)
            self._until(self.server.is_served, "it does not serve again")
        if run.status() != "stopped":
            return run
        # What was killed before it had a folder begins anew.
        return self.submit(
            *((str(run.out),) if run.out.exists() else ("hospitals.toml", *ROUNDS, "--out", str(run.out)))
        )

    def end(self, run: ServerRun) -> None:
        """Wait until a run has finished, whatever it takes."""
        deadline = time.monotonic() + PATIENCE
        while run.status() != "finished":
            assert time.monotonic() < deadline, f"{run.out}: {run.outcome}, {run.status()}"
            run = self.go_on(run)
            time.sleep(0.2)

    def _serving(self) -> list[int]:
        return [one.pid for one in self.federation.processes if one.name == "serve" and one.code is None]

    def _until(self, what: object, words: str) -> None:
        assert callable(what)
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < deadline, words
            time.sleep(0.1)


def differences(one: Path, other: Path) -> list[str]:
    """Return what two runs differ in; but for digests of signed updates, whose salts are their run's, and the chain."""
    ours, theirs = rows(one), rows(other)
    for found in (ours, theirs):
        found["digests"] = [row[:3] for row in found["digests"]]
    (_, states, tensors), (_, wanted_states, wanted) = checkpoint(one), checkpoint(other)
    differ = [table for table in ours if table != "chain" and ours[table] != theirs[table]]
    differ += [] if states == wanted_states else ["states"]
    return differ + [name for name in wanted if not torch.equal(tensors[name], wanted[name])]


def main(kills: int = 15, seed: int = 1) -> None:
    """Kill, and print what came of it."""
    rng, counted, runs = random.Random(seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as scratch, hospitals(Path(scratch)) as federation:
        bench = Bench(federation)
        print(f"left alone: {bench.seconds:.0f} s", flush=True)
        while counted.total() < kills:
            runs += 1
            run = bench.submit("hospitals.toml", *ROUNDS, "--out", f"killed-{runs}")
            for _ in range(min(KILLS_OF_A_RUN, kills - counted.total())):
                time.sleep(rng.uniform(0, bench.seconds))
                if run.status() == "finished":
                    break
                if victim := bench.kill(rng):
                    counted[victim] += 1
                    print(f"run {runs}: {victim} killed after round {run.document()['round']}", flush=True)
                run = bench.go_on(run)
            bench.end(run)
            assert not (found := differences(run.out, Path(scratch) / "whole")), f"{run.out} differs: {found}"
            print(f"run {runs}: the same bits", flush=True)
    print(f"{counted.total()} kills ({dict(counted)}) in {runs} runs: all ended with the same bits")


if __name__ == "__main__":
    start(main)
