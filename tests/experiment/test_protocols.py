"""The recipes of the papers hold their authors' settings, and cut MNIST's test set as the authors did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steelyard.api import Experiment
from steelyard.data.loading import load
from steelyard.data.partition import share_out
from steelyard.data.settings import DataSettings
from steelyard.errors import UserError
from steelyard.learning.catalogue import count

SLICES = {"partition.test": "held-out", "partition.test_labels": "all", "partition.test_order": "stored"}
MNIST = {
    **SLICES,
    "partition.clients": 100,
    "partition.test_samples": 100,
    "model.name": "cnn-mnist",
    "training.optimiser": "sgd",
    "training.epochs": 5,
    "training.batch_size": "full",
    "rounds.count": 1000,
    "rounds.fraction": 0.1,
    "rounds.targets": (0.7, 0.8, 0.9, 0.95),
    "weighing.criteria": ("DS", "LD", "MD"),
}
FEMNIST = {
    "model.name": "cnn-femnist",
    "training.learning_rate": 0.01,
    "training.epochs": 5,
    "training.batch_size": 10,
    "rounds.count": 1000,
    "rounds.fraction": 0.1,
    "weighing.criteria": ("DS", "LD", "MD"),
    "weighing.adjust.strategy": "online",
}
ADAFED = {
    "partition.test_labels": "all",
    "partition.server": "held-out",
    "partition.server_report": "same",
    "model.name": "cnn-keras",
    "training.optimiser": "adadelta",
    "training.learning_rate": 1.0,
    "training.epochs": 5,
    "training.batch_size": 100,
    "rounds.count": 20,
    "rounds.fraction": 1.0,
}
ADAPTIVE = {**ADAFED, "weighing.criteria": ("VP",), "weighing.loss.adapt": "class-f1", "weighing.loss.epsilon": 0.1}
CELEBA = {
    "partition.minimum": 5,
    "partition.test": "local",
    "partition.test_fraction": 0.2,
    "model.name": "cnn-celeba",
    "training.epochs": 5,
    "training.batch_size": "full",
    "rounds.count": 100,
    "rounds.fraction": 0.1,
    "rounds.targets": (0.7, 0.8, 0.85),
    "weighing.criteria": ("DS", "CB", "IS"),
}
PROTOCOLS: dict[str, dict[str, Any]] = {
    "mnist-iid": {**MNIST, "partition.scheme": "iid", "training.learning_rate": 0.215},
    "mnist-noniid": {
        **MNIST,
        "partition.scheme": "shard",
        "partition.shards_per_client": 2,
        "partition.shard_size": 300,
        "training.learning_rate": 0.1,
    },
    "femnist": {**FEMNIST, "rounds.targets": (0.75, 0.8)},
    "unipen62": {**FEMNIST, "partition.test_fraction": 0.1},
    "celeba": CELEBA,
    "celeba-full": CELEBA,
    "adafed-1": {**ADAFED, "weighing.criteria": ("VS",), "weighing.loss": None},
    "adafed-2": ADAPTIVE,
    "adafed-3": ADAPTIVE,
}


@pytest.mark.parametrize("recipe", PROTOCOLS)
def test_a_recipe_has_the_settings_of_its_paper(recipe: str) -> None:
    experiment = Experiment.load(recipe)
    for field, expected in PROTOCOLS[recipe].items():
        value: Any = experiment
        for name in field.split("."):
            value = getattr(value, name)
        assert (tuple(value) if isinstance(value, list) else value) == expected, field


def test_the_authors_network_is_an_option_of_the_same_size() -> None:
    experiment = Experiment.load("mnist-noniid", ["model.name=cnn-mnist-authors", "rounds.reach=above"])
    assert count(experiment.model.name, (1, 28, 28), 10) == count("cnn-mnist", (1, 28, 28), 10) == 1_663_370
    assert experiment.rounds.above


@pytest.mark.parametrize("recipe", ["mnist-iid", "mnist-noniid"])
def test_every_client_tests_on_its_own_hundred_rows_of_all_classes(recipe: str) -> None:
    try:
        mnist = load(DataSettings(source="mnist"))
    except UserError as error:
        pytest.skip(f"needs mnist/: {error}")
    population = share_out(mnist, Experiment.load(recipe).partition, 1)
    labels = mnist.labels.numpy()
    assert [len(client.train) for client in population.clients] == [600] * 100
    for number, client in enumerate(population.clients):
        assert client.test.tolist() == list(range(60_000 + 100 * number, 60_100 + 100 * number))
        # A class is a tenth of MNIST: 100 rows lack one of them in one slice of forty thousand.
        assert len(np.unique(labels[client.test])) == 10
