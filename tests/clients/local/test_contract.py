"""The simulation keeps the contract of all clients, with every engine that runs on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.clients.contract import ClientsContract, Make
from tests.clients.local import engine_cases as cases

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.clients.local.engines import choice
from steelyard.clients.protocol import Clients
from steelyard.data.dataset import Behaviour, ClientRows, Population
from steelyard.weighing.criterion import get

TRAINING = cases.TRAINING["mini"]


def people(name: str) -> Population:
    """One client that trains on from its own model, so that there is state, and one without any rows."""
    _, shape, classes = cases.MODELS[name]
    whole = cases.population(shape, classes)
    nothing = np.zeros(0, dtype=np.int64)
    return replace(
        whole,
        clients=(*whole.clients, ClientRows("c9", nothing, nothing)),
        behaviours={"c2": Behaviour(own_model=True)},
    )


def simulation(engine: str, name: str) -> Simulation:
    compute = ComputeSettings(engine=engine, device="cpu", threads=2)
    return Simulation({0: people(name)}, cases.MODELS[name][0], TRAINING, compute, [get("DS"), get("LD")])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One choice of an engine for all tests: how it is made is tested with the engines."""
    return tmp_path_factory.mktemp("cache")


class SimulationContract(ClientsContract):
    model = "cnn-odd"

    @pytest.fixture
    def make(self, engine: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
        monkeypatch.setenv("STEELYARD_CACHE", str(cache))
        monkeypatch.setattr(choice, "REPEATS", 1)  # which one wins a trial is nothing to these tests

        def fresh() -> Clients:
            return simulation(engine, self.model)

        return fresh

    @pytest.fixture
    def start(self) -> torch.Tensor:
        return SimulationServer(simulation("loop", self.model)).initial(0)


@pytest.mark.parametrize("engine", ["loop", "threads", "fused"])
class TestClientByClient(SimulationContract):
    """Engines that train each client by itself give the same bits whoever trains beside it."""


@pytest.mark.parametrize("engine", ["stacked:3"])
class TestStacks(SimulationContract):
    """In a stack, the library may sum in another order when the stack has another size: float32's rounding."""

    rounding = 1e-5


@pytest.mark.parametrize("engine", ["stacked/vmap:3"])
class TestStacksOfAnOwnModule(SimulationContract):
    """What vmap is for; a convolution under it takes ten times as long, and keeps no other contract."""

    model = "own"
    rounding = 1e-5
