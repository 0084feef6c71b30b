"""Ten rules of mnist-noniid side by side against ten single runs of them: whole rounds, evaluation included."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from steelyard.clients.protocol import Clients, Server
from steelyard.data import load
from steelyard.data.dataset import Dataset
from steelyard.errors import UserError
from steelyard.experiment.comparing import load_comparison
from steelyard.experiment.model import Experiment
from steelyard.experiment.running import federations_of, plan_of
from steelyard.federation import Federation, RoundRecord, RoundState
from steelyard.rounds import run_rounds


class Stopwatch:
    """A recorder that keeps the time of each round and nothing else."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = time.perf_counter()

    def commit(
        self,
        round: int,
        records: Sequence[RoundRecord],
        states: Mapping[str, RoundState],
        snapshot: Callable[[], Mapping[str, torch.Tensor]],
        *,
        last: bool,
    ) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if round > 0:
            self.seconds.append(now - self._begun)
        self._begun = now


def noise() -> Dataset:
    """MNIST's shapes in noise, for machines without the files; a round costs the same."""
    draw = np.random.default_rng(3)
    labels = torch.from_numpy(draw.integers(0, 10, 70_000))
    images = torch.from_numpy(draw.integers(0, 256, (70_000, 1, 28, 28)).astype(np.uint8))
    return Dataset("noise", images, labels, 10, held_out=np.arange(70_000) >= 60_000)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time the comparison and the single runs; return what the last line says."""
    experiment = prepared(options, options.engine)
    try:
        dataset = load(experiment.data)
    except UserError:
        dataset = noise()
    federations = federations_of(experiment)
    times: dict[str, float] = {}
    about: dict[str, str] = {}
    clients, server = experiment.assemble(dataset)
    times["ours"] = timed(federations, clients, server, experiment, options)
    about["ours"] = str(clients.describe()["engine_choice"])
    times["ten_single_ours"] = sum(timed([one], clients, server, experiment, options) for one in federations)
    clients.close()
    if "loop" in options.against:
        plain = prepared(options, "loop")
        clients, server = plain.assemble(dataset)
        times["ten_single_loop"] = sum(timed([one], clients, server, plain, options) for one in federations)
        clients.close()
    return {
        "bench": "compare",
        "sec_per_round": {name: round(seconds, 5) for name, seconds in times.items()},
        "ratio": {name: round(seconds / times["ours"], 2) for name, seconds in times.items() if name != "ours"},
        "rules": [federation.name for federation in federations],
        "rounds": options.rounds,
        "device": options.device,
        "precision": options.precision,
        "data": dataset.name,
        "about": about,
    }


def prepared(options: argparse.Namespace, engine: str) -> Experiment:
    """Return mnist-noniid with its ten default rules, on the device asked for."""
    changes = [
        f"rounds.count={options.warmup + options.rounds}",
        f"compute.device={options.device}",
        f"compute.precision={options.precision}",
        f"compute.engine={engine}",
    ]
    if options.epochs:
        changes.append(f"training.epochs={options.epochs}")
    experiment = load_comparison("mnist-noniid", changes)
    assert isinstance(experiment, Experiment)
    return experiment


def timed(
    federations: Sequence[Federation],
    clients: Clients,
    server: Server,
    experiment: Experiment,
    options: argparse.Namespace,
) -> float:
    """Median seconds of a whole round of these federations, after the warm-up."""
    watch = Stopwatch()
    run_rounds(federations, {}, clients, server, plan_of(experiment), watch)
    seconds = statistics.median(watch.seconds[options.warmup :])
    if options.format == "text":
        print(f"{len(federations):2d} federations {federations[0].name:10s} {seconds:8.4f} s a round", flush=True)
    return seconds
