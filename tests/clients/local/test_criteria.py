"""Criteria that clients measure on themselves: kept per population, so that seeds do not share them."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import torch
from tests.clients.local import engine_cases as cases

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.models import ModelSettings
from steelyard.messages import Task, Updates
from steelyard.weighing.criteria import Criterion, get


def two_seeds() -> dict[int, Population]:
    """The same data set shared out twice: c0 holds rows 0–3 (labels 0, 0, 1, 2) and then rows 4–5 (labels 1, 1)."""
    labels = torch.tensor([0, 0, 1, 2, 1, 1, 2])
    dataset = Dataset("toy", torch.arange(14.0).view(7, 2), labels, 3)
    nothing = np.zeros(0, dtype=np.int64)

    def shared_out(first: list[int], second: list[int]) -> Population:
        return Population(
            dataset,
            (ClientRows("c0", np.array(first), nothing), ClientRows("c1", np.array(second), nothing)),
            nothing,
        )

    return {0: shared_out([0, 1, 2, 3], [4]), 1: shared_out([4, 5], [0, 2, 6])}


def train(clients: Simulation, seeds: tuple[int, ...], round: int = 1) -> list[Updates]:
    start = SimulationServer(clients).initial(0)
    return clients.train([Task(f"f{seed}", seed, round, ("c0", "c1"), start) for seed in seeds])


def simulation() -> Simulation:
    first_feature = Criterion("F", "client", "data", "", lambda local: float(local.features()[0, 0]))  # type: ignore[misc]
    compute = ComputeSettings(engine="loop", device="cpu")
    criteria = [get("DS"), get("LD"), first_feature]
    return Simulation(two_seeds(), ModelSettings(name="logistic"), cases.TRAINING["mini"], compute, criteria)


def test_seeds_do_not_share_what_was_measured() -> None:
    clients = simulation()
    expected = {
        0: {"DS": [4, 1], "LD": [3, 1], "F": [0, 8]},
        1: {"DS": [2, 3], "LD": [1, 3], "F": [8, 0]},
    }
    for round, seeds in enumerate([(0,), (1,), (1, 0), (0, 1)]):
        for seed, updates in zip(seeds, train(clients, seeds, round), strict=True):
            assert {name: values.tolist() for name, values in updates.criteria.items()} == expected[seed], (round, seed)


def test_after_closing_they_are_measured_afresh() -> None:
    clients = simulation()
    (before,) = train(clients, (0,))
    population = weakref.ref(clients.context.population(0))
    clients.close()
    gc.collect()
    assert population() is None  # nothing holds on to the data
    (other,) = train(clients, (1,))
    (again,) = train(clients, (0,))
    assert other.criteria["DS"].tolist() == [2, 3]
    assert again.criteria["DS"].tolist() == before.criteria["DS"].tolist() == [4, 1]
