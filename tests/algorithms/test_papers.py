"""Every built-in algorithm, through the real loop and simulated clients, against its paper's equations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import papers
from tests.algorithms.test_private_parts import PARTS

from steelyard.algorithms import catalogue
from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import ClientRows, Dataset, Population
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.messages import Task, Updates
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Federation, Plan, RoundRecord
from steelyard.weighing import criteria
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
}


class Watched(Simulation):
    """Simulated clients that note who was asked."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.cohorts: list[tuple[str, ...]] = []

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        self.cohorts.append(tasks[0].clients)
        return super().train(tasks)


class LastRound:
    """A recorder that keeps what was tested last."""

    def commit(self, round: int, records: Sequence[RoundRecord], *given: Any, **named: Any) -> None:
        self.tested = records[0].evaluations


def problem(*, repeated: bool) -> tuple[Population, papers.Federated]:
    """Five clients with a least-squares problem each; `repeated`: all rows of a client alike, so any batch will do."""
    draw = np.random.default_rng(5)
    count = sum(SIZES.values())
    x, y = draw.normal(size=(count, 3)).astype(np.float32), draw.normal(size=count).astype(np.float32)
    rows, begin = {}, 0
    for name, size in SIZES.items():
        rows[name] = np.arange(begin, begin + size)
        begin += size
        if repeated:
            x[rows[name]], y[rows[name]] = x[rows[name][0]], y[rows[name][0]]
    clients = tuple(ClientRows(name, mine, mine[:2]) for name, mine in rows.items())
    population = Population(Dataset("toy", torch.from_numpy(x), torch.from_numpy(y), 0), clients, rows["a"])
    # The network has a bias: a column of ones.
    features = {name: np.hstack([x[mine], np.ones((len(mine), 1))]).astype(np.float64) for name, mine in rows.items()}
    return population, papers.Federated(features, {name: y[mine].astype(np.float64) for name, mine in rows.items()})


@pytest.mark.parametrize("fraction", [1.0, 0.6])
@pytest.mark.parametrize(("engine", "batch"), [("loop", "full"), ("stacked", BATCH)])
@pytest.mark.parametrize("name", list(PARAMETERS))
def test_rounds_are_those_of_the_paper(name: str, engine: str, batch: Any, fraction: float) -> None:
    population, paper = problem(repeated=batch == BATCH)
    training = TrainingSettings(
        learning_rate=papers.RATE, momentum=paper.momentum, epochs=papers.EPOCHS, batch_size=batch
    )
    model, compute = ModelSettings(name="linear"), ComputeSettings(engine=engine)
    clients = Watched({3: population}, model, training, compute, [criteria.get("DS")])
    server = SimulationServer(clients)
    algorithm = AlgorithmSettings(name=name, **PARAMETERS[name]).made()
    federation = Federation("f", "f", 3, Rule(WeighingSettings()), algorithm=algorithm, momentum=training.momentum)
    first = server.initial(3).double().numpy()
    recorder = LastRound()
    found = run_rounds([federation], {}, clients, server, Plan(4, fraction), recorder)["f"]
    paper.model = first
    paper.every_steps = {name: papers.EPOCHS * (size // BATCH if batch == BATCH else 1) for name, size in SIZES.items()}
    for cohort in clients.cohorts:
        steps = {client: paper.every_steps[client] for client in cohort}
        getattr(papers, name.replace("-", "_"))(paper, cohort, steps)
    assert [len(cohort) for cohort in clients.cohorts] == [round(5 * fraction)] * 4
    assert np.allclose(paper.model, first, atol=1e-2) == (name == "local-only")
    # Float32 against float64, four rounds.
    assert found.parameters.numpy() == pytest.approx(paper.model, abs=5e-5)
    assert recorder.tested is not None
    assert list(recorder.tested.clients) == list(SIZES)
    errors = [paper.error(client, rows=2) for client in SIZES]
    assert recorder.tested.losses[0] == pytest.approx(errors, rel=1e-3, abs=1e-5)


def test_every_built_in_algorithm_is_held_to_its_paper() -> None:
    built_in = {name for name, made in catalogue.known().items() if made.__module__.startswith("steelyard.algorithms")}
    # test_fedfomo.py, test_flexlora.py
    assert set(PARAMETERS) | set(PARTS) | {"fedfomo", "flexlora"} == built_in
