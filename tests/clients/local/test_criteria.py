"""What simulated clients measure on themselves and tell beside their update: true, per seed, and theirs alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages.updates import LossState, Task, Updates
from steelyard.weighing.criterion import Criterion, LocalData, Needs, get

LABELS = torch.tensor([0, 0, 1, 2, 1, 1, 2, 0])
FEATURES = torch.linspace(-1, 1, 16).view(8, 2)
NOTHING = np.zeros(0, dtype=np.int64)


def two_seeds() -> dict[int, Population]:
    """The same rows shared out twice. With seed 0, c1 has labels of its own; c2 has no samples and never answers."""
    dataset = Dataset("toy", FEATURES.clone(), LABELS.clone(), 3)

    def shared_out(*rows: list[int], own: list[int] | None = None) -> Population:
        labels = {1: torch.tensor(own)} if own else {}
        clients = (
            ClientRows(f"c{number}", np.array(mine, dtype=np.int64), NOTHING, labels.get(number))
            for number, mine in enumerate(rows)
        )
        return Population(dataset, tuple(clients), NOTHING)

    return {
        0: shared_out([0, 1, 2, 3, 4], [5, 6], [], [7], own=[2, 2]),
        1: shared_out([4, 5], [0, 2, 6], [1], [7]),
    }


def simulation(*criteria: Criterion, batch_size: Any = 2) -> Simulation:
    training = TrainingSettings(learning_rate=0.5, batch_size=batch_size, epochs=3)
    compute = ComputeSettings(engine="loop", device="cpu")
    return Simulation(two_seeds(), ModelSettings(name="logistic"), training, compute, criteria)


def train(clients: Simulation, *seeds: int, round: int = 1, loss: LossState | None = None) -> list[Updates]:
    start, names = SimulationServer(clients).initial(0), ("c0", "c1", "c2", "c3")
    return clients.train([Task(f"f{seed}", seed, round, names, start, loss or LossState()) for seed in seeds])


@pytest.mark.parametrize("weights", [None, (1.0, 4.0, 0.5)])
def test_label_counts_and_first_losses_are_those_of_own_labels_and_the_received_model(weights: Any) -> None:
    clients = simulation(
        Criterion(
            name="X",
            measured_by="server",
            about="data",
            measure=np.ones,
            needs=Needs(label_counts=True, first_losses=True),
        )
    )
    start, kappa = SimulationServer(clients).initial(0), torch.tensor(weights or (1.0, 1.0, 1.0))
    (answer,) = train(clients, 0, loss=LossState("auto", weights))
    expected = []
    for rows, labels in (([0, 1, 2, 3, 4], LABELS[:5]), ([5, 6], torch.tensor([2, 2])), ([7], LABELS[7:])):
        outputs = FEATURES[rows] @ start[:6].view(3, 2).T + start[6:]
        expected.append((nn.functional.cross_entropy(outputs, labels, reduction="none") * kappa[labels]).mean().item())
    assert answer.first_losses == pytest.approx(expected, rel=1e-5)  # float32 sums in another order
    assert answer.label_counts is not None
    assert answer.label_counts.tolist() == [[2, 2, 1], [0, 0, 2], [1, 0, 0]]


def test_criteria_about_data_are_taken_once_for_each_seed_and_those_about_models_each_time() -> None:
    calls: list[str] = []

    def first_feature(local: LocalData) -> float:
        calls.append(local.client)
        assert local.features is not None
        return float(local.features()[0, 0]) + 2

    def of_model(local: LocalData) -> float:
        assert local.model is not None
        calls.append("model")
        return float(local.model.abs().sum())

    clients = simulation(
        get("DS"), get("LD"), get("MD"),
        Criterion(name="F", measured_by="client", measure=first_feature),
        Criterion(name="M", measured_by="client", about="model", measure=of_model),
    )  # fmt: skip
    rows = {0: [0, 5, 7], 1: [4, 0, 1, 7]}
    expected = {
        seed: {"DS": sizes, "LD": kinds, "F": pytest.approx([float(FEATURES[row, 0]) + 2 for row in rows[seed]])}
        for seed, sizes, kinds in ((0, [5, 2, 1], [3, 1, 1]), (1, [2, 3, 1, 1], [1, 3, 1, 1]))
    }
    for round, seeds in enumerate([(0,), (1,), (1, 0), (0, 1)]):
        for seed, updates in zip(seeds, train(clients, *seeds, round=round), strict=True):
            found = {name: values.tolist() for name, values in updates.criteria.items()}
            models = updates.payload.models  # type: ignore[attr-defined]
            assert found.pop("M") == pytest.approx(models.abs().sum(dim=1).tolist())
            assert found == expected[seed], (round, seed)
    assert calls.count("c0") == 2
    assert calls.count("model") == 3 * (3 + 4)


def writes(local: LocalData) -> float:
    local.labels.fill_(2)
    local.labels.numpy()[:] = 2
    assert local.features is not None
    local.features().zero_()
    if local.model is not None:
        local.model.zero_()
    return 1.0


@pytest.mark.parametrize("about", ["data", "model", "device"])
def test_a_criterion_that_writes_changes_nothing_for_anybody(about: Any) -> None:
    clients, honest = (
        simulation(Criterion(name="RUDE", measured_by="client", about=about, measure=writes), get("LD")),
        simulation(),
    )
    for round in (1, 2):
        (found,), (expected,) = train(clients, 0, round=round), train(honest, 0, round=round)
        assert found.criteria["LD"].tolist() == [3, 1, 1]
        assert torch.equal(found.payload.models, expected.payload.models)  # type: ignore[attr-defined]
    source = clients.context.population(0).source.dataset
    assert torch.equal(source.labels, LABELS)
    assert torch.equal(source.features, FEATURES)


@pytest.mark.parametrize(
    ("value", "reason"), [(float("nan"), "BAD = nan"), (-1.0, "BAD = -1.0"), (None, "BAD failed: TypeError")]
)
@pytest.mark.parametrize("at_once", [False, True])
def test_one_client_s_impossible_measure_leaves_that_client_out(value: Any, reason: str, at_once: bool) -> None:
    bad = Criterion(
        name="BAD", measured_by="client",
        measure=lambda local: value if local.client == "c1" else 1.0,
        of_labels=(lambda many: np.array([1.0, value, 1.0, 1.0], dtype=np.float64)) if at_once else None,
    )  # fmt: skip
    (updates,) = train(simulation(bad), 0)
    assert updates.clients == ("c0", "c3")
    assert updates.criteria["BAD"].tolist() == [1.0, 1.0]
    assert updates.payload.models.shape[0] == 2  # type: ignore[attr-defined]
    assert any(failure.client == "c1" and reason in failure.reason for failure in updates.failures)
