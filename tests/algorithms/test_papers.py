"""Every built-in algorithm, through the real loop and simulated clients, against its paper's equations."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import papers
from tests.kit import assert_refused
from torch import nn

from steelyard.algorithms import catalogue
from steelyard.algorithms.fedfomo import FedFomo
from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.messages.algorithm import Algorithm, Listening
from steelyard.messages.updates import Task, Updates
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Federation, Plan, RoundRecord
from steelyard.weighing import criterion
from steelyard.weighing.rule import Rule, WeighingSettings

SIZES = {"a": 4, "b": 12, "c": 8, "d": 20, "e": 16}
BATCH = 4
PARAMETERS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.3},
    "scaffold": {"server_rate": 0.8},
    "feddyn": {"alpha": 0.2},
    "fednova": {},
    "fedavgm": {"beta": 0.7, "server_rate": 0.9},
    **{name: {"server_rate": 0.2, "tau": 0.01} for name in ("fedadam", "fedyogi", "fedadagrad")},
    "fedexp": {},
    "client-momentum": {"beta": 0.6},
    "local-only": {},
    "fine-tuned": {},
    "ditto": {"strength": 0.7},
    "apfl": {"alpha": 0.4},
    "fedala": {"share": 1.0, "weight_rate": 0.5, "threshold": 1e-4},
    "fedfomo": {"validation": 0.1},
}
PARTS: dict[str, dict[str, Any]] = {"fedrep": {"head_epochs": 3}, "fedbn": {}}
"""Algorithms whose clients keep a part of the model."""


class Watched(Simulation):
    """Simulated clients that note who was asked."""

    cohorts: list[tuple[str, ...]]

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        self.cohorts = [*getattr(self, "cohorts", []), tasks[0].clients]
        return super().train(tasks)


class LastRound:
    """A recorder that keeps what was tested last."""

    def commit(self, round: int, records: Sequence[RoundRecord], *given: Any, **named: Any) -> None:
        self.tested = records[0].evaluations


def watched(population: Population, training: TrainingSettings, engine: str = "loop", model: Any = None) -> Watched:
    model = model or ModelSettings(name="linear")
    return Watched(
        {3: population}, model, training, ComputeSettings(engine=engine, device="cpu"), [criterion.get("DS")]
    )


def rounds(clients: Simulation, algorithm: Algorithm, plan: Plan, momentum: float = 0.0) -> tuple[torch.Tensor, Any]:
    """Return the last model of some rounds, and what its clients tested."""
    federation = Federation("f", "f", 3, Rule(WeighingSettings()), algorithm=algorithm, momentum=momentum)
    recorder = LastRound()
    states = run_rounds([federation], {}, clients, SimulationServer(clients), plan, recorder)
    return states["f"].parameters, recorder.tested


def problem(*, repeated: bool) -> tuple[Population, papers.Federated]:
    """Five clients with a least-squares problem each; `repeated`: all rows of a client alike, so any batch will do."""
    draw = np.random.default_rng(5)
    count = sum(SIZES.values())
    x, y = draw.normal(size=(count, 3)).astype(np.float32), draw.normal(size=count).astype(np.float32)
    ends = np.cumsum(list(SIZES.values()))
    rows = {name: np.arange(end - size, end) for (name, size), end in zip(SIZES.items(), ends, strict=True)}
    for mine in rows.values() if repeated else ():
        x[mine], y[mine] = x[mine[0]], y[mine[0]]
    clients = tuple(ClientRows(name, mine, mine[:2]) for name, mine in rows.items())
    population = Population(Dataset("toy", torch.from_numpy(x), torch.from_numpy(y), 0), clients, rows["a"])
    # The network has a bias: a column of ones.
    features = {name: np.hstack([x[mine], np.ones((len(mine), 1))]).astype(np.float64) for name, mine in rows.items()}
    return population, papers.Federated(features, {name: y[mine].astype(np.float64) for name, mine in rows.items()})


@pytest.mark.parametrize(("engine", "batch", "fraction"), [("loop", "full", 1.0), ("stacked", BATCH, 0.6)])
@pytest.mark.parametrize("name", list(PARAMETERS))
def test_rounds_are_those_of_the_paper(name: str, engine: str, batch: Any, fraction: float) -> None:
    population, paper = problem(repeated=batch == BATCH)
    training = TrainingSettings(
        learning_rate=papers.RATE, momentum=paper.momentum, epochs=papers.EPOCHS, batch_size=batch
    )
    clients = watched(population, training, engine)
    first = SimulationServer(clients).initial(3).double().numpy()
    algorithm = AlgorithmSettings(name=name, **PARAMETERS[name]).made()
    found, tested = rounds(clients, algorithm, Plan(4, fraction), paper.momentum)
    paper.model = first
    apart = clients.context.population(3).holding_back(0.1, 3)
    for client, begin, kept in zip(SIZES, apart.begins, apart.sizes, strict=True):
        paper.held[client] = apart.rows[begin + kept : begin + SIZES[client]].numpy() - begin
    paper.every_steps = {name: papers.EPOCHS * (size // BATCH if batch == BATCH else 1) for name, size in SIZES.items()}
    for cohort in clients.cohorts:
        steps = {client: paper.every_steps[client] for client in cohort}
        getattr(papers, name.replace("-", "_"))(paper, cohort, steps)
    assert np.allclose(paper.model, first, atol=1e-2) == (name == "local-only")
    # Float32 against float64, four rounds.
    assert found.numpy() == pytest.approx(paper.model, abs=5e-5)
    assert list(tested.clients) == list(SIZES)
    assert tested.losses[0] == pytest.approx([paper.error(client, rows=2) for client in SIZES], rel=1e-3, abs=1e-5)


def test_every_built_in_algorithm_is_held_to_its_paper() -> None:
    built_in = {name for name, made in catalogue.known().items() if made.__module__.startswith("steelyard.algorithms")}
    # test_flexlora.py
    assert set(PARAMETERS) | set(PARTS) | {"flexlora"} == built_in


def test_weights_of_fedfomo_are_gains_over_distances() -> None:
    heard = Listening(
        losses=torch.tensor([[1.0, 0.5, 3.0], [2.0, 2.0, 2.0], [0.0, 1.0, float("nan")]]),
        last_losses=torch.tensor([2.0, 1.0, 2.0]),
        distances=torch.tensor([[2.0, 1.0, 1.0], [1.0, 1.0, 0.0], [4.0, 2.0, 1.0]]),
    )
    # Row 1: (2 − 1)/2 = 0.5 and (2 − 0.5)/1 = 1.5, the third is worse. Row 2: nobody is better. Row 3: 2/4 and 1/2.
    expected = [[0.25, 0.75, 0.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    assert FedFomo().listen(heard).numpy() == pytest.approx(np.array(expected), abs=1e-6)


# ---------------------------------------------------------------- parts that clients keep to themselves


RATE = 0.2


def network(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def three() -> Population:
    """Three clients with rows of two classes."""
    draw = np.random.default_rng(7)
    x = torch.from_numpy(draw.normal(size=(26, 3)).astype(np.float32))
    y = torch.from_numpy(draw.integers(0, 2, 26))
    rows = {"a": np.arange(6), "b": np.arange(6, 18), "c": np.arange(18, 26)}
    clients = tuple(ClientRows(name, mine, mine[:4]) for name, mine in rows.items())
    return Population(Dataset("toy", x, y, 2), clients, np.arange(26))


def of_three(model: Any = network) -> Watched:
    return watched(three(), TrainingSettings(learning_rate=RATE, epochs=2, batch_size="full"), model=model)


def full_batch(module: nn.Module, moved: Iterable[nn.Parameter], x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    module.train()
    parameters = list(moved)
    for _ in range(steps):
        slopes = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), parameters)
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.data -= RATE * slope


def by_hand(name: str, first: nn.Module, source: Population) -> tuple[nn.Module, Mapping[str, nn.Module]]:
    """Return the server's model and each client's own after three rounds in which all take part."""
    private = "3." if name == "fedrep" else "1."
    server, kept = copy.deepcopy(first), {rows.client: first for rows in source.clients}

    def put_together(client: str) -> nn.Module:
        """The server's numbers, and the client's own where they are private."""
        mine = copy.deepcopy(server)
        own = {key: value for key, value in kept[client].state_dict().items() if key.startswith(private)}
        mine.load_state_dict({**mine.state_dict(), **own})
        return mine

    for _ in range(3):
        kept = {client: put_together(client) for client in kept}
        for rows in source.clients:
            module, (x, y) = (
                kept[rows.client],
                (each[rows.train] for each in (source.dataset.features, source.dataset.labels)),
            )
            if name == "fedrep":
                full_batch(module, module[3].parameters(), x, y, PARTS["fedrep"]["head_epochs"])  # type: ignore[index]
                full_batch(module, module[:3].parameters(), x, y, 2)  # type: ignore[index]
            else:
                full_batch(module, module.parameters(), x, y, 2)
        state = server.state_dict()
        for key in state:
            if not key.startswith(private) and state[key].is_floating_point():
                sums = [len(rows.train) * kept[rows.client].state_dict()[key] for rows in source.clients]
                state[key] = sum(sums) / 26
        server.load_state_dict(state)
    return server, {client: put_together(client) for client in kept}


@pytest.mark.parametrize("name", list(PARTS))
def test_rounds_with_private_parts_are_those_of_the_paper(name: str) -> None:
    clients, source = of_three(), three()
    layout, module = clients.context.setup.layout, network((3,), 2)
    layout.write(module, SimulationServer(clients).initial(3))
    found, tested = rounds(clients, AlgorithmSettings(name=name, **PARTS[name]).made(), Plan(3, 1.0))
    expected, own = by_hand(name, module, source)
    # Float32 on both sides, in another order.
    assert found.numpy() == pytest.approx(layout.read(expected).numpy(), abs=2e-5)
    for rows, loss in zip(source.clients, tested.losses[0], strict=True):
        outputs = own[rows.client].eval()(source.dataset.features[rows.test])
        wanted = nn.functional.cross_entropy(outputs, source.dataset.labels[rows.test]).item()
        assert loss == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(("name", "needs"), [("fedbn", "without batch norm"), ("fedrep", "of one layer")])
def test_a_model_without_the_part_is_refused_before_the_run(name: str, needs: str) -> None:
    clients = of_three(lambda feature_shape, classes: nn.Linear(3, 2))
    assert_refused(lambda: clients.check([AlgorithmSettings(name=name).made()]), "algorithm.name", name, needs)
