"""Milliseconds a step of networks that people bring: stacks of clients against one after another in plain torch.

    python -m benchmarks.simulator --bench nets --networks residual,lstm --clients 10,50 --device cuda

Each network with each number of clients is a process of its own; all get ready side by side, then each is timed while
the others wait. A ratio is the time that the loop takes for all clients over that of the stack. On a CPU clients are
also shared out to one process for each core (`processes_ms`), and `over_best` is the faster of both over ours.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.models import ConvNet, Lstm, ResidualNet, Transformer, moderate_cnn, resnet18
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.messages.updates import Task

BATCH = 20
CPU_REPEATS, CPU_SECONDS = 4, 6.0
"""Turns on a CPU at least, and for how long there are more; the best counts."""
IMAGE = (3, 32, 32)


class Lora(nn.Module):
    """A frozen dense layer with two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.lora_A, self.lora_B = nn.Linear(base.in_features, rank, False), nn.Linear(rank, base.out_features, False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.lora_B(self.lora_A(x))


def lora() -> nn.Module:
    """A transformer of four layers whose attention is adapted, and whose last layer is trained."""
    module = Transformer((64,), 10, wide=128, depth=4)
    for block in module.blocks:
        block.inputs, block.output = Lora(block.inputs), Lora(block.output)  # type: ignore[arg-type]
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith("dense"))
    return module


def wide() -> nn.Module:
    """Two wide convolutions of side 5."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8192, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def normed() -> nn.Module:
    """Convolutions with batch norm, dense layers with dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(4096, 128), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


class Encoder(nn.Module):
    """torch's encoder with its usual dropout, also of the attention weights, on rows of 32 places."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.encoder, self.dense = nn.TransformerEncoder(layer, 2), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.encoder(x).mean(dim=1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (lambda: ResidualNet(IMAGE, 10, (16, 32, 64), 1), IMAGE),
    "lstm": (lambda: Lstm(10, tokens=80), (32,)),
    "moderate-cnn": (lambda: moderate_cnn(IMAGE, 10), IMAGE),
    "wide": (wide, IMAGE),
    "resnet18": (lambda: resnet18(IMAGE, 10), IMAGE),
    "normed": (normed, IMAGE),
    "lora": (lora, (64,)),
    "transformer": (lambda: Transformer((64,), 10), (64,)),
}
DIGITS = (1, 28, 28)
BUILT_IN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn-mnist": (lambda: ConvNet(DIGITS, (32, 64), 5, 512, 10), DIGITS),
    "cnn-femnist": (lambda: ConvNet(DIGITS, (32, 64), 5, 2048, 10), DIGITS),
    "encoder": (Encoder, (32, 64)),
}
"""Networks of `benchmarks.kernels`, which has those above too."""


def samples(shape: tuple[int, ...], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise of this shape and labels; tokens where a sample is a row."""
    draw = torch.Generator().manual_seed(1)
    tokens = len(shape) == 1
    drawn = (
        torch.randint(0, 80, (count, *shape), generator=draw)
        if tokens
        else torch.randn((count, *shape), generator=draw)
    )
    features = drawn
    return features, torch.randint(0, 10, (count,), generator=draw)


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def best_of(work: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Return the seconds of the fastest of a few repeats."""
    found: list[float] = []
    for _ in range(repeats):
        settle(device)
        begun = time.perf_counter()
        work()
        settle(device)
        found.append(time.perf_counter() - begun)
    return min(found)


def plain_loop(module: nn.Module, features: torch.Tensor, labels: torch.Tensor, steps: int, batch: int = BATCH) -> None:
    """One client in plain torch, in its own defaults."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for step in range(steps):
        rows = slice(step * batch, (step + 1) * batch)
        module.zero_grad(set_to_none=True)
        functional.cross_entropy(module(features[rows]), labels[rows]).backward()
        with torch.no_grad():
            torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.01)  # type: ignore[arg-type]


class Processes:
    """The plain loop in one process for each core, with one operator thread each: what a user would start by hand."""

    def __init__(self, name: str, clients: int, steps: int) -> None:
        cores = os.cpu_count() or 1
        shares = [clients // cores + (core < clients % cores) for core in range(cores)]
        command = [sys.executable, "-m", "benchmarks.simulators.nets", "share", name, str(steps)]
        self.running = [
            subprocess.Popen(
                [*command, str(share)], env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for share in shares if share
        ]  # fmt: skip
        self._answers()

    def __call__(self) -> None:
        """Train all clients once."""
        for process in self.running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        self._answers()

    def _answers(self) -> None:
        for process in self.running:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError(f"a process of the plain loop ended with code {process.wait()}")

    def close(self) -> None:
        """End them."""
        for process in self.running:
            process.communicate()


def share(name: str, steps: int, clients: int) -> None:
    """Be one of the processes: train so many clients, one after another, for each line on standard input."""
    make, shape = NETWORKS[name]
    module, mine = make().train(), samples(shape, steps * BATCH)
    plain_loop(module, *mine, steps)
    print("ready", flush=True)
    for _ in sys.stdin:
        for _ in range(clients):
            plain_loop(module, *mine, steps)
        print("done", flush=True)


def made(
    name: str, clients: int, compute: ComputeSettings, steps: int, batch: int = BATCH, optimiser: str = "sgd"
) -> tuple[Simulation, Task]:
    """Return clients with noise for so many steps, and what they are to train."""
    make, shape = (NETWORKS | BUILT_IN)[name]
    rows = steps * batch
    features, labels = samples(shape, rows * clients)
    none = np.zeros(0, dtype=np.int64)
    people = tuple(ClientRows(f"c{n:03d}", np.arange(n * rows, (n + 1) * rows), none) for n in range(clients))
    population = Population(Dataset("noise", features, labels, 10), people, none)
    training = TrainingSettings(learning_rate=0.01, batch_size=batch, epochs=1, optimiser=optimiser)  # type: ignore[arg-type]
    simulation = Simulation({0: population}, ModelSettings(name=lambda: make()), training, compute, [], rounds=1000)  # type: ignore[arg-type]
    return simulation, Task("bench", 0, 1, tuple(simulation.names(0)), SimulationServer(simulation).initial(0))


def worker(name: str, clients: int, precision: str, engine: str, device: torch.device, steps: int) -> dict[str, Any]:
    """Time one network; says on standard output that it is ready, and waits for its turn on standard input."""
    make, shape = NETWORKS[name]
    rows = steps * BATCH
    compute = ComputeSettings(device=str(device), precision=precision, engine=engine)  # type: ignore[arg-type]
    simulation, task = made(name, clients, compute, steps)
    begun = time.perf_counter()
    simulation.train([task])
    settle(device)
    ready = time.perf_counter() - begun
    module = copy.deepcopy(make()).to(device).train()
    mine = tuple(part.to(device) for part in samples(shape, rows))
    plain_loop(module, *mine, min(steps, 5))
    print(json.dumps({"ready": round(ready, 1)}), flush=True)
    sys.stdin.readline()
    works: list[Callable[[], object]] = [lambda: simulation.train([task])]
    works.append(lambda: plain_loop(module, *mine, steps))
    if device.type == "cpu":
        processes = Processes(name, clients, steps)
        # In turns, so that a busy spell of the machine hits all alike.
        times: list[list[float]] = []
        begun = time.perf_counter()
        while len(times) < CPU_REPEATS or time.perf_counter() - begun < CPU_SECONDS:
            times.append([best_of(work, device, 1) for work in (*works, processes)])
        processes.close()
    else:
        times = [[best_of(work, device) for work in works]]
    ours, loop, *shared = (np.min(times, axis=0) / steps).tolist()
    beside: dict[str, float] = {}
    if shared:
        best = min(clients * loop, shared[0])
        beside = {"processes_ms": round(1e3 * shared[0], 3), "over_best": round(best / ours, 2)}
    about = simulation.describe()
    return {
        "network": name, "clients": clients, "precision": precision, "parameters": int(about["parameters"]),
        "engine": about["engine_choice"], "why": about["engine_reason"], "ready": round(ready, 1),
        "loop_ms": round(1e3 * loop, 3), "ms": round(1e3 * ours, 3), "ratio": round(clients * loop / ours, 1),
        **beside,
    }  # fmt: skip


def in_turns(commands: Mapping[str, Sequence[str]], side_by_side: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start workers, wait until they are ready, and let each have the device to itself; yield label and answer."""
    wanted = list(commands.items())
    for begin in range(0, len(wanted), side_by_side):
        waiting: list[tuple[str, subprocess.Popen[str], Any]] = []
        for label, command in wanted[begin : begin + side_by_side]:
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115
            process = subprocess.Popen(
                [sys.executable, "-m", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
            waiting.append((label, process, log))
        for _, process, _ in waiting:
            assert process.stdout is not None
            process.stdout.readline()
        for label, process, log in waiting:
            answer = process.communicate("go\n")[0].strip().splitlines() if process.poll() is None else []
            if process.returncode or not answer:
                log.seek(0)
                yield label, {"failed": log.read()[-400:]}
            else:
                yield label, json.loads(answer[-1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time all networks, with each number of clients and in each precision."""
    tail = [options.engine, options.device, str(options.steps)]
    commands = {
        f"{name} {count} {short}": ["benchmarks.simulators.nets", name, str(count), short, *tail]
        for short in options.precision
        for name in options.networks
        for count in options.clients
    }
    rows: list[dict[str, Any]] = []
    for label, row in in_turns(commands, options.side_by_side):
        rows.append({"network": label, **row} if "failed" in row else row)
        if options.format == "text":
            print(json.dumps(rows[-1]), flush=True)
    ratio: dict[str, dict[str, float]] = {}
    for row in rows:
        if "ratio" in row and row["precision"] == options.precision[0]:
            ratio.setdefault(row["network"], {})[str(row["clients"])] = row["ratio"]
    card = torch.cuda.get_device_name() if options.device == "cuda" else f"{os.cpu_count()} CPU cores"
    return {"bench": "nets", "ratio": ratio, "rows": rows, "device": card, "torch": torch.__version__}


if __name__ == "__main__":
    if sys.argv[1] == "share":
        share(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        raise SystemExit
    network, number, short, engine, device, count = sys.argv[1:]
    print(json.dumps(worker(network, int(number), short, engine, torch.device(device), int(count))), flush=True)
