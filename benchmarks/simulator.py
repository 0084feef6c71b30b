"""Seconds per round of Steelyard and of what a user would pick instead, in one run, taking turns.

    python -m benchmarks.simulator --bench C --against loop,flower,pfl,fedjax --format json

A: 10 clients × 600 samples, E=5, B=10, the 1.66 M CNN. B: 37 × about 200, the 6.6 M CNN. C: 1,000 of 10,000 clients
× 20 samples, MLP 784-64-10, one epoch. compare: ten rules of mnist-noniid side by side against ten single runs. The
last line is JSON: {"bench", "sec_per_round": {...}, "ratio": {...}}, a ratio being a peer's time over ours. Set-up of
the peers' environments: benchmarks/README.md. nets: networks that people bring, ours against the loop alone; personal:
the same for algorithms with models of the clients' own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent / "simulators"
SOURCE = HERE.parent.parent / "src"
PEERS = {
    # peer: environment, script, operator threads, started through torchrun with two processes
    "ours": ("", "ours.py", None, False),
    "loop": ("", "loop.py", None, False),
    "flower": ("flwr", "flower.py", 1, False),
    "pfl": ("pfl", "pfl_research.py", 1, True),
    "fedjax": ("jax", "fedjax_peer.py", None, False),
}
PRECISIONS = ("float32", "tf32", "bfloat16")
ROUNDS = {"A": 2, "B": 1, "C": 5, "compare": 3, "nets": 1, "personal": 2}


class Absent(Exception):
    """A peer that is not installed or does not start, with the reason."""


@dataclass
class Peer:
    """A running peer and the line to it."""

    name: str
    process: subprocess.Popen[bytes]
    line: TextIO
    about: dict[str, str]
    seconds: list[float] = field(default_factory=list[float])
    processor: list[float] = field(default_factory=list[float])

    def round(self, number: int) -> tuple[float, float]:
        """Let the peer do one round and return its seconds, on the clock and of processors."""
        self.line.write(f"{number}\n")
        self.line.flush()
        answer = self.line.readline()
        if not answer:
            raise Absent(f"ended in round {number}")
        found = json.loads(answer)
        return float(found["seconds"]), float(found["processor"])

    def stop(self) -> None:
        """Send it home."""
        try:
            self.line.write("stop\n")
            self.line.flush()
        except OSError:
            pass
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.terminate()


def command_of(name: str, venvs: Path | None) -> list[str]:
    """Return how to start a peer, or say that its environment is missing."""
    environment, script, _, twice = PEERS[name]
    if not environment:
        return [sys.executable, str(HERE / script)]
    if venvs is None:
        raise Absent("no --venvs folder and no STEELYARD_PEERS given")
    binaries = venvs / f"venv-{environment}" / "bin"
    if not (binaries / "python").exists():
        raise Absent(f"{binaries.parent} is not there")
    if twice:
        return [str(binaries / "torchrun"), "--standalone", "--nproc-per-node", "2", str(HERE / script)]
    return [str(binaries / "python"), str(HERE / script)]


def start(name: str, options: argparse.Namespace, log: Path) -> Peer:
    """Start a peer and wait until it stands ready; "ours:tf32" is ours in another precision than the first."""
    name, _, precision = name.partition(":")
    command = command_of(name, options.venvs)
    threads = PEERS[name][2] or (options.loop_threads if name == "loop" else None)
    with socket.create_server(("127.0.0.1", 0)) as door:
        settings = {
            "STEELYARD_BENCH": options.bench,
            "STEELYARD_BENCH_PORT": str(door.getsockname()[1]),
            "STEELYARD_BENCH_DEVICE": options.device,
            "STEELYARD_BENCH_PRECISION": precision or options.precision[0],
            "STEELYARD_BENCH_ENGINE": options.engine,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(SOURCE), os.environ.get("PYTHONPATH", "")]),
            **({"STEELYARD_BENCH_EPOCHS": str(options.epochs)} if options.epochs else {}),
            **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        }
        with log.open("wb") as record:
            process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=record, stderr=record, cwd=HERE)
        line = _answer(door, process, options.patience)
    text = line.makefile("rw")
    return Peer(f"{name}:{precision}" if precision else name, process, text, json.loads(text.readline()))


def _answer(door: socket.socket, process: subprocess.Popen[bytes], patience: float) -> socket.socket:
    door.settimeout(1.0)
    for _ in range(int(patience)):
        try:
            line, _ = door.accept()
            line.settimeout(None)
            return line
        except TimeoutError:
            if process.poll() is not None:
                raise Absent(f"ended with code {process.returncode} before its first round") from None
    process.terminate()
    raise Absent(f"not ready after {patience:.0f} s")


def race(options: argparse.Namespace) -> dict[str, Any]:
    """Run ours and the peers in turns and return what the last line says."""
    more = [f"ours:{precision}" for precision in options.precision[1:]]
    wanted = ["ours", *more, *(name for name in options.against if name != "ours")]
    peers: list[Peer] = []
    skipped: dict[str, str] = {}
    logs = Path(options.logs)
    logs.mkdir(parents=True, exist_ok=True)
    try:
        for name in wanted:
            try:
                if options.device != "cpu" and name.partition(":")[0] not in ("ours", "loop"):
                    raise Absent("runs on the CPU only here")
                peers.append(start(name, options, logs / f"{name.replace(':', '-')}.log"))
                say(options, f"{name}: ready, {peers[-1].about}")
            except Absent as why:
                skipped[name] = str(why)
                say(options, f"{name}: skipped, {why} (log: {logs}/{name.replace(':', '-')}.log)")
        rounds(peers, options, skipped)
    finally:
        for peer in peers:
            peer.stop()
    if not peers or peers[0].name != "ours" or not peers[0].seconds:
        raise SystemExit(f"ours did not run: {skipped.get('ours', 'no round')}; see {logs / 'ours.log'}")
    return summary(peers, options, skipped)


def rounds(peers: list[Peer], options: argparse.Namespace, skipped: dict[str, str]) -> None:
    """Take turns: one round each, over and over, so that a busy spell of the machine hits all alike."""
    for number in range(options.warmup + options.rounds):
        for peer in list(peers):
            try:
                seconds, processor = peer.round(number)
            except (Absent, OSError, ValueError) as why:
                skipped[peer.name] = str(why)
                say(options, f"{peer.name}: skipped, {why}")
                peers.remove(peer)
                continue
            note = "" if number >= options.warmup else " (warm-up)"
            say(options, f"round {number} {peer.name:13s} {seconds:9.4f} s, processors {processor:8.2f} s{note}")
            if number >= options.warmup:
                peer.seconds.append(seconds)
                peer.processor.append(processor)


def summary(peers: list[Peer], options: argparse.Namespace, skipped: dict[str, str]) -> dict[str, Any]:
    """Median seconds per round, and each peer's over ours."""
    times = {peer.name: statistics.median(peer.seconds) for peer in peers if peer.seconds}
    best = {peer.name: min(peer.seconds) for peer in peers if peer.seconds}
    ours = dict(zip(["ours", *(f"ours:{more}" for more in options.precision[1:])], options.precision, strict=True))
    by_precision = {
        precision: {peer: round(times[peer] / times[name], 2) for peer in times if peer not in ours}
        for name, precision in ours.items()
        if name in times
    }
    return {
        "bench": options.bench,
        "sec_per_round": {name: round(seconds, 5) for name, seconds in times.items()},
        "ratio": {name: round(seconds / times["ours"], 2) for name, seconds in times.items() if name not in ours},
        **({"ratio_by_precision": by_precision} if len(ours) > 1 else {}),
        "best": {name: round(seconds, 5) for name, seconds in best.items()},
        "ratio_of_best": {name: round(s / best["ours"], 2) for name, s in best.items() if name not in ours},
        "processor_sec": {peer.name: round(min(peer.processor), 3) for peer in peers if peer.processor},
        "rounds": options.rounds,
        "device": options.device,
        "precision": options.precision[0],
        "about": {peer.name: peer.about for peer in peers},
        "skipped": skipped,
        "load": [round(number, 1) for number in os.getloadavg()],
    }


def say(options: argparse.Namespace, text: str) -> None:
    """Print progress, unless only the JSON is wanted."""
    if options.format == "text":
        print(text, flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", choices=sorted(ROUNDS), required=True)
    parser.add_argument("--against", default="loop", help="comma-separated: loop, flower, pfl, fedjax")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--precision", default="float32", help="ours only: float32, tf32 or bfloat16; A, B, C take several with commas"
    )
    parser.add_argument("--recipe", default="mnist-noniid", help="compare: the experiment whose rules are compared")
    parser.add_argument("--engine", default="auto", help="ours only; see docs/reference/simulator.md")
    parser.add_argument("--rounds", type=int, help="timed rounds each")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before those")
    parser.add_argument("--epochs", type=int, help="local epochs instead of the benchmark's own")
    parser.add_argument(
        "--commands", type=int, default=0, help="compare: time the commands too, from start to end, with so many rounds"
    )
    parser.add_argument("--networks", default="", help="nets: comma-separated; default all, on a CPU without resnet18")
    parser.add_argument(
        "--clients",
        default="",
        help="comma-separated numbers; nets: default 10,50, or 10 on a CPU; personal: of both scenes, 20,800 or 20,40",
    )
    parser.add_argument("--algorithms", default="", help="personal: comma-separated; default all")
    parser.add_argument("--steps", type=int, help="nets: steps of a client; default 50, or 2 on a CPU")
    parser.add_argument("--side-by-side", type=int, default=8, help="nets: processes that get ready together")
    parser.add_argument("--loop-threads", type=int, help="operator threads of the plain loop; default torch's own")
    parser.add_argument(
        "--venvs", type=Path, default=os.environ.get("STEELYARD_PEERS"), help="folder with venv-flwr, ..."
    )
    parser.add_argument("--logs", default=".bench-logs", help="where peers' own output goes")
    parser.add_argument("--patience", type=float, default=300, help="seconds a peer may take to get ready")
    options = parser.parse_args(arguments)
    options.against = [name.strip() for name in options.against.split(",") if name.strip()]
    unknown = [name for name in options.against if name not in PEERS]
    if unknown:
        parser.error(f"--against: got {', '.join(unknown)}; allowed: {', '.join(n for n in PEERS if n != 'ours')}")
    options.precision = [name.strip() for name in options.precision.split(",")]
    wrong = [name for name in options.precision if name not in PRECISIONS]
    if wrong or (options.bench == "compare" and len(options.precision) > 1):
        parser.error(f"--precision: got {', '.join(options.precision)}; allowed: {', '.join(PRECISIONS)}; compare: one")
    if options.bench == "nets":
        _nets(parser, options)
    if options.bench == "personal":
        _personal(parser, options)
    options.venvs = Path(options.venvs).resolve() if options.venvs else None
    options.logs = str(Path(options.logs).resolve())
    options.rounds = options.rounds or ROUNDS[options.bench]
    return options


def _nets(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Read what the benchmark of networks takes."""
    from benchmarks.simulators.nets import NETWORKS  # Late: it imports torch.

    cpu = options.device == "cpu"
    # ResNet-18 alone would take minutes on two cores.
    usual = [name for name in NETWORKS if not (cpu and name == "resnet18")]
    options.networks = [name.strip() for name in options.networks.split(",") if name.strip()] or usual
    options.clients = _counts(parser, options.clients or ("10" if cpu else "10,50"))
    options.steps = options.steps or (2 if cpu else 50)
    options.side_by_side = 1 if cpu else options.side_by_side
    if unknown := [name for name in options.networks if name not in NETWORKS]:
        parser.error(f"--networks: got {', '.join(unknown)}; allowed: {', '.join(NETWORKS)}")


def _personal(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Read what the benchmark of personal algorithms takes."""
    from benchmarks.simulators.personal import ALGORITHMS  # Late: it imports torch.

    options.clients = _counts(parser, options.clients or ("20,40" if options.device == "cpu" else "20,800"))
    if len(options.clients) != 2:
        parser.error(f"--clients: got {len(options.clients)} numbers; allowed: two, one for each scene")
    options.algorithms = [name.strip() for name in options.algorithms.split(",") if name.strip()] or list(ALGORITHMS)
    if unknown := [name for name in options.algorithms if name not in ALGORITHMS]:
        parser.error(f"--algorithms: got {', '.join(unknown)}; allowed: {', '.join(ALGORITHMS)}")


def _counts(parser: argparse.ArgumentParser, text: str) -> list[int]:
    counts = [count.strip() for count in text.split(",")]
    if wrong := [count for count in counts if not count.isdecimal() or int(count) < 1]:
        parser.error(f"--clients: got {wrong[0]!r}; allowed: whole numbers from 1, with commas between them")
    return [int(count) for count in counts]


def main(arguments: list[str] | None = None) -> None:
    """Run one benchmark and print its line."""
    options = parse(arguments)
    if options.bench == "compare":
        from benchmarks.simulators.comparison import measure

        print(json.dumps(measure(options)))
        return
    if options.bench == "nets":
        from benchmarks.simulators.nets import measure as measure_nets

        print(json.dumps(measure_nets(options)))
        return
    if options.bench == "personal":
        from benchmarks.simulators.personal import measure as measure_personal

        print(json.dumps(measure_personal(options)))
        return
    print(json.dumps(race(options)))


if __name__ == "__main__":
    main()
