"""The local optimisers against torch's own, and what they refuse."""

import numpy as np
import pytest
import torch
from torch import nn

from steelyard.errors import UserError
from steelyard.learning.descent import Descent
from steelyard.learning.parameters import Layout
from steelyard.learning.training import TrainingSettings, train_client
from steelyard.messages import LossState


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        ({"optimiser": "adam", "learning_rate": 0.02}, lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-7)),
        (
            {"optimiser": "adam", "learning_rate": 0.02, "weight_decay": 0.1},
            lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-7, weight_decay=0.1),
        ),
        (
            {"optimiser": "adadelta", "learning_rate": 1.0},
            lambda p: torch.optim.Adadelta(p, lr=1.0, rho=0.95, eps=1e-7),
        ),
        (
            {"optimiser": "sgd", "learning_rate": 0.1, "momentum": 0.6},
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.6),
        ),
    ],
)
def test_steps_are_those_of_torch(settings: dict[str, object], own: object) -> None:
    torch.manual_seed(4)
    module, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    layout = Layout.of(module)
    start = layout.read(module)
    layout.write(twin, start)
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    training = TrainingSettings(batch_size="full", epochs=7, **settings)
    order = np.broadcast_to(np.arange(8), (7, 8))
    found, _ = train_client(module, layout, start, x, y, order, training, LossState("cross-entropy"))
    optimiser = own(twin.parameters())  # type: ignore[operator]
    for _ in range(7):
        optimiser.zero_grad()
        nn.functional.cross_entropy(twin(x), y).backward()
        optimiser.step()
    # Float32, seven steps.
    assert torch.allclose(found, layout.read(twin), atol=1e-6)


def test_what_is_remembered_begins_afresh_in_every_round() -> None:
    module = nn.Linear(2, 2)
    layout = Layout.of(module)
    start = layout.read(module)
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    training = TrainingSettings(optimiser="adadelta", learning_rate=1.0, batch_size="full", epochs=3)
    order = np.broadcast_to(np.arange(4), (3, 4))
    first, _ = train_client(module, layout, start, x, y, order, training, LossState("cross-entropy"))
    train_client(module, layout, first, x, y, order, training, LossState("cross-entropy"))
    again, _ = train_client(module, layout, start, x, y, order, training, LossState("cross-entropy"))
    assert torch.equal(first, again)


@pytest.mark.parametrize("optimiser", ["adam", "adadelta"])
def test_a_row_with_rate_0_stays_and_the_step_may_lie_on_the_device(optimiser: str) -> None:
    descent = Descent(0.1, 0.0, 0.0, optimiser)
    assert not descent.plain
    models, same = torch.ones(2, 5), torch.ones(2, 5)
    memory, other = descent.remember(models), descent.remember(models)
    for step in range(3):
        slopes = torch.full((2, 5), 0.3 + step)
        descent.apply(models, slopes.clone(), memory, None, torch.tensor([step]), torch.tensor([0.1, 0.0]))
        descent.apply(same, slopes.clone(), other, None, step)
    assert torch.equal(models[1], torch.ones(5))
    assert torch.allclose(models[0], same[0], atol=1e-7)


def test_momentum_is_for_sgd_alone() -> None:
    with pytest.raises(UserError, match=r"momentum: got 0\.5 with optimiser 'adam'; allowed with: sgd"):
        TrainingSettings(optimiser="adam", momentum=0.5)
