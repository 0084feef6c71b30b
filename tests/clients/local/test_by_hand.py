"""Algorithms that take their clients' steps themselves: on every engine as in the loop, and what they are given."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from steelyard.algorithms.algorithm import Algorithm, LocalSteps, Vectors
from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import Behaviour, ClientRows, Dataset, Population
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.messages import Question, Task
from steelyard.update_payloads import DenseModels

SIZES = {"a": 3, "b": 11, "c": 7}
MLP = ModelSettings(name="mlp", hidden=(5,))
CNN = ModelSettings(name="cnn", channels=(2, 3), hidden=(4,))


def population(shape: tuple[int, ...] = (4,), **more: Any) -> Population:
    draw, count = np.random.default_rng(7), sum(SIZES.values())
    x = torch.from_numpy(draw.normal(size=(count, *shape)).astype(np.float32))
    ends = np.cumsum(list(SIZES.values()))
    clients = tuple(
        ClientRows(name, np.arange(end - size, end), np.arange(end - size, end)[:3])
        for (name, size), end in zip(SIZES.items(), ends, strict=True)
    )
    return Population(
        Dataset("toy", x, torch.from_numpy(draw.integers(0, 3, count)), 3), clients, np.arange(count), **more
    )


def simulated(engine: str = "loop", model: Any = MLP, shape: tuple[int, ...] = (4,), **training: Any) -> Simulation:
    given: dict[str, Any] = {
        "learning_rate": 0.2,
        "epochs": 2,
        "batch_size": 4,
        "momentum": 0.5,
        "weight_decay": 0.01,
        **training,
    }
    return Simulation({3: population(shape)}, model, TrainingSettings(**given), ComputeSettings(engine=engine))


def rounds(clients: Simulation, algorithm: Algorithm) -> list[Any]:
    """Return what two rounds send, report and test; b is not in the second."""
    model, found = SimulationServer(clients).initial(3), list[Any]()
    for round, cohort in enumerate((("a", "b", "c"), ("a", "c")), start=1):
        (updates,) = clients.train([Task("f", 3, round, cohort, model, algorithm=algorithm)])
        assert isinstance(updates.payload, DenseModels)
        (tested,) = clients.evaluate([Question("f", 3, round, model[None], algorithm=algorithm)])
        found += [updates.payload.models.numpy(), updates.losses, tested.losses]
        model = updates.payload.models.mean(dim=0)
    return found


NETWORKS: dict[str, tuple[ModelSettings, tuple[int, ...]]] = {"mlp": (MLP, (4,)), "cnn": (CNN, (1, 8, 8))}


@functools.cache
def by_the_loop(name: str, network: str) -> list[Any]:
    model, shape = NETWORKS[network]
    return rounds(simulated(model=model, shape=shape), AlgorithmSettings(name=name).made())


@pytest.mark.parametrize(
    ("engine", "network"),
    [
        ("threads", "mlp"),
        ("vmap", "mlp"),
        ("stacked", "mlp"),
        ("stacked:2", "mlp"),
        ("fused", "cnn"),
        ("stacked", "cnn"),
    ],
)
@pytest.mark.parametrize("name", ["apfl", "fedrep", "fedala"])
def test_every_engine_gives_what_the_loop_gives(name: str, engine: str, network: str) -> None:
    algorithm = AlgorithmSettings(name=name).made()
    clients = simulated(engine, *NETWORKS[network])
    for ours, theirs in zip(rounds(clients, algorithm), by_the_loop(name, network), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
    assert clients.describe()["engine_choice"].startswith(engine.partition(":")[0])  # And it did not fall back.


class Plain(Algorithm):
    """FedAvg's training, step by step."""

    by_hand = True

    def train(self, local: LocalSteps) -> tuple[torch.Tensor, Vectors]:
        models, move = local.start, local.optimiser()
        for batch in local.batches():
            models = move(models, batch.gradient(models))
        return models, {}


def normalised(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    module[0].bias.requires_grad_(False)
    return module


@pytest.mark.parametrize("training", [{}, {"optimiser": "adam"}, {"epochs": 1, "updates": 5}, {"batch_size": "full"}])
@pytest.mark.parametrize("model", [MLP, normalised])
def test_steps_by_hand_are_the_ordinary_training(model: Any, training: dict[str, Any]) -> None:
    """Momentum, decay, Adam, steps in place of epochs, batch norm with its last row joined, frozen parameters."""
    given: dict[str, Any] = {"momentum": 0.0, **training} if training.get("optimiser") else training
    ours, theirs = (rounds(simulated(model=model, **given), algorithm) for algorithm in (Plain(), Algorithm()))
    for mine, ordinary in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(ordinary, abs=5e-6 if "optimiser" not in training else 5e-4)


def test_a_free_rider_sends_back_what_it_received_and_keeps_nothing() -> None:
    lazy = population(behaviours={"b": Behaviour(free_rider=True)})
    clients = Simulation({3: lazy}, MLP, TrainingSettings(), ComputeSettings(engine="loop"))
    start = SimulationServer(clients).initial(3)
    algorithm = AlgorithmSettings(name="apfl").made()
    (updates,) = clients.train([Task("f", 3, 1, tuple(SIZES), start, algorithm=algorithm)])
    assert isinstance(updates.payload, DenseModels)
    same = (updates.payload.models == start).all(dim=1)
    assert same.tolist() == [False, True, False]
    assert {key.split('"')[5] for key in clients.snapshot()} == {"a", "c"}


class Halves(Algorithm):
    """Goes through half of each client's rows and keeps how often it saw a batch."""

    by_hand = True
    keeps = ("seen",)

    def train(self, local: LocalSteps) -> tuple[torch.Tensor, Vectors]:
        seen = local.kept["seen"]
        for batch in local.batches(epochs=3, share=0.5):
            seen = seen + batch.taken[:, None]
        return local.start, {"seen": seen[:, :1]}


def test_a_share_of_the_rows_has_its_own_batches() -> None:
    clients = simulated(batch_size=2)
    rounds(clients, Halves())
    found = {key.split('"')[5]: int(held[0]) for key, held in clients.snapshot().items()}
    # Halves of 3, 11 and 7 rows are 1, 5 and 3: 1, 3 and 2 batches in each of three passes; b took part once.
    assert found == {"a": 2 * 3, "b": 9, "c": 2 * 6}
