"""10,000 registered clients, 1,000 a round: memory must not grow with the rounds."""

import ctypes
import gc

import numpy as np
import pytest
import torch

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages import Task
from steelyard.randomness import choose
from steelyard.weighing.criteria import get


def resident() -> float:
    """Megabytes of this process that lie in memory, without what was freed and the C library keeps for later."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's: up to 20 MB come and go without it
    if trim is not None:
        trim(0)
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def run(clients: int, cohort: int, rounds: int) -> tuple[list[float], Simulation]:
    draw = np.random.default_rng(0)
    features = torch.from_numpy(draw.normal(size=(clients * 20, 64)).astype(np.float32))
    labels = torch.from_numpy(draw.integers(0, 10, clients * 20))
    rows = [ClientRows(f"c{i:05d}", np.arange(20 * i, 20 * i + 20), np.zeros(0, np.int64)) for i in range(clients)]
    people = Population(Dataset("many", features, labels, 10), tuple(rows), np.zeros(0, np.int64))
    devices = Simulation(
        {0: people},
        ModelSettings(name="mlp", hidden=(64,)),
        TrainingSettings(learning_rate=0.05, batch_size=20),
        ComputeSettings(device="cpu", engine="stacked"),
        [get("DS"), get("LD")],
    )
    model = SimulationServer(devices).initial(0)
    seen: list[float] = []
    for round in range(1, rounds + 1):
        names = tuple(choose(0, round, devices.names(0), cohort))
        (updates,) = devices.train([Task("f", 0, round, names, model)])
        model = updates.payload.combine(model, updates.criteria["DS"] / updates.criteria["DS"].sum())
        del updates
        seen.append(resident())
    assert bool(torch.isfinite(model).all())
    return seen, devices


def test_memory_is_steady_over_rounds() -> None:
    seen, devices = run(clients=2000, cohort=200, rounds=20)
    assert max(seen[10:]) - min(seen[10:]) < 8  # megabytes; one cohort's models are 4
    assert devices.describe()["updates_peak_gb"] == "0.004"


@pytest.mark.slow
def test_ten_thousand_clients_a_thousand_a_round() -> None:
    seen, devices = run(clients=10_000, cohort=1000, rounds=100)
    assert max(seen[10:]) - min(seen[10:]) < 15  # megabytes; one cohort's models are 19
    assert float(devices.describe()["updates_peak_gb"]) < 0.03
