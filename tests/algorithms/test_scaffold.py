"""Where SCAFFOLD's correction enters decides between learning and explosion, once clients have momentum."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import pytest
from tests.algorithms.test_papers import LastRound, problem

from steelyard.algorithms.scaffold import Scaffold
from steelyard.clients.local import ComputeSettings, Simulation, SimulationServer
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.soundness import Exploded
from steelyard.rounds.state import Federation, Plan
from steelyard.weighing import criteria
from steelyard.weighing.rule import Rule, WeighingSettings

ROUNDS = 40


class InsideMomentum(Scaffold):
    """The same with the correction added to the gradient, so that the momentum multiplies it."""

    corrects: ClassVar[Literal["nothing", "gradient", "step"]] = "gradient"


def distance(algorithm: Scaffold, momentum: float, fraction: float = 1.0, rounds: int = ROUNDS) -> float:
    """How far the model ends from the optimum of all rows together; infinite where it explodes."""
    population, paper = problem(repeated=False)
    training = TrainingSettings(learning_rate=0.01, momentum=momentum, epochs=10, batch_size="full")
    clients = Simulation(
        {3: population}, ModelSettings(name="linear"), training, ComputeSettings(engine="loop"), [criteria.get("DS")]
    )
    federation = Federation("f", "f", 3, Rule(WeighingSettings()), algorithm=algorithm, momentum=momentum)
    try:
        states = run_rounds([federation], {}, clients, SimulationServer(clients), Plan(rounds, fraction), LastRound())
    except Exploded:
        return np.inf
    rows = np.vstack(list(paper.features.values()))
    best = np.linalg.lstsq(rows, np.concatenate(list(paper.labels.values())), rcond=None)[0]
    return float(np.linalg.norm(states["f"].parameters.numpy() - best))


def test_the_correction_stands_after_the_momentum() -> None:
    assert distance(Scaffold(), 0.9) < 0.05
    assert distance(InsideMomentum(), 0.9) > 10


def test_without_momentum_both_are_the_papers() -> None:
    ours, inside = (distance(algorithm, 0.0, rounds=8) for algorithm in (Scaffold(), InsideMomentum()))
    assert ours == pytest.approx(inside, abs=1e-5)


def test_three_of_five_clients_a_round_are_enough() -> None:
    assert distance(Scaffold(), 0.9, fraction=0.6) < 0.3
