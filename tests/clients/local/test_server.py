"""What the server of a simulation computes on its own rows: slopes of its loss, and training alone."""

from __future__ import annotations

import torch
from tests.clients.local.test_simulation import dataset, make
from torch.nn import functional

from steelyard.clients.local import SimulationServer
from steelyard.learning.training import TrainingSettings, orders

ROWS = slice(50, 60)


def loss_of(flat: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of logistic regression on the server's rows, written out in float64."""
    data = dataset()
    scores = data.features[ROWS].double() @ flat[:12].view(3, 4).T + flat[12:]
    return functional.cross_entropy(scores, data.labels[ROWS])


def test_slopes_are_those_of_finite_differences() -> None:
    server = SimulationServer(make())
    start = server.initial(0)
    models = torch.stack([start, -2 * start])
    found = server.gradients([0, 0], models)
    for model, gradient in zip(models.double(), found, strict=True):
        steps = 1e-6 * torch.eye(len(model), dtype=torch.float64)
        expected = torch.stack([(loss_of(model + step) - loss_of(model - step)) / 2e-6 for step in steps])
        # Float32 slopes against differences in float64 that are exact to about 1e-9.
        assert torch.allclose(gradient.double(), expected, atol=1e-5)


def test_the_server_alone_takes_plain_steps_on_its_own_rows() -> None:
    server = SimulationServer(make())
    start = server.initial(0)
    data, flat = dataset(), start.clone()
    order = torch.as_tensor(orders(0, 3, ["server"], 10, TrainingSettings(batch_size=2, epochs=2))[0])
    for batch in order.flatten().split(2):
        flat.requires_grad_()
        scores = data.features[ROWS][batch] @ flat[:12].view(3, 4).T + flat[12:]
        (slope,) = torch.autograd.grad(functional.cross_entropy(scores, data.labels[ROWS][batch]), flat)
        flat = (flat - 0.1 * slope).detach()
    found = server.train(0, 3, start)
    # Float32 sums in another order.
    assert torch.allclose(found, flat, atol=1e-5)
    assert torch.equal(found, server.train(0, 3, start))
    assert not torch.equal(found, server.train(0, 4, start))
