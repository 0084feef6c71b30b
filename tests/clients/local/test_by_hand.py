"""Algorithms that take their clients' steps themselves: on every engine as in the loop, and what they are given."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.clients.local import engine_cases as cases
from tests.clients.local.engine_cases import Case
from torch import nn

from steelyard.algorithms.settings import AlgorithmSettings
from steelyard.clients.local import Simulation, evaluator
from steelyard.clients.local.engines import table
from steelyard.clients.local.engines.stacked import GraphEngine
from steelyard.clients.local.engines.steps import HandDerivedStep, MappedStep, StackStep
from steelyard.learning.descent import Descent
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.messages.algorithm import Algorithm, LocalSteps, Part, Vectors
from steelyard.messages.updates import Question

SIZES = (3, 11, 7)
PEOPLE = cases.population((4,), 3, SIZES)
GIVEN: dict[str, Any] = {"learning_rate": 0.2, "epochs": 2, "batch_size": 4, "momentum": 0.5, "weight_decay": 0.01}
PLAIN = TrainingSettings(learning_rate=0.2, epochs=1, batch_size=4)


def normalised() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Tanh(), nn.Linear(5, 3))
    return cases.frozen(module, "0.bias")


MLP = Case(ModelSettings(name="mlp", hidden=(5,)), PEOPLE, TrainingSettings(**GIVEN))
CNN = Case(ModelSettings(name="cnn", channels=(2, 3), hidden=(4,)), cases.population((1, 8, 8), 3, SIZES), MLP.training)
NORM = Case(cases.of(normalised), PEOPLE, MLP.training)
NETWORKS = {
    "mlp": MLP,
    "cnn": CNN,
    "norm": NORM,
    **{f"{name}, plain": replace(what, training=PLAIN) for name, what in (("mlp", MLP), ("cnn", CNN), ("norm", NORM))},
}


@pytest.fixture(autouse=True)
def quick_trials(own_cache: object) -> None:
    """Choices of engines are these tests' own."""


def rounds(clients: Simulation, algorithm: Algorithm) -> list[Any]:
    """Return what two rounds send, report and test; c1 is not in the second."""
    task, found = cases.task_of(clients, algorithm=algorithm), list[Any]()
    for round, cohort in enumerate((("c0", "c1", "c2"), ("c0", "c2")), start=1):
        (updates,) = clients.train([replace(task, round=round, clients=cohort)])
        models: torch.Tensor = updates.payload.models  # type: ignore[attr-defined]
        (tested,) = clients.evaluate([Question("f", 0, round, task.parameters[None], algorithm=algorithm)])
        found += [models.cpu().numpy(), updates.losses, tested.losses]
        task = replace(task, parameters=models.mean(dim=0))
    return found


@functools.cache
def by_the_loop(name: str, network: str) -> list[Any]:
    return rounds(cases.simulated(NETWORKS[network]), AlgorithmSettings(name=name).made())


def on_graphs(clients: Simulation, *, packed: bool) -> None:
    """Let clients train as on a GPU: in buffers that graphs are captured over, here without graphs, two at a time.

    Packed: whole models stand in the order of the kernels' steps, parts of them in the module's.
    """
    context = clients.context
    steps = table.hand_derived_steps(context.setup.module, context.setup.layout, "float32") if packed else None

    def step(descent: Descent, part: Part) -> StackStep:
        whole = steps is not None and part == "everything"
        return HandDerivedStep(steps, descent) if whole else MappedStep(context.setup, descent, part)

    context.engine.engine = GraphEngine(context.setup, step, "stacked/graph", 2)


ON_GRAPHS = ("captured", "packed")
ENGINES = {
    "mlp": "threads processes stacked:2 stacked/vmap captured",
    "cnn": "threads fused fused/winograd stacked captured packed",
}
TABLE = [
    (name, engine, f"{network}{how}")
    for name in ("apfl", "fedrep", "fedala", "ditto")
    for network, engines in ENGINES.items()
    for how in ("", ", plain")
    for engine in engines.split()
]


@pytest.mark.parametrize(
    ("name", "engine", "network"),
    # Enough for every day: a third of them, and all that stand for a GPU.
    [
        pytest.param(*each, marks=[pytest.mark.slow] * bool(number % 3 and each[1] not in ON_GRAPHS))
        for number, each in enumerate(TABLE)
    ],
)
def test_every_engine_gives_what_the_loop_gives(name: str, engine: str, network: str) -> None:
    clients = cases.simulated(NETWORKS[network], "loop" if engine in ON_GRAPHS else engine)
    if engine in ON_GRAPHS:
        on_graphs(clients, packed=engine == "packed")
    found = rounds(clients, AlgorithmSettings(name=name).made())
    for ours, theirs in zip(found, by_the_loop(name, network), strict=True):
        # Up to some sixty float32 steps on sums of up to 64 numbers of about 1; norms divide by what may be small.
        assert ours == pytest.approx(theirs, abs=5e-4 if network.startswith("norm") else 5e-5)
    if engine not in ON_GRAPHS:
        assert cases.engine_of(clients).startswith(engine.partition(":")[0])  # And it did not fall back.


class Plain(Algorithm):
    """FedAvg's training, step by step."""

    by_hand = True

    def train(self, local: LocalSteps) -> tuple[torch.Tensor, Vectors]:
        models, move = local.start, local.optimiser()
        for batch in local.batches():
            models = move(models, batch.gradient(models))
        return models, {}


@pytest.mark.parametrize("training", [{}, {"optimiser": "adam"}, {"epochs": 1, "updates": 5}, {"batch_size": "full"}])
@pytest.mark.parametrize("model", [MLP.model, cases.of(normalised)])
def test_steps_by_hand_are_the_ordinary_training(model: ModelSettings, training: dict[str, Any]) -> None:
    """Momentum, decay, Adam, steps in place of epochs, batch norm with its last row joined, frozen parameters."""
    given = {**GIVEN, "momentum": 0.0 if "optimiser" in training else 0.5, **training}
    what = Case(model, PEOPLE, TrainingSettings(**given))
    ours, theirs = (rounds(cases.simulated(what), algorithm) for algorithm in (Plain(), Algorithm()))
    for mine, ordinary in zip(ours, theirs, strict=True):
        # Adam divides by the size of the gradients, and rounding near 0 with it.
        assert mine == pytest.approx(ordinary, abs=5e-6 if "optimiser" not in training else 5e-4)


class Halves(Algorithm):
    """Goes through half of each client's rows and keeps how often it saw a batch."""

    by_hand = True
    keeps = ("seen",)

    def train(self, local: LocalSteps) -> tuple[torch.Tensor, Vectors]:
        seen = local.kept["seen"]
        for batch in local.batches(epochs=3, share=0.5):
            seen = seen + batch.taken[:, None]
        return local.start, {"seen": seen[:, :1]}


def test_a_share_of_the_rows_has_its_own_batches() -> None:
    clients = cases.simulated(replace(MLP, training=TrainingSettings(**{**GIVEN, "batch_size": 2})))
    rounds(clients, Halves())
    found = {key.split('"')[5]: int(held[0]) for key, held in clients.snapshot().items()}
    # Halves of 3, 11 and 7 rows are 1, 5 and 3: 1, 3 and 2 batches in each of three passes; c1 took part once.
    assert found == {"c0": 2 * 3, "c1": 9, "c2": 2 * 6}


class Centred(nn.Module):
    """Looks at all rows of a call, which padding changes: its tests are made client by client."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dense(x - x.amax(dim=0)))


@pytest.mark.parametrize(
    ("what", "stacks"),
    [
        (CNN, True),
        (NORM, True),
        (replace(MLP, people=cases.labelled()), True),
        (Case(cases.UNET, cases.masked()), False),  # torch maps no group norm where no gradients are taken
        (Case(cases.of(Centred), PEOPLE), False),
    ],
)
def test_models_tested_side_by_side_as_on_a_gpu(what: Case, stacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client's own model on its own rows, one client with more than the others."""
    first, *others = what.people.clients
    people = replace(what.people, clients=(replace(first, test=first.train[:3]), *others))
    found: list[Any] = []
    for devices in (("cpu",), ()):
        monkeypatch.setattr(evaluator, "SIDE_BY_SIDE", devices)
        clients = cases.simulated(replace(what, people=people))
        task = cases.task_of(clients, algorithm=AlgorithmSettings(name="fedrep", head_epochs=1).made())
        clients.train([task])
        asked = Question("f", 0, 1, torch.stack([task.parameters, task.parameters * 0.5]), algorithm=task.algorithm)
        (answer,) = clients.evaluate([asked])
        found.append((answer, clients.context.evaluator._stacks))
    (one, ours), (other, theirs) = found
    assert (ours, theirs) == (stacks, False)
    assert one.clients == other.clients == tuple(each.client for each in people.clients)
    assert one.losses == pytest.approx(other.losses, abs=1e-5)
    assert one.scores == pytest.approx(other.scores, abs=1e-5)
