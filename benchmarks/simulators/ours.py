"""Steelyard on the same work: every client's whole model and its criteria are there before anything is summed."""

import os

import numpy as np
import torch
from work import Gate, chosen, make_data, pick

from steelyard import __version__
from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages.updates import Task
from steelyard.weighing.criterion import get

bench = chosen()
data = make_data(bench)
names = [f"c{client:05d}" for client in range(bench.clients)]
rows = [np.arange(data.begins[client], data.begins[client + 1]) for client in range(bench.clients)]
nothing = np.zeros(0, dtype=np.int64)
dataset = Dataset("noise", torch.from_numpy(data.features), torch.from_numpy(data.labels), bench.classes)
people = Population(
    dataset, tuple(ClientRows(name, mine, nothing) for name, mine in zip(names, rows, strict=True)), nothing
)
model = ModelSettings(name="cnn-mnist" if bench.convolutional else "mlp", hidden=(bench.hidden,))
clients = Simulation(
    {0: people},
    model,
    TrainingSettings(learning_rate=bench.rate, epochs=bench.epochs, batch_size=bench.batch),
    ComputeSettings(
        device=os.environ.get("STEELYARD_BENCH_DEVICE", "cpu"),
        precision=os.environ.get("STEELYARD_BENCH_PRECISION", "float32"),  # type: ignore[arg-type]
        engine=os.environ.get("STEELYARD_BENCH_ENGINE", "auto"),
    ),
    [get("DS"), get("LD")],
)
shared = SimulationServer(clients).initial(0)


def one_round(round: int) -> None:
    global shared
    cohort = tuple(names[client] for client in pick(bench, round))
    (updates,) = clients.train([Task("bench", 0, round, cohort, shared)])
    assert updates.payload.models.shape == (bench.cohort, len(shared))  # type: ignore[attr-defined]
    weights = updates.criteria["DS"] / updates.criteria["DS"].sum()
    shared = updates.payload.combine(shared, weights)
    if shared.is_cuda:
        torch.cuda.synchronize()


# The first cohort decides the engine; that trial is no part of any round.
one_round(10**6)
about = clients.describe()
Gate(
    peer="ours",
    steelyard=__version__,
    torch=torch.__version__,
    engine=about["engine_choice"],
    why=about["engine_reason"],
).serve(one_round)
