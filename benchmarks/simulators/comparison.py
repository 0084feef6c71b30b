"""Ten rules of one experiment side by side against ten single runs of them: training alone and whole rounds."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from steelyard.base.errors import UserError
from steelyard.clients.protocol import Clients, Server
from steelyard.data import load
from steelyard.data.dataset import Dataset
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.parts import federations_of, plan_of
from steelyard.experiment.rules import load_comparison
from steelyard.messages.updates import Task, Updates
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Federation, RoundRecord, Snapshot, States


def settle() -> None:
    """Wait until the device has done all it was given: only then does the clock say something."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Stopwatch:
    """A recorder that keeps the time of each round and nothing else."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = time.perf_counter()

    def commit(
        self, round: int, records: Sequence[RoundRecord], states: States, snapshot: Snapshot, *, last: bool
    ) -> None:
        settle()
        now = time.perf_counter()
        if round > 0:
            self.seconds.append(now - self._begun)
        self._begun = now


class Watched:
    """Clients whose training is timed; all else goes straight through."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clients, name)

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        """Train and keep the time, the device's work included."""
        settle()
        begun = time.perf_counter()
        answers = self._clients.train(tasks)
        settle()
        self.seconds.append(time.perf_counter() - begun)
        return answers


class Times(NamedTuple):
    """Seconds a round: all of it, and its training alone."""

    whole: float
    training: float


def noise() -> Dataset:
    """MNIST's shapes in noise, for machines without the files; a round costs the same."""
    draw = np.random.default_rng(3)
    labels = torch.from_numpy(draw.integers(0, 10, 70_000))
    images = torch.from_numpy(draw.integers(0, 256, (70_000, 1, 28, 28)).astype(np.uint8))
    return Dataset("noise", images, labels, 10, held_out=np.arange(70_000) >= 60_000)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time the comparison and the single runs; return what the last line says."""
    experiment = comparison(options, options.engine)
    dataset: Dataset | None = None
    try:
        name = load(experiment.data).name
    except UserError:
        if options.recipe != "mnist-noniid":
            raise
        dataset, name = noise(), "noise"
        experiment = comparison(options, options.engine, "data.source=memory")
    federations = federations_of(experiment)
    times: dict[str, Times] = {}
    clients, server = experiment.assemble(dataset)
    times["ours"] = timed(federations, clients, server, experiment, options)
    about = {"ours": str(clients.describe()["engine_choice"])}
    times["ten_single_ours"] = singles(federations, clients, server, experiment, options)
    clients.close()
    if "loop" in options.against:
        plain = comparison(options, "loop", *(() if dataset is None else ("data.source=memory",)))
        clients, server = plain.assemble(dataset)
        times["ten_single_loop"] = singles(federations, clients, server, plain, options)
        about["loop"] = f"{clients.describe()['engine_choice']}, {plain.compute.precision}"
        clients.close()
    found = {
        "bench": "compare",
        "sec_per_round": {name: round(each.whole, 5) for name, each in times.items()},
        "ratio": ratios({name: each.whole for name, each in times.items()}),
        "training_sec_per_round": {name: round(each.training, 5) for name, each in times.items()},
        "training_ratio": ratios({name: each.training for name, each in times.items()}),
        "rules": [federation.name for federation in federations],
        "rounds": options.rounds,
        "device": options.device,
        "precision": options.precision[0],
        "data": name,
        "about": about,
    }
    return found | ({"commands": commands(options, found["rules"])} if options.commands else {})


def ratios(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each time over that of the rules side by side."""
    return {name: round(each / seconds["ours"], 2) for name, each in seconds.items() if name != "ours"}


def singles(
    federations: Sequence[Federation],
    clients: Clients,
    server: Server,
    experiment: LearningDescription,
    options: argparse.Namespace,
) -> Times:
    """Run the federations one after another and add up their seconds."""
    each = [timed([one], clients, server, experiment, options) for one in federations]
    return Times(sum(times.whole for times in each), sum(times.training for times in each))


def commands(options: argparse.Namespace, rules: Sequence[str]) -> dict[str, Any]:
    """Time what a user types, from start to end: `steelyard compare` with all rules, and once with each alone."""
    common = [sys.executable, "-m", "steelyard", "compare", options.recipe]
    common += [word for change in changes(options, options.commands, options.engine) for word in ("--set", change)]
    source = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        # What is found out once per machine (kernels, the choice of engine) is there for every command alike.
        environment = {**os.environ, "PYTHONPATH": source, "STEELYARD_CACHE": folder}

        def run(number: int, *words: str) -> float:
            begun = time.perf_counter()
            command = [*common, *words, "--out", f"{folder}/{number}"]
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
            return time.perf_counter() - begun

        run(0, "--rules", rules[0])
        together = run(1)
        alone = sum(run(2 + number, "--rules", rule) for number, rule in enumerate(rules))
    return {
        "rounds": options.commands,
        "seconds": {"one_comparison": round(together, 2), "ten_commands": round(alone, 2)},
        "ratio": round(alone / together, 2),
    }


def changes(options: argparse.Namespace, rounds: int, engine: str) -> list[str]:
    """Return what differs from the recipe."""
    return [
        f"rounds.count={rounds}",
        f"compute.device={options.device}",
        # The plain loop takes TF32 whatever ours takes: that is torch's own default for convolutions.
        f"compute.precision={'tf32' if engine == 'loop' else options.precision[0]}",
        f"compute.engine={engine}",
        *([f"training.epochs={options.epochs}"] if options.epochs else []),
    ]


def comparison(options: argparse.Namespace, engine: str, *more: str) -> LearningDescription:
    """Return the recipe with its default rules, ten for mnist-noniid, on the device asked for."""
    fields = [*changes(options, options.warmup + options.rounds, engine), *more]
    experiment = load_comparison(options.recipe, fields)
    assert isinstance(experiment, LearningDescription)
    return experiment


def timed(
    federations: Sequence[Federation],
    clients: Clients,
    server: Server,
    experiment: LearningDescription,
    options: argparse.Namespace,
) -> Times:
    """Median seconds of a round of these federations, after the warm-up."""
    watch, watched = Stopwatch(), Watched(clients)
    run_rounds(federations, {}, watched, server, plan_of(experiment), watch)
    found = Times(
        statistics.median(watch.seconds[options.warmup :]), statistics.median(watched.seconds[options.warmup :])
    )
    if options.format == "text":
        names = f"{len(federations):2d} federations {federations[0].name:18s}"
        print(f"{names} {found.whole:8.4f} s a round, training {found.training:8.4f} s", flush=True)
    return found
