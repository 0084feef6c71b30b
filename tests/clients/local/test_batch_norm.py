"""Batch norm needs two samples in a batch: a last batch of one row joins the one before, in every engine alike."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.clients.local import engine_cases as cases
from torch import nn

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.errors import UserError
from steelyard.learning.models import ModelSettings
from steelyard.learning.parameters import Layout
from steelyard.learning.training import TrainingSettings, train_client
from steelyard.messages import LossState, Task


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "cache"))


NORMED = ModelSettings(name=cases.Normed)  # type: ignore[arg-type]


class Pictures(nn.Module):
    """Batch norm over the pixels of an image too: one image is enough for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense = nn.BatchNorm2d(1), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.norm(x.reshape(-1, 1, 8, 8)).flatten(1))


def test_a_last_row_alone_joins_the_batch_before() -> None:
    """Seven rows in batches of 3: steps on 3 and 4 rows, the same as batches cut by hand."""
    torch.manual_seed(0)
    features, labels = torch.randn(7, 64), torch.arange(7) % 10
    training = TrainingSettings(batch_size=3, learning_rate=0.1)
    module = cases.Normed(10)
    layout = Layout.of(module)
    start = layout.read(module)
    order = np.array([[4, 2, 0, 6, 1, 3, 5]])
    found, _ = train_client(module, layout, start, features, labels, order, training, LossState("cross-entropy"))
    layout.write(module, start)
    module.train()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    for rows in ([4, 2, 0], [6, 1, 3, 5]):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(features[rows]), labels[rows]).backward()
        optimiser.step()
    assert torch.allclose(found, layout.read(module), atol=1e-6)


@pytest.mark.parametrize("engine", ["loop", "threads", "vmap", "stacked", "auto"])
def test_every_engine_trains_clients_whose_last_batch_has_one_row(engine: str) -> None:
    people = cases.population((8, 8), 10, sizes=(13, 9, 25, 12))
    training = TrainingSettings(batch_size=4, epochs=2)
    expected, _, _ = cases.trained("loop", people, NORMED, training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _, _ = cases.trained(engine, people, NORMED, training)
    assert expected[0].steps is not None
    assert expected[0].steps.tolist() == [6, 4, 12, 6]
    for one, two in zip(found, expected, strict=True):
        # Float32 sums in another order.
        assert torch.allclose(one.payload.models, two.payload.models, atol=1e-5)


def train(model: ModelSettings, training: TrainingSettings, sizes: tuple[int, ...]):  # type: ignore[no-untyped-def]
    people = cases.population((8, 8), 10, sizes=sizes)
    clients = Simulation({0: people}, model, training, ComputeSettings(engine="loop", device="cpu"))
    start = SimulationServer(clients).initial(0)
    return clients.train([Task("f", 0, 1, tuple(clients.names(0)), start)])[0]


def test_a_client_with_one_row_is_left_out_with_its_reason() -> None:
    updates = train(NORMED, TrainingSettings(batch_size=4), (5, 1, 8))
    assert updates.clients == ("c0", "c2")
    assert [(f.client, f.reason) for f in updates.failures] == [
        ("c1", "1 training sample, and batch norm needs 2 in a batch")
    ]


def test_batches_of_one_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"training\.batch_size: got 1 for a model with batch norm"):
        train(NORMED, TrainingSettings(batch_size=1), (5, 3))


def test_batch_norm_over_pixels_takes_single_images() -> None:
    updates = train(ModelSettings(name=Pictures), TrainingSettings(batch_size=1), (5, 1))  # type: ignore[arg-type]
    assert updates.clients == ("c0", "c1")
