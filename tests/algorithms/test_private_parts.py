"""Algorithms that keep a part of the model at the client, against their papers' steps written out with plain torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.errors import UserError
from steelyard.learning.settings import TrainingSettings
from steelyard.messages import Question, Task
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Federation, Plan, RoundRecord
from steelyard.weighing import criteria
from steelyard.weighing.rule import Rule, WeighingSettings

PARTS: dict[str, dict[str, Any]] = {"fedrep": {"head_epochs": 3}, "fedbn": {}}
SIZES = {"a": 6, "b": 12, "c": 8}
RATE, ROUNDS = 0.2, 3


def network(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def population() -> Population:
    draw = np.random.default_rng(7)
    count = sum(SIZES.values())
    x = torch.from_numpy(draw.normal(size=(count, 3)).astype(np.float32))
    y = torch.from_numpy(draw.integers(0, 2, count))
    ends = np.cumsum(list(SIZES.values()))
    clients = tuple(
        ClientRows(name, np.arange(end - size, end), np.arange(end - size, end)[:4])
        for (name, size), end in zip(SIZES.items(), ends, strict=True)
    )
    return Population(Dataset("toy", x, y, 2), clients, np.arange(count))


def full_batch(module: nn.Module, moved: Iterable[nn.Parameter], x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    module.train()
    parameters = list(moved)
    for _ in range(steps):
        slopes = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), parameters)
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.data -= RATE * slope


def by_hand(name: str, first: nn.Module, source: Population, rounds: int) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Return the server's model and each client's own after so many rounds in which all take part."""
    server, kept = copy.deepcopy(first), {client: copy.deepcopy(first) for client in SIZES}

    def is_private(key: str) -> bool:
        return key.startswith("3." if name == "fedrep" else "1.")

    def put_together(client: str) -> nn.Module:
        """The server's numbers, and the client's own where they are private."""
        mine = copy.deepcopy(server)
        own = {key: value for key, value in kept[client].state_dict().items() if is_private(key)}
        mine.load_state_dict({**mine.state_dict(), **own})
        return mine

    for _ in range(rounds):
        models = {}
        for rows in source.clients:
            x, y = source.dataset.features[rows.train], source.dataset.labels[rows.train]
            module = models[rows.client] = put_together(rows.client)
            if name == "fedrep":
                full_batch(module, module[3].parameters(), x, y, PARTS["fedrep"]["head_epochs"])  # type: ignore[index]
                full_batch(module, module[:3].parameters(), x, y, 2)  # type: ignore[index]
            else:
                full_batch(module, module.parameters(), x, y, 2)
        kept = {client: copy.deepcopy(module) for client, module in models.items()}
        state = server.state_dict()
        for key in state:
            if not is_private(key) and state[key].is_floating_point():
                parts = [SIZES[client] * module.state_dict()[key] for client, module in models.items()]
                state[key] = sum(parts) / sum(SIZES.values())
        server.load_state_dict(state)
    return server, {client: put_together(client) for client in SIZES}


class Records:
    """A recorder that keeps the last round."""

    def commit(self, round: int, records: Sequence[RoundRecord], *given: Any, **named: Any) -> None:
        self.last = records[0]


def simulated(model: Any = network) -> Simulation:
    training = TrainingSettings(learning_rate=RATE, epochs=2, batch_size="full")
    return Simulation({3: population()}, model, training, ComputeSettings(engine="loop"), [criteria.get("DS")])


@pytest.mark.parametrize("name", list(PARTS))
def test_rounds_are_those_of_the_paper(name: str) -> None:
    clients = simulated()
    server = SimulationServer(clients)
    algorithm = AlgorithmSettings(name=name, **PARTS[name]).made()
    federation = Federation("f", "f", 3, Rule(WeighingSettings()), algorithm=algorithm)
    layout, module = clients.context.setup.layout, network((3,), 2)
    layout.write(module, server.initial(3))
    recorder = Records()
    found = run_rounds([federation], {}, clients, server, Plan(ROUNDS, 1.0), recorder)["f"]
    expected, own = by_hand(name, module, population(), ROUNDS)
    assert found.parameters.numpy() == pytest.approx(layout.read(expected).numpy(), abs=2e-5)
    tested = recorder.last.evaluations
    assert tested is not None
    for client, loss in zip(tested.clients, tested.losses[0], strict=True):
        rows = next(rows.test for rows in population().clients if rows.client == client)
        with torch.no_grad():
            outputs = own[client].eval()(population().dataset.features[rows])
        assert loss == pytest.approx(
            float(nn.functional.cross_entropy(outputs, population().dataset.labels[rows])), abs=1e-4
        )
    # A client's own model is not the server's.
    server_test = clients.evaluate([Question("f", 3, ROUNDS, found.parameters[None])])[0]
    assert not np.allclose(server_test.losses[0], tested.losses[0], atol=1e-3)


@pytest.mark.parametrize(
    ("name", "spans"), [("fedrep", [(24, 34)]), ("fedbn", [(16, 24), (34, 42)]), ("local-only", [(0, 42)])]
)
def test_what_is_private_is_not_sent(name: str, spans: list[tuple[int, int]]) -> None:
    clients = simulated()
    start = SimulationServer(clients).initial(3)
    algorithm = AlgorithmSettings(name=name).made()
    (updates,) = clients.train([Task("f", 3, 1, tuple(SIZES), start, algorithm=algorithm)])
    models = updates.payload.models  # type: ignore[attr-defined]
    private = torch.zeros(len(start), dtype=torch.bool)
    for begin, end in spans:
        private[begin:end] = True
    assert torch.equal(models[:, private], start[private].expand(len(models), -1))
    assert bool((models[:, ~private] != start[~private]).any(dim=1).all()) == (name != "local-only")
    # The client's own copy has moved there.
    for kept in clients.snapshot().values():
        assert bool((kept[private] != start[private]).any())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("fedbn", "algorithm.name: got 'fedbn' with a model without batch norm; allowed: one with batch norm"),
        ("fedrep", "algorithm.name: got 'fedrep' with a model of one layer, which is all head; allowed: two or more"),
    ],
)
def test_a_model_without_the_part_is_refused_before_the_run(name: str, line: str) -> None:
    clients = simulated(lambda feature_shape, classes: nn.Linear(3, 2))
    with pytest.raises(UserError) as refusal:
        clients.check([AlgorithmSettings(name=name).made()])
    assert str(refusal.value) == line
