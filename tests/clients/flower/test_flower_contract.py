"""Clients behind a grid do what every implementation of `Clients` must."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.clients.contract import ClientsContract, Make
from tests.clients.flower.flower_fakes import FakeGrid, honest

from steelyard.clients.flower.grid import FlowerClients
from steelyard.clients.flower.settings import FederateSettings
from steelyard.messages import Evaluations, Question, Task, Updates
from steelyard.update_payloads import DenseModels


def numbers(clients: tuple[str, ...]) -> torch.Tensor:
    return torch.tensor([float(client.removeprefix("c")) for client in clients])


def train(task: Task) -> Updates:
    """Each client moves every parameter a tenth of the way to the number in its name."""
    goals = numbers(task.clients)[:, None]
    models = task.parameters + 0.1 * (goals - task.parameters)
    losses = (models - goals).square().mean(1)
    return Updates(
        federation=task.federation,
        round=task.round,
        clients=task.clients,
        samples=(10 * goals[:, 0]).long().numpy(),
        criteria={"DS": (10 * goals[:, 0]).double().numpy()},
        losses=losses.double().numpy(),
        payload=DenseModels(models),
    )


def evaluate(question: Question, clients: tuple[str, ...]) -> Evaluations:
    """The nearer a model is to a client's number, the better."""
    errors = (question.models[:, None] - numbers(clients)[:, None]).square().mean(2).double().numpy()
    right = np.tile([True, False], len(clients))
    return Evaluations(
        federation=question.federation,
        round=question.round,
        clients=clients,
        samples=np.full(len(clients), 2, dtype=np.int64),
        scores=1 / (1 + errors),
        losses=errors,
        right=right if question.detailed else None,
    )


class TestFlowerClients(ClientsContract):
    @pytest.fixture
    def make(self) -> Make:
        def build() -> FlowerClients:
            nodes = {
                30: honest("c4", "c1", train=train, evaluate=evaluate),
                20: honest("c3", train=train, evaluate=evaluate),
                10: honest("c2", train=train, evaluate=evaluate),
            }
            grid = FakeGrid(nodes)
            made = FlowerClients(grid, {"DS": lambda value: None}, FederateSettings(nodes=3, timeout=60.0), (0.0, 1.0))  # type: ignore[arg-type]
            made.wait()
            return made

        return build

    @pytest.fixture
    def start(self) -> torch.Tensor:
        return torch.tensor([0.5, -1.0, 2.0])
