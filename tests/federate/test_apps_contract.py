"""Clients behind the two real Flower apps do what every implementation of `Clients` must."""

from __future__ import annotations

import pytest
import torch
from tests.clients.contract import ClientsContract, Make
from tests.federate.small_experiment import SMALL
from tests.federate.test_federate_apps import grid_of

from steelyard.clients.protocol import Clients
from steelyard.federate.run_config import experiment_of
from steelyard.federate.server_app import clients_behind


class TestFlowerApps(ClientsContract):
    seed = int(SMALL["seed"])

    @pytest.fixture
    def make(self) -> Make:
        def build() -> Clients:
            grid, config = grid_of(SMALL, nodes=2)
            return clients_behind(grid, experiment_of(config), "1")  # type: ignore[arg-type]

        return build

    @pytest.fixture
    def start(self) -> torch.Tensor:
        return 0.01 * torch.sin(torch.arange(650, dtype=torch.float32))
