"""Papers 003 and 001 written out slowly, one client and one test sample at a time, against the loop on real data."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steelyard import Experiment, randomness
from steelyard.data import load, share_out
from steelyard.data.dataset import Population
from steelyard.learning.models import build
from steelyard.learning.parameters import Layout
from steelyard.learning.training import orders as batch_orders
from steelyard.learning.training import train_client
from steelyard.messages import LossState
from steelyard.runs.tensor_files import read_tensors

SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 5,
    "partition": {"scheme": "dirichlet", "clients": 8, "alpha": 0.4, "size_spread": 0.6, "minimum": 10},
    "model": {"name": "logistic"},
    "training": {"learning_rate": 0.5, "epochs": 2, "batch_size": 16},
    "rounds": {"count": 7, "fraction": 0.4},
    "compute": {"engine": "loop", "device": "cpu"},
}


class Bench:
    """The data, the model and slow functions on them."""

    def __init__(self, described: Experiment) -> None:
        self.described = described
        self.data = load(described.data)
        self.population: Population = share_out(self.data, described.partition, described.seed)
        self.module = build(described.model, self.data.features.shape[1:], self.data.classes, described.seed)
        self.layout = Layout.of(self.module)
        self.start = self.layout.read(self.module).clone()

    def cohort(self, round: int) -> list[str]:
        count = max(1, int(self.described.rounds.fraction * len(self.population.clients) + 0.5))
        return randomness.choose(self.described.seed, round, self.population.names, count)

    def train(self, name: str, model: torch.Tensor, round: int, kappa: tuple[float, ...] | None = None) -> torch.Tensor:
        rows = self.population.by_name[name]
        features = self.data.features[torch.from_numpy(rows.train)]
        labels = self.population.train_labels(rows)
        order = batch_orders(self.described.seed, round, [name], len(labels), self.described.training)[0]
        loss = LossState("cross-entropy", kappa)
        return train_client(self.module, self.layout, model, features, labels, order, self.described.training, loss)[
            0
        ].clone()

    def said(self, model: torch.Tensor, rows: np.ndarray) -> list[int]:
        self.layout.write(self.module, model)
        self.module.eval()
        with torch.no_grad():
            return self.module(self.data.features[torch.from_numpy(rows)]).argmax(dim=1).tolist()

    def accuracy(self, model: torch.Tensor, rows: np.ndarray) -> float:
        true = self.data.labels[torch.from_numpy(rows)].tolist()
        return sum(a == b for a, b in zip(self.said(model, rows), true, strict=True)) / len(rows)

    def everywhere(self, model: torch.Tensor) -> float:
        """Line 16: local accuracies weighted by local test size."""
        total = sum(len(client.test) for client in self.population.clients)
        return sum(self.accuracy(model, c.test) * len(c.test) for c in self.population.clients) / total


def final_model(folder: Path, name: str) -> torch.Tensor:
    (file,) = (folder / "checkpoints").glob("*.safetensors")
    return read_tensors(file)[f"models/{name}"]


def test_online_adjustment_is_algorithm_1(tmp_path: Path) -> None:
    described = Experiment.model_validate(
        {**SMALL, "weighing": {"criteria": ["DS", "LD", "MD"], "priority": "MD>DS>LD", "adjust": {}}}
    )
    bench = Bench(described)
    everything = list(permutations(["DS", "LD", "MD"]))
    order, model, reference = ("MD", "DS", "LD"), bench.start, bench.everywhere(bench.start)
    expected: list[tuple[str, float, int]] = []
    for round in range(1, 8):
        cohort = bench.cohort(round)
        locals_ = {name: bench.train(name, model, round) for name in cohort}
        raw: dict[str, dict[str, float]] = {}
        for name in cohort:
            labels = bench.population.train_labels(bench.population.by_name[name]).tolist()
            distance = float((locals_[name] - model).double().square().sum()) ** 0.5
            raw[name] = {"DS": len(labels), "LD": len(set(labels)), "MD": (distance + 1) ** -0.5}

        def combined(
            priority: tuple[str, ...],
            cohort: list[str] = cohort,
            raw: dict[str, dict[str, float]] = raw,
            locals_: dict[str, torch.Tensor] = locals_,
        ) -> torch.Tensor:
            scores: dict[str, float] = {}
            for name in cohort:
                gate, scores[name] = 1.0, 0.0
                for criterion in priority:
                    gate *= raw[name][criterion] / sum(raw[other][criterion] for other in cohort)
                    scores[name] += gate
            total = sum(scores.values())
            return sum(scores[name] / total * locals_[name].double() for name in cohort).float()  # type: ignore

        place = everything.index(order)
        waiting = everything[place + 1 :] + everything[:place]
        candidate = combined(order)
        accuracy, tests = bench.everywhere(candidate), 0
        best = (accuracy, order, candidate)
        while accuracy < reference:
            if not waiting:
                accuracy, order, candidate = best
                break
            order = waiting.pop(0)
            candidate = combined(order)
            accuracy, tests = bench.everywhere(candidate), tests + 1
            if accuracy > best[0]:
                best = (accuracy, order, candidate)
        model, reference = candidate, accuracy
        expected.append((">".join(order), accuracy, tests))
    result = described.run(tmp_path / "run")
    rounds = result.history.rounds.query("round > 0")
    found = list(zip(rounds["priority"], rounds["accuracy"], rounds["tests"], strict=True))
    assert [row[0] for row in found] == [row[0] for row in expected]
    assert [row[1] for row in found] == pytest.approx([row[1] for row in expected])
    assert [row[2] for row in found] == [row[2] for row in expected]
    assert sum(row[2] for row in expected) > 0, "this seed must adjust at least once, or the test shows nothing"
    # Seven rounds of float32 training, whose sums may run in another order.
    torch.testing.assert_close(final_model(tmp_path / "run", "online(MD>DS>LD)"), model, rtol=1e-4, atol=1e-5)


def test_adafed_is_algorithm_1(tmp_path: Path) -> None:
    partition = {**SMALL["partition"], "server": "fraction", "server_fraction": 0.15, "server_report": "apart"}
    weighing = {"criteria": ["VP"], "when_zero": "keep", "loss": {"adapt": "class-f1"}, "name": "adafed"}
    described = Experiment.model_validate({**SMALL, "partition": partition, "weighing": weighing})
    bench = Bench(described)
    weighs = bench.population.server
    true = bench.data.labels[torch.from_numpy(weighs)].tolist()
    model, kappa = bench.start, None
    losses: list[tuple[float, ...] | None] = []
    for round in range(1, 8):
        losses.append(kappa)
        locals_ = [bench.train(name, model, round, kappa) for name in bench.cohort(round)]
        performance = [bench.accuracy(local, weighs) for local in locals_]
        if sum(performance) > 0:
            parts = [p * local.double() for p, local in zip(performance, locals_, strict=True)]
            model = (torch.stack(parts).sum(dim=0) / sum(performance)).float()
        said = bench.said(model, weighs)
        f1: list[float] = []
        for label in range(10):
            hit = sum(a == b == label for a, b in zip(said, true, strict=True))
            both = said.count(label) + true.count(label)
            f1.append(2 * hit / both if both else 0.0)
        kappa = tuple(1 / (value + 0.1) for value in f1)
    result = described.run(tmp_path / "run")
    rounds = result.history.rounds.query("round > 0")
    used = [json.loads(text)["class_weights"] for text in rounds["loss"]]
    assert used[0] is None
    for mine, theirs in zip(used[1:], losses[1:], strict=True):
        assert mine == pytest.approx(theirs)
    # Seven rounds of float32 training, whose sums may run in another order.
    torch.testing.assert_close(final_model(tmp_path / "run", "adafed"), model, rtol=1e-4, atol=1e-5)
    # What is reported comes from rows that neither weighed nor were trained on.
    reported = bench.accuracy(model, bench.population.report)
    assert rounds["server_accuracy"].iloc[-1] == pytest.approx(reported)
    assert not set(bench.population.report) & set(weighs)
