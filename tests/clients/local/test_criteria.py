"""Criteria that clients measure on themselves: kept per population, so that seeds do not share them."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from tests.clients.local import engine_cases as cases

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.models import ModelSettings
from steelyard.messages import Floats, Task, Updates
from steelyard.weighing.criteria import Criterion, Labelled, LocalData, get


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


def measured(*criteria: Criterion) -> tuple[Simulation, Updates]:
    compute = ComputeSettings(engine="loop", device="cpu")
    clients = Simulation(two_seeds(), ModelSettings(name="logistic"), cases.TRAINING["mini"], compute, criteria)
    (updates,) = train(clients, (0,))
    return clients, updates


def writes(local: LocalData) -> float:
    local.labels.fill_(2)
    local.labels.numpy()[:] = 2
    assert local.features is not None
    local.features().zero_()
    if local.model is not None:
        local.model.zero_()
    return 1.0


@pytest.mark.parametrize("about", ["data", "model", "device"])
def test_a_criterion_that_writes_changes_nothing_for_anybody(about: str) -> None:
    rude = Criterion("RUDE", "client", about, "", writes)  # type: ignore[arg-type]
    distinct = Criterion("D", "client", "device", "", lambda local: len(set(local.labels.tolist())))
    clients, found = measured(rude, distinct, get("LD"))
    _, expected = measured(distinct)
    assert found.criteria["D"].tolist() == expected.criteria["D"].tolist() == [3, 1]
    assert found.criteria["LD"].tolist() == [3, 1]
    assert torch.equal(found.payload.models, expected.payload.models)  # type: ignore[attr-defined]
    source = clients.context.population(0).source.dataset
    assert source.labels.tolist() == [0, 0, 1, 2, 1, 1, 2]
    assert torch.equal(source.features, torch.arange(14.0).view(7, 2))
    (again,) = train(clients, (0,), round=2)
    (other,) = train(measured(distinct)[0], (0,), round=2)
    assert torch.equal(again.payload.models, other.payload.models)  # type: ignore[attr-defined]


def test_measures_of_all_clients_at_once_cannot_write_either() -> None:
    def all_at_once(many: Labelled) -> Floats:
        many.labels[:] = 2
        return np.ones(2)

    rude = Criterion("RUDE", "client", "data", "", lambda local: 5.0, of_labels=all_at_once)
    clients, found = measured(rude)
    assert found.criteria["RUDE"].tolist() == [5, 5]  # measured one by one instead
    assert clients.context.population(0).own_labels.tolist() == [0, 0, 1, 2, 1]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "criterion BAD = nan; allowed: 0 to any finite number"),
        (-1.0, "criterion BAD = -1.0; allowed: 0 to any finite number"),
        (None, "criterion BAD failed: TypeError"),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_one_client_s_impossible_measure_leaves_that_client_out(value: float, reason: str, at_once: bool) -> None:
    bad = Criterion(
        "BAD", "client", "data", "",
        lambda local: value if local.client == "c1" else 1.0,
        of_labels=(lambda many: np.array([1.0, value], dtype=np.float64)) if at_once else None,
    )  # fmt: skip
    _, updates = measured(bad)
    assert updates.clients == ("c0",)
    assert updates.criteria["BAD"].tolist() == [1.0]
    ((client, why),) = [(failure.client, failure.reason) for failure in updates.failures]
    assert client == "c1"
    assert why.startswith(reason)
