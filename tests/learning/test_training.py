"""Local training by hand and against torch, what it draws, and what gradients tell of the rows behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import assert_refused
from torch import nn

from steelyard.learning.inversion import gradient, read_off
from steelyard.learning.parameters import Layout
from steelyard.learning.settings import ScheduleSettings
from steelyard.learning.training import TrainingSettings, orders, train_client
from steelyard.messages.updates import LossState

X = torch.tensor([[1.0], [2.0], [4.0]])
Y = torch.tensor([2.0, 3.0, 5.0])


def test_order_is_a_pure_function_of_seed_round_client() -> None:
    settings = TrainingSettings(epochs=3, batch_size=2)
    alone = orders(1, 2, ["b"], 7, settings)
    together = orders(1, 2, ["a", "b"], 7, settings)
    assert np.array_equal(alone[0], together[1])
    assert not np.array_equal(orders(1, 3, ["b"], 7, settings), alone)
    assert sorted(alone[0, 2]) == list(range(7))
    assert np.array_equal(orders(1, 2, ["b"], 2, settings)[0, 0], [0, 1])


@pytest.mark.parametrize("updates", [1, 4, 7])
def test_a_number_of_updates_is_the_first_so_many_steps(updates: int) -> None:
    """Three rows in batches of two: a step of two rows, one of one row, then the data begin anew."""
    settings = TrainingSettings(learning_rate=0.01, batch_size=2, updates=updates)
    order = orders(0, 1, ["a"], 3, settings)[0]
    weight, errors = 1.0, list[Any]()
    for rows in [batch for line in order for batch in (line[:2], line[2:])][:updates]:
        x, y = X[rows].numpy()[:, 0], Y[rows].numpy()
        errors.append(np.square(weight * x - y))
        weight -= 0.01 * 2 * float((x * (weight * x - y)).mean())
    module = nn.Linear(1, 1, bias=False)
    given = (module, Layout.of(module), torch.ones(1), X, Y, order, settings, LossState("squared-error"))
    found, loss = train_client(*given)
    assert len(errors) == updates
    assert found.tolist() == pytest.approx([weight], rel=1e-5)
    assert loss == pytest.approx(np.concatenate(errors[-2:]).mean(), rel=1e-4)


def test_schedules_by_hand() -> None:
    step = ScheduleSettings(kind="step", every=3, factor=0.5)
    assert [step.share(round, 10) for round in (1, 3, 4, 6, 7)] == [1, 1, 0.5, 0.5, 0.25]
    cosine = ScheduleSettings(kind="cosine", lowest=0.2)
    assert [cosine.share(round, 4) for round in (1, 3, 5)] == pytest.approx([1, 0.6, 0.2])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"learning_rate": 0}, ("learning_rate", 0)),
        ({"batch_size": "all"}, ("batch_size", "all")),
        ({"optimiser": "adam", "momentum": 0.5}, ("momentum", 0.5, "adam")),
        ({"epochs": 2, "updates": 5}, ("updates", 5, "epochs")),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, object], said: tuple[object, ...]) -> None:
    assert_refused(lambda: TrainingSettings(**fields), *said)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "kind", "own"),
    [
        ({"optimiser": "adam", "weight_decay": 0.1}, torch.optim.Adam, {"eps": 1e-7, "weight_decay": 0.1}),
        ({"optimiser": "adadelta"}, torch.optim.Adadelta, {"rho": 0.95, "eps": 1e-7}),
        (
            {"optimiser": "sgd", "momentum": 0.6, "weight_decay": 0.2},
            torch.optim.SGD,
            {"momentum": 0.6, "weight_decay": 0.2},
        ),
    ],
)
def test_steps_are_those_of_torch(settings: dict[str, Any], kind: Any, own: dict[str, float]) -> None:
    torch.manual_seed(4)
    module, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    layout = Layout.of(module)
    start = layout.read(module)
    layout.write(twin, start)
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    training = TrainingSettings(learning_rate=0.1, batch_size="full", epochs=7, **settings)
    order = np.broadcast_to(np.arange(8), (7, 8))
    found, _ = train_client(module, layout, start, x, y, order, training, LossState("cross-entropy"))
    optimiser = kind(twin.parameters(), lr=0.1, **own)
    for _ in range(7):
        optimiser.zero_grad()
        nn.functional.cross_entropy(twin(x), y).backward()
        optimiser.step()
    # Float32, seven steps.
    assert torch.allclose(found, layout.read(twin), atol=1e-6)


def test_one_sample_is_read_off_a_dense_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    row = torch.rand(1, 6)
    told = gradient(model, row, torch.tensor([1]))
    assert read_off(told[0], told[1]).tolist() == pytest.approx(row[0].tolist(), abs=1e-4)
