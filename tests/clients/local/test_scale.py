"""10,000 registered clients, 1,000 a round: memory must not grow with the rounds."""

import ctypes
import gc
import sys
from pathlib import Path
from xml.etree import ElementTree

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


def in_use(file: Path) -> float:
    """Megabytes that torch, NumPy and Python asked for and have not given back.

    How much lies in memory says less: what was freed stays there or not, 25 MB more or less from round to round.
    """
    gc.collect()
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_info"):
        pytest.skip("only glibc tells what is in use")
    library.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(library.fopen(str(file).encode(), b"w"))
    assert library.malloc_info(0, stream) == 0
    library.fclose(stream)
    told = ElementTree.parse(file).getroot()
    found = {part.get("type"): int(part.get("size", 0)) for part in (*told.findall("total"), *told.findall("system"))}
    small = sys.getallocatedblocks() * 64  # Python's own objects, each of 512 bytes at most, which lie elsewhere
    return (found["current"] + found["mmap"] - found["fast"] - found["rest"] + small) / 2**20


def run(clients: int, cohort: int, rounds: int, file: Path) -> tuple[list[float], Simulation]:
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
        seen.append(in_use(file))
    assert bool(torch.isfinite(model).all())
    return seen, devices


def test_memory_is_steady_over_rounds(tmp_path: Path) -> None:
    seen, devices = run(clients=2000, cohort=200, rounds=20, file=tmp_path / "told.xml")
    assert max(seen[10:]) - min(seen[10:]) < 0.5  # megabytes; one cohort's models are 4
    assert devices.describe()["updates_peak_gb"] == "0.004"
