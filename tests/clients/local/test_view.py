"""What simulated clients tell the server beside their update: steps always, the rest where a criterion needs it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages import LossState, Task
from steelyard.weighing.criteria import Criterion
from steelyard.weighing.needs import Needs

LABELS = torch.tensor([0, 0, 1, 2, 1, 1, 2, 0])
FEATURES = torch.linspace(-1, 1, 16).view(8, 2)
NOTHING = np.zeros(0, dtype=np.int64)
# c1 trains on labels of its own, c2 has no samples and is never in an answer.
PEOPLE = Population(
    Dataset("toy", FEATURES, LABELS, 3),
    (
        ClientRows("c0", np.array([0, 1, 2, 3, 4]), NOTHING),
        ClientRows("c1", np.array([5, 6]), NOTHING, torch.tensor([2, 2])),
        ClientRows("c2", NOTHING, NOTHING),
        ClientRows("c3", np.array([7]), NOTHING),
    ),
    NOTHING,
)
NAMES = ("c0", "c1", "c2", "c3")


def simulation(batch_size: int | str = 2, **needs: bool) -> Simulation:
    criterion = Criterion("X", "server", "data", "", lambda view: np.ones(3), needs=Needs(**needs))
    training = TrainingSettings(learning_rate=0.5, batch_size=batch_size, epochs=3)  # type: ignore[arg-type]
    compute = ComputeSettings(engine="loop", device="cpu")
    return Simulation({0: PEOPLE}, ModelSettings(name="logistic"), training, compute, [criterion])


def task(clients: Simulation, loss: LossState) -> Task:
    return Task("f", 0, 1, NAMES, SimulationServer(clients).initial(0), loss)


@pytest.mark.parametrize(("batch_size", "steps"), [(2, [9, 3, 3]), ("full", [3, 3, 3])])
def test_steps_are_counted(batch_size: int | str, steps: list[int]) -> None:
    clients = simulation(batch_size)
    (answer,) = clients.train([task(clients, LossState())])
    assert answer.clients == ("c0", "c1", "c3")
    assert answer.steps is not None
    assert answer.steps.tolist() == steps


def test_nothing_more_is_told_unless_a_criterion_needs_it() -> None:
    clients = simulation()
    (answer,) = clients.train([task(clients, LossState())])
    assert (answer.first_losses, answer.label_counts) == (None, None)


def test_label_counts_are_those_that_clients_train_on() -> None:
    clients = simulation(label_counts=True)
    for _ in range(2):
        (answer,) = clients.train([task(clients, LossState())])
        assert answer.label_counts is not None
        assert answer.label_counts.tolist() == [[2, 2, 1], [0, 0, 2], [1, 0, 0]]
    assert answer.first_losses is None


@pytest.mark.parametrize("weights", [None, (1.0, 4.0, 0.5)])
def test_first_losses_are_those_of_the_received_model(weights: tuple[float, ...] | None) -> None:
    clients = simulation(first_losses=True)
    work = task(clients, LossState("auto", weights))
    (answer,) = clients.train([work])
    linear = nn.Linear(2, 3)
    with torch.no_grad():
        linear.weight.copy_(work.parameters[:6].view(3, 2))
        linear.bias.copy_(work.parameters[6:])
    kappa = torch.tensor(weights or (1.0, 1.0, 1.0))
    expected = []
    for rows, labels in (([0, 1, 2, 3, 4], LABELS[:5]), ([5, 6], torch.tensor([2, 2])), ([7], LABELS[7:])):
        each = nn.functional.cross_entropy(linear(FEATURES[rows]), labels, reduction="none") * kappa[labels]
        expected.append(each.mean().item())
    assert answer.first_losses is not None
    assert answer.first_losses == pytest.approx(expected, rel=1e-5)  # float32 sums in another order
    assert answer.label_counts is None
    # Training went on from there: one step of a client with one batch starts at that very loss.
    assert answer.losses[1] < answer.first_losses[1]
