"""Which of our own kernels still win: each against what the general engine does without it.

    python -m benchmarks.kernels --device cuda --out kernels.md    # about seven minutes on one H200 with 16 cores

Kernels of the convolutional network (Triton) against the same step compiled and in graphs, in training and in tests;
the optimisers' and the LSTM's kernels against torch's operators; attention with draws by name, which stacks, against
the plain loop, which is what is left without it; on the CPU, Winograd's minimal filtering against the library's
convolution. A kernel is worth its code where it is a tenth faster in the sum of its rows, and the last lines say so.
Workers get ready side by side; each is timed while the others wait.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from benchmarks.kit import start, table, words
from benchmarks.simulators.nets import BUILT_IN, NETWORKS, best_of, in_turns, made, plain_loop, samples, settle
from steelyard.clients.local import ComputeSettings

WIN = 1.1
"""Times as fast as without it that a kernel must be."""


@dataclass(frozen=True)
class Case:
    """One thing that is timed: a network, its clients, and how they are trained."""

    kernel: str
    way: str
    """With which kernel, or without."""
    network: str
    engine: str
    clients: int = 10
    batch: int = 10
    steps: int = 50
    optimiser: str = "sgd"
    without: str = ""
    """What is switched off: triton, optimiser, lstm."""
    tests: int = 0
    """So many models are tested, in place of a training."""
    precision: str = "float32"
    device: str = "cuda"
    threads: int = 0

    @property
    def work(self) -> str:
        """What is done, whoever does it."""
        if self.tests:
            return f"{self.network}, {self.tests} models on {self.steps * self.batch} rows"
        cores = f", {self.threads} threads" if self.threads else ""
        return f"{self.network}, {self.clients} × {self.batch}, {self.optimiser}{cores}"


def on_gpu(device: str, precisions: Sequence[str]) -> list[Case]:
    """Return the cases of a GPU, the ones that take a compiler longest first."""
    found: list[Case] = []
    conv = "convolutional kernels"
    ways = (("kernels", "stacked/hand"), ("compiled", "stacked/compiled"), ("graph", "stacked/graph"))
    for name, clients, batch, steps in (
        ("cnn-mnist", 10, 10, 50), ("cnn-femnist", 37, 10, 50), ("cnn-mnist", 10, 600, 4), ("cnn-mnist", 100, 50, 10),
    ):  # fmt: skip
        found += [Case(conv, way, name, engine, clients, batch, steps) for way, engine in ways]
    found += [Case(conv, "torch's operators", "cnn-mnist", "stacked/hand", without="triton")]
    for engine in ("stacked/compiled", "stacked/graph"):
        for clients in (10, 50):
            given = Case("LSTM's kernel", f"kernel, {engine}", "lstm", engine, clients, 20)
            found += [given, replace(given, way=f"cell by cell, {engine}", without="lstm")]
        found.append(Case("attention by name", engine, "encoder", engine, 10, 20))
    found.append(Case("attention by name", "plain loop", "encoder", "loop", 10, 20))
    for optimiser in ("adam", "adadelta"):
        given = Case("optimisers' kernels", "kernel", "cnn-mnist", "stacked/hand", optimiser=optimiser)
        found += [given, replace(given, way="torch's operators", without="optimiser")]
    tested = Case("convolutional kernels in tests", "kernels", "cnn-mnist", "stacked/hand", 10, 100, 100, tests=10)
    found += [tested, replace(tested, way="one by one", without="triton")]
    every = [replace(each, precision=short, device=device) for short in precisions for each in found]
    return sorted(every, key=lambda each: each.engine != "stacked/compiled")


def on_cpu(cores: Sequence[int]) -> list[Case]:
    """Return the cases of a CPU, with so many threads each."""
    ways = (("Winograd", "fused/winograd"), ("library", "fused"))
    return [
        Case("Winograd", way, "cnn-mnist", engine, 10, batch, 20, device="cpu", threads=threads)
        for threads in cores
        for batch in (10, 50)
        for way, engine in ways
    ]


def switched_off(without: str) -> ExitStack:
    """Return the block in which a kernel is not used."""
    from steelyard.clients.local import hardware, layers
    from steelyard.clients.local.engines import table as engines

    stack = ExitStack()
    if without == "triton":
        stack.enter_context(mock.patch.object(hardware, "_triton", None))
    elif without == "optimiser":
        stack.enter_context(mock.patch.object(engines, "kernel_descent", lambda descent, device: descent))
    elif without == "lstm":
        stack.enter_context(mock.patch.object(layers, "_lstm_steps", return_value=None))
    return stack


def worker(case: Case) -> dict[str, Any]:
    """Time one case; says on standard output that it is ready, and waits for its turn on standard input."""
    device = torch.device(case.device)
    given = {"threads": case.threads} if case.threads else {}
    compute = ComputeSettings(device=case.device, precision=case.precision, engine=case.engine, **given)  # type: ignore[arg-type]
    with switched_off(case.without):
        simulation, task = made(case.network, case.clients, compute, case.steps, case.batch, case.optimiser)
        if case.tests:
            context = simulation.context
            models = task.parameters.to(device).repeat(case.tests, 1)
            rows = torch.arange(case.steps * case.batch, device=device)
            dataset, evaluator = context.population(0).dataset, context.evaluator

            def work() -> None:
                evaluator.outputs(models, dataset, rows)
        elif case.engine == "loop":
            make, shape = (NETWORKS | BUILT_IN)[case.network]
            module = copy.deepcopy(make()).to(device).train()
            mine = [part.to(device) for part in samples(shape, case.steps * case.batch)]

            def work() -> None:
                for _ in range(case.clients):
                    plain_loop(module, *mine, case.steps, case.batch)
        else:

            def work() -> None:
                simulation.train([task])

        begun = time.perf_counter()
        work()
        settle(device)
        ready = time.perf_counter() - begun
        print(json.dumps({"ready": round(ready, 1)}), flush=True)
        sys.stdin.readline()
        seconds = best_of(work, device)
    chosen = "" if case.tests or case.engine == "loop" else simulation.describe()["engine_choice"]
    return {"ms": round(1e3 * seconds / (1 if case.tests else case.steps), 4), "ready": round(ready, 1), "took": chosen}


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each kernel and precision: whether it wins, over all work that was timed with and without."""
    lines: list[str] = []
    for kernel, precision in dict.fromkeys((row["kernel"], row["precision"]) for row in rows):
        mine = [row for row in rows if (row["kernel"], row["precision"]) == (kernel, precision) and "ms" in row]
        ratios: dict[str, float] = {}
        for work in dict.fromkeys(row["work"] for row in mine):
            ways = {row["way"]: row["ms"] for row in mine if row["work"] == work}
            ours = [ms for way, ms in ways.items() if _is_ours(kernel, way)]
            others = [ms for way, ms in ways.items() if not _is_ours(kernel, way)]
            if ours and others:
                ratios[work] = min(others) / min(ours)
        if ratios:
            least, most = min(ratios.values()), max(ratios.values())
            won = sum(ratio >= WIN for ratio in ratios.values())
            lines.append(
                f"{kernel}, {precision}: {least:.2f} to {most:.2f} times as fast as the best without it; "
                f"at least {WIN} in {won} of {len(ratios)}"
            )
    return lines


def _is_ours(kernel: str, way: str) -> bool:
    named = {"attention by name": "stacked", "Winograd": "Winograd"}
    return way.startswith((named.get(kernel, "kernel"),))


def main(
    device: str = "cuda",
    precision: str = "bfloat16,float32",
    only: Annotated[str, typer.Option(help="kernels, comma-separated; default all")] = "",
    side_by_side: int = 14,
    seconds: Annotated[float, typer.Option(help="no worker is started after so many")] = 420,
    cores: Annotated[str, typer.Option(help="numbers of threads for the cases of the CPU")] = "",
    tiny: bool = False,
    out: Path | None = None,
) -> None:
    """Time every kernel with and without it; print a table and the verdicts."""
    begun, rows, left = time.monotonic(), list[dict[str, Any]](), 0
    gpu = [] if device == "cpu" else on_gpu(device, words(precision))
    cpu = on_cpu([int(count) for count in words(cores)] or sorted({2, os.cpu_count() or 2}))
    if tiny:
        gpu, cpu = [], [replace(case, clients=2, batch=2, steps=1, threads=1) for case in cpu[:2]]
    wanted = [case for case in (*cpu, *gpu) if not only or case.kernel in words(only)]
    batches = [wanted[place : place + side_by_side] for place in range(0, len(wanted), side_by_side)]
    for batch in batches:
        if time.monotonic() - begun > seconds:
            left += len(batch)
            continue
        commands = {str(n): ["benchmarks.kernels", "worker", json.dumps(asdict(case))] for n, case in enumerate(batch)}
        for label, found in in_turns(commands, len(batch)):
            case = batch[int(label)]
            about = {"kernel": case.kernel, "work": case.work, "precision": case.precision, "way": case.way}
            rows.append({**about, **found})
            print(json.dumps(rows[-1]), flush=True)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    columns = ("kernel", "work", "precision", "way", "ms", "ready")
    text = "\n\n".join(
        [
            f"{card}, torch {torch.__version__}; ms of a step of all clients, or of a test of all models."
            + (f" Not run for want of time: {left} of {left + len(rows)}." if left else ""),
            table([{name: row.get(name, row.get("failed", "")) for name in columns} for row in rows]),
            "\n".join(f"- {line}" for line in verdicts(rows)),
        ]
    )
    print(text)
    if out is not None:
        out.write_text(f"{text}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        print(json.dumps(worker(Case(**json.loads(sys.argv[2])))), flush=True)
    else:
        start(main)
