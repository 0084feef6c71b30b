"""Clients, a server and a recorder whose every answer is scripted, for tests of the loop's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from steelyard.base.tallies import Leading
from steelyard.clients import protocol
from steelyard.messages.payloads import DenseModels, ServerTest
from steelyard.messages.updates import Evaluations, Failure, LossState, Question, Task, Updates
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Federation, Plan, RoundRecord, RoundState, Snapshot, States
from steelyard.weighing.order import OrderState
from steelyard.weighing.rule import Rule, WeighingSettings

NAMES = tuple("abcdefghij")


class Steps(DenseModels):
    """Models that, like sparse rows, cannot be combined without the parameters that they start from."""

    def combine(self, parameters: torch.Tensor, weights: np.ndarray) -> torch.Tensor:
        assert parameters.shape == (len(NAMES),)
        return super().combine(parameters, weights)


class Clients(protocol.Clients):
    """Each client sends a model of its own: one in the column of its name; `scores` is given for each round."""

    def __init__(
        self,
        names: Sequence[str] = NAMES,
        scores: Callable[[int], Sequence[float]] = lambda _: (0.5, 0.25),
        **changes: Any,
    ) -> None:
        self.registered, self.scores = tuple(names), scores
        self.broken: Mapping[str, str] = {}
        self.metrics = self.worthless = False
        self.tasks: list[Task] = []
        self.questions: list[Question] = []
        vars(self).update(changes)

    def names(self, seed: int) -> Sequence[str]:
        assert type(seed) is int
        return self.registered

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        assert tasks, "nobody is given nothing to do"
        self.tasks += tasks
        return [self._trained(task) for task in tasks]

    def _trained(self, task: Task) -> Updates:
        fine = tuple(name for name in task.clients if name not in self.broken)
        sizes = np.array([NAMES.index(name) + 1 for name in fine], dtype=np.int64)
        models = torch.eye(len(NAMES))[sizes - 1]
        # Whole numbers, as a careless client might send them.
        criteria = {"DS": sizes * (not self.worthless), "LD": np.ones(len(fine), np.int64) * (not self.worthless)}
        failures = tuple(Failure(name, self.broken[name]) for name in task.clients if name in self.broken)
        losses = np.zeros(len(fine))
        return Updates(task.federation, task.round, fine, sizes, criteria, losses, Steps(models), failures)

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        assert questions, "nobody is asked nothing"
        self.questions += questions
        return [self._tested(question) for question in questions]

    def _tested(self, question: Question) -> Evaluations:
        row = np.array(self.scores(question.round))
        scores = np.stack([row - 0.125 * index for index in range(len(question.models))])
        names, samples = NAMES[: len(row)], np.array([3, 1, 4, 1, 5][: len(row)])
        metrics = {"recall": np.full(len(row), float(question.models[0].argmax()))} if self.metrics else {}
        right = np.array([True, False]) if question.detailed else None
        return Evaluations(question.federation, question.round, names, samples, scores, 1 - scores, metrics, right)

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        return {"kept": torch.tensor([len(self.tasks)])}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None: ...

    def describe(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None: ...


class Server(protocol.Server):
    def initial(self, seed: int) -> torch.Tensor:
        return torch.full((len(NAMES),), float(seed))

    def test(self, seed: int, models: torch.Tensor, measure: Leading | None = None) -> ServerTest:
        assert type(seed) is int
        return ServerTest(np.full(len(models), 0.25), np.tile([0.5, 0.0], (len(models), 1)))


class Reporting(Server):
    """Reports with other rows than those that weigh; a regression has no classes."""

    def __init__(self, *, regression: bool = False) -> None:
        self.regression = regression
        self.reported: list[tuple[int, int]] = []

    def report(self, seed: int, models: torch.Tensor, measure: Leading | None = None) -> ServerTest:
        self.reported.append((seed, len(models)))
        if self.regression:
            return ServerTest(np.zeros(1), np.zeros((1, 0)), {"mape": np.array([0.5]), "mae": np.array([2.0])})
        return ServerTest(np.array([0.75]), np.array([[1.0, 0.5, 0.0]]))


class Recorder:
    """A recorder that keeps what it is given."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, bool]] = []
        self.records: list[RoundRecord] = []
        self.states: list[dict[str, int]] = []

    def commit(
        self, round: int, records: Sequence[RoundRecord], states: States, snapshot: Snapshot, *, last: bool
    ) -> None:
        assert "kept" in snapshot()
        self.rounds.append((round, last))
        self.records += records
        self.states.append({name: state.round for name, state in states.items()})


def federation(name: str = "f", seed: int = 3, **settings: Any) -> Federation:
    return Federation(name, name, seed, Rule(WeighingSettings(criteria=settings.pop("criteria", ("DS",)), **settings)))


def state(round: int, seed: int = 3, *, finished: bool = False) -> RoundState:
    return RoundState(round, torch.zeros(len(NAMES)), LossState(), OrderState((0,), 0.0), finished)


class Ran(NamedTuple):
    """What became of the scripted clients' rounds."""

    states: dict[str, RoundState]
    kept: Recorder
    clients: Clients

    @property
    def state(self) -> RoundState:
        return self.states["f"]

    @property
    def record(self) -> RoundRecord:
        return self.kept.records[-1]


def ran(
    *federations: Federation,
    before: RoundState | None = None,
    clients: Clients | None = None,
    server: Server | None = None,
    **plan: Any,
) -> Ran:
    """Run rounds from a state that all federations are in, left out: before round 1, by a plan with some fields."""
    made, asked, kept = federations or (federation(),), clients or Clients(), Recorder()
    states = {one.name: before or state(0) for one in made}
    planned = Plan(**{"rounds": 1, "fraction": 1.0, **plan})
    return Ran(run_rounds(made, states, asked, server or Server(), planned, kept), kept, asked)
