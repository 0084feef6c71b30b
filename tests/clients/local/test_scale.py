"""2,000 registered clients, 200 a round: memory must not grow with the rounds."""

import ctypes
import gc
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from tests.clients.local import engine_cases as cases

from steelyard.clients.local import SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages import Task
from steelyard.randomness import choose


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


def test_memory_is_steady_over_rounds(tmp_path: Path) -> None:
    draw, count = np.random.default_rng(0), 2000
    features = torch.from_numpy(draw.normal(size=(count * 20, 64)).astype(np.float32))
    data = Dataset("many", features, torch.from_numpy(draw.integers(0, 10, count * 20)), 10)
    rows = np.arange(count * 20).reshape(count, 20)
    people = Population(data, tuple(ClientRows(f"c{i:05d}", rows[i], rows[0, :0]) for i in range(count)), rows[0, :0])
    model, training = ModelSettings(name="mlp", hidden=(64,)), TrainingSettings(learning_rate=0.05, batch_size=20)
    devices = cases.simulated(cases.Case(model, people, training), "stacked")
    start, seen = SimulationServer(devices).initial(0), list[float]()
    for round in range(1, 21):
        names = tuple(choose(0, round, devices.names(0), 200))
        (updates,) = devices.train([Task("f", 0, round, names, start)])
        start = updates.payload.combine(start, updates.samples / updates.samples.sum())
        del updates
        seen.append(in_use(tmp_path / "told.xml"))
    assert bool(torch.isfinite(start).all())
    assert max(seen[10:]) - min(seen[10:]) < 0.5  # megabytes; one cohort's models are 4
    assert devices.describe()["updates_peak_gb"] == "0.004"
