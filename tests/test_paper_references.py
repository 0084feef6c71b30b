"""Papers 003 and 001 written out slowly, one client and one test sample at a time, against the loop on real data."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import small
from tests.runs.contents import models

from steelyard import Experiment
from steelyard.base import randomness
from steelyard.data import load, share_out
from steelyard.data.dataset import Population
from steelyard.learning.models import build
from steelyard.learning.parameters import Layout
from steelyard.learning.training import orders as batch_orders
from steelyard.learning.training import train_client
from steelyard.messages.updates import LossState

CHANGES: dict[str, Any] = {
    "partition": {"clients": 8, "alpha": 0.4, "size_spread": 0.6},
    "training": {"learning_rate": 0.5, "epochs": 2, "batch_size": 16},
    "rounds": {"count": 7, "fraction": 0.4},
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
        rows, how = self.population.by_name[name], self.described.training
        features, labels = self.data.features[torch.from_numpy(rows.train)], self.population.train_labels(rows)
        order = batch_orders(self.described.seed, round, [name], len(labels), how)[0]
        loss = LossState("cross-entropy", kappa)
        return train_client(self.module, self.layout, model, features, labels, order, how, loss)[0].clone()

    def said(self, model: torch.Tensor, rows: np.ndarray) -> list[int]:
        self.layout.write(self.module, model)
        with torch.no_grad():
            return self.module.eval()(self.data.features[torch.from_numpy(rows)]).argmax(dim=1).tolist()

    def accuracy(self, model: torch.Tensor, rows: np.ndarray) -> float:
        true = self.data.labels[torch.from_numpy(rows)].tolist()
        return sum(a == b for a, b in zip(self.said(model, rows), true, strict=True)) / len(rows)

    def everywhere(self, model: torch.Tensor) -> float:
        """Line 16: local accuracies weighted by local test size."""
        total = sum(len(client.test) for client in self.population.clients)
        return sum(self.accuracy(model, c.test) * len(c.test) for c in self.population.clients) / total


def weighted(models: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    return sum(weight / sum(weights) * model.double() for weight, model in zip(weights, models, strict=True)).float()  # type: ignore


def in_order(order: tuple[str, ...], raw: list[dict[str, float]]) -> list[float]:
    """Each criterion's share counts as far as those before it are met."""
    scores: list[float] = []
    for mine in raw:
        gates = np.cumprod([mine[name] / sum(other[name] for other in raw) for name in order])
        scores.append(float(gates.sum()))
    return scores


def test_online_adjustment_is_algorithm_1(tmp_path: Path) -> None:
    described = small(**CHANGES, weighing={"criteria": ["DS", "LD", "MD"], "priority": "MD>DS>LD", "adjust": {}})
    bench = Bench(described)
    everything = list(permutations(["DS", "LD", "MD"]))
    order, model, reference = ("MD", "DS", "LD"), bench.start, bench.everywhere(bench.start)
    expected: list[tuple[str, float, int]] = []
    weights: list[dict[str, float]] = []
    for round in range(1, 8):
        names = bench.cohort(round)
        trained = [bench.train(name, model, round) for name in names]
        raw: list[dict[str, float]] = []
        for name, local in zip(names, trained, strict=True):
            labels = bench.population.train_labels(bench.population.by_name[name]).tolist()
            distance = float((local - model).double().square().sum()) ** 0.5
            raw.append({"DS": len(labels), "LD": len(set(labels)), "MD": (distance + 1) ** -0.5})
        place = everything.index(order)
        waiting = [order, *everything[place + 1 :], *everything[:place]]
        tried: list[tuple[float, tuple[str, ...], torch.Tensor]] = []
        while waiting and (not tried or tried[-1][0] < reference):
            candidate = weighted(trained, in_order(waiting[0], raw))
            tried.append((bench.everywhere(candidate), waiting.pop(0), candidate))
        # The first that is as good as the round before; where none is, the best of all, the first of equals.
        reference, order, model = tried[-1] if tried[-1][0] >= reference else max(tried, key=lambda each: each[0])
        expected.append((">".join(order), reference, len(tried) - 1))
        scores = np.array(in_order(order, raw))
        weights.append(dict(zip(names, (scores / scores.sum()).tolist(), strict=True)))
    history = described.run(tmp_path / "run").history
    rounds = history.rounds.query("round > 0")
    for round, given in enumerate(weights, start=1):
        stored = history.clients.query(f"round == {round}").set_index("client")["weight"]
        # Divergence is measured on float32 models that differ by the roundings below, and enters by its root.
        assert dict(stored) == pytest.approx(given, rel=1e-5)
    assert list(rounds["priority"]) == [row[0] for row in expected]
    assert list(rounds["accuracy"]) == pytest.approx([row[1] for row in expected])
    assert list(rounds["tests"]) == [row[2] for row in expected]
    assert sum(row[2] for row in expected) > 0, "this seed must adjust at least once, or the test shows nothing"
    # Seven rounds of float32 training, whose sums may run in another order.
    torch.testing.assert_close(models(tmp_path / "run")["online(MD>DS>LD)"], model, rtol=1e-4, atol=1e-5)


def test_adafed_is_algorithm_1(tmp_path: Path) -> None:
    server = {"server": "fraction", "server_fraction": 0.15, "server_report": "apart"}
    weighing = {"criteria": ["VP"], "when_zero": "keep", "loss": {"adapt": "class-f1"}, "name": "adafed"}
    described = small(**{**CHANGES, "partition": CHANGES["partition"] | server, "weighing": weighing})
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
            model = weighted(locals_, performance)
        said = bench.said(model, weighs)
        f1: list[float] = []
        for label in range(10):
            hit = sum(a == b == label for a, b in zip(said, true, strict=True))
            both = said.count(label) + true.count(label)
            f1.append(2 * hit / both if both else 0.0)
        kappa = tuple(1 / (value + 0.1) for value in f1)
    result = described.run(tmp_path / "run")
    rounds = result.history.rounds.query("round > 0")
    for text, expected in zip(rounds["loss_settings"], losses, strict=True):
        assert json.loads(text)["class_weights"] == (expected and pytest.approx(expected))
    # Seven rounds of float32 training, whose sums may run in another order.
    torch.testing.assert_close(models(tmp_path / "run")["adafed"], model, rtol=1e-4, atol=1e-5)
    # What is reported comes from rows that neither weighed nor were trained on.
    reported = bench.accuracy(model, bench.population.report)
    assert rounds["server_accuracy"].iloc[-1] == pytest.approx(reported)
    assert not set(bench.population.report) & set(weighs)
