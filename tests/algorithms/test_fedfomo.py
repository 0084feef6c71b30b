"""FedFomo: the weights of the paper by hand, its rounds client by client, and what the run keeps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.populations import regression_population

from steelyard import Experiment, UserError
from steelyard.algorithms.algorithm import Listening
from steelyard.algorithms.fedfomo import FedFomo
from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.data.dataset import Population
from steelyard.experiment.comparing import with_rules
from steelyard.experiment.running import run
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.messages import Question, Task
from steelyard.report.figures import draw
from steelyard.report.view import RunView
from steelyard.runs.reader import History
from steelyard.settings import validated

SIZES = {"a": 5, "b": 10, "c": 7}
RATE = 0.05


def test_weights_are_gains_over_distances() -> None:
    heard = Listening(
        losses=torch.tensor([[1.0, 0.5, 3.0], [2.0, 2.0, 2.0], [0.0, 1.0, float("nan")]]),
        last_losses=torch.tensor([2.0, 1.0, 2.0]),
        distances=torch.tensor([[2.0, 1.0, 1.0], [1.0, 1.0, 0.0], [4.0, 2.0, 1.0]]),
    )
    # Row 1: (2 − 1)/2 = 0.5 and (2 − 0.5)/1 = 1.5, the third is worse. Row 2: nobody is better. Row 3: 2/4 and 1/2.
    expected = [[0.25, 0.75, 0.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    assert FedFomo().listen(heard).numpy() == pytest.approx(np.array(expected), abs=1e-6)


def population() -> Population:
    return regression_population(11, SIZES)


def simulated() -> Simulation:
    training = TrainingSettings(learning_rate=RATE, epochs=3, batch_size="full")
    return Simulation({3: population()}, ModelSettings(name="linear"), training, ComputeSettings(engine="loop"))


def test_rounds_are_those_of_the_paper() -> None:
    """Three rounds, the second without c: all equations once more in float64, one client after another."""
    clients, algorithm = simulated(), FedFomo(validation=0.3)
    first = SimulationServer(clients).initial(3)
    apart = clients.context.population(3).holding_back(0.3, 3)
    source = population().dataset
    data: dict[str, Any] = {}
    for position, (name, size) in enumerate(SIZES.items()):
        begin, kept = int(apart.begins[position]), int(apart.sizes[position])
        rows = apart.rows[begin : begin + size].cpu().numpy()
        assert sorted(rows) == list(range(begin, begin + size))  # its own rows, each once
        x = np.hstack([source.features.numpy(), np.ones((len(source.labels), 1))])[rows].astype(np.float64)
        y = source.labels.numpy()[rows].astype(np.float64)
        data[name] = (x[:kept], y[:kept], x[kept:], y[kept:])
    assert {name: len(found[3]) for name, found in data.items()} == {"a": 2, "b": 3, "c": 3}
    own = dict.fromkeys(SIZES, first.double().numpy())
    last = dict(own)
    for round, cohort in enumerate((("a", "b", "c"), ("a", "b"), ("a", "b", "c")), start=1):
        (updates,) = clients.train([Task("f", 3, round, cohort, first, algorithm=algorithm)])
        trained = {}
        for name in cohort:
            x, y, *_ = data[name]
            model = own[name].copy()
            for _ in range(3):
                model = model - RATE * 2 * x.T @ (x @ model - y) / len(y)
            trained[name] = model
        matrix = np.zeros((len(cohort), len(cohort)))
        for i, name in enumerate(cohort):
            _, _, x, y = data[name]

            def loss(model: np.ndarray, x: np.ndarray = x, y: np.ndarray = y) -> float:
                return float(np.mean((x @ model - y) ** 2))

            for j, other in enumerate(cohort):
                gain, distance = loss(last[name]) - loss(trained[other]), np.linalg.norm(trained[other] - last[name])
                matrix[i, j] = max(0.0, gain / distance) if distance else 0.0
            total = matrix[i].sum()
            matrix[i] = matrix[i] / total if total else 0.0
            own[name] = last[name] + sum(matrix[i, j] * (trained[other] - last[name]) for j, other in enumerate(cohort))
        last |= trained
        assert updates.listening is not None
        assert updates.listening == pytest.approx(matrix, abs=2e-3)
        assert 0 < np.count_nonzero(matrix) < matrix.size or round == 1
    (answer,) = clients.evaluate([Question("f", 3, 3, first[None], algorithm=algorithm)])
    x = np.hstack([source.features.numpy(), np.ones((len(source.labels), 1))])
    for rows, loss in zip(population().clients, answer.losses[0], strict=True):
        expected = np.mean((x[rows.test] @ own[rows.client] - source.labels.numpy()[rows.test]) ** 2)
        assert loss == pytest.approx(float(expected), rel=2e-3)


def test_the_run_keeps_the_matrix_and_draws_it(tmp_path: Path) -> None:
    document = {"rounds": {"count": 2}, "partition": {"clients": 4}, "model": {"name": "logistic"}}
    folder = run(with_rules(Experiment.model_validate(document), ["fedavg,fedfomo"]), out=tmp_path / "run")
    found = History(folder).listening
    assert set(found["rule"]) == {"fedfomo"}
    assert len(found) == 2 * 4 * 4
    sums = found.groupby(["round", "client"])["weight"].sum()
    assert all(total == pytest.approx(1, abs=1e-5) or total == 0 for total in sums)
    assert (found.groupby("round")["weight"].nunique() > 2).all()
    view = RunView([History(folder)])
    chart = draw(view, "listening", rule="fedfomo")
    assert chart is not None
    assert draw(view, "listening", rule="fedavg") is None


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"privacy": {"aggregation": {"kind": "secure"}}},
            "privacy.aggregation: clients of fedfomo are given each other's models as they are",
        ),
        (
            {"weighing": {"defence": {"rule": "median"}}},
            "weighing.defence: got 'median' with fedfomo, whose clients weigh single models themselves",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as refused:
        validated(Experiment, {"algorithm": {"name": "fedfomo"}, **sections}, "")
    assert line in str(refused.value)


def test_across_machines_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"algorithm\.name: got 'fedfomo', whose clients test each other's models"):
        Experiment.model_validate({"algorithm": {"name": "fedfomo"}}).check_federated()
