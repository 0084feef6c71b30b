"""Simulated clients that several processes train; for the round loop they are clients like any others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from steelyard.base.errors import UserError
from steelyard.clients.local import Simulation, SimulationServer
from steelyard.clients.local.device_data.dataset import DeviceDataset
from steelyard.clients.local.device_data.schedule import step_counts
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.evaluator import Evaluator
from steelyard.clients.protocol import WrappedClients
from steelyard.clients.ranks.balancing import share_out
from steelyard.clients.ranks.group import RankLost, Ranks
from steelyard.clients.ranks.models import RankedModels
from steelyard.clients.ranks.share import Share, joined, own_versions, task_content
from steelyard.clients.ranks.wire import Content
from steelyard.data.flaws import OMNISCIENT
from steelyard.messages.updates import LossState, Task, Updates

FEWEST_ROWS = 256
"""Rows from which on tests are shared out: on fewer, a model is tested sooner than it is sent."""


class RankedSimulation(WrappedClients):
    """All clients of a simulation, trained and tested by several processes; this one is rank 0 and leads.

    `experiment` is the document from which the other ranks build the same simulation.
    """

    def __init__(
        self, simulation: Simulation, server: SimulationServer, ranks: Ranks, experiment: Mapping[str, Any]
    ) -> None:
        super().__init__(simulation)
        self.simulation, self.ranks = simulation, ranks
        self._share = Share(simulation, server)
        self.answering = False
        """True while this process does its own part of a command: what it does for that, it does alone."""
        self._same_data: set[int] = set()
        self._trainings = 0
        described = {"experiment": dict(experiment), "versions": own_versions()}
        self.ask("assemble", dict.fromkeys(self._others, described))
        simulation.test_with(lambda setup: RankedEvaluator(setup, self))

    @property
    def _others(self) -> range:
        return range(1, self.ranks.count)

    def ask(self, command: str, contents: Mapping[int, Content]) -> Mapping[int, Content]:
        """Have ranks do a command, each with what it is given; returns their answers by rank."""
        return self.ranks.ask(command, contents, self._answer)

    def ask_all(self, command: str, contents: Sequence[Content], common: Content) -> Mapping[int, Content]:
        """Have all ranks do a command, each with what it is given and all with what is common to them."""
        return self.ranks.ask(command, dict(enumerate(contents)), self._answer, common)

    def _answer(self, command: str, content: Content) -> Content:
        self.answering = True
        try:
            return self._share.answer(command, content)
        finally:
            self.answering = False

    def fingerprint(self, seed: int) -> Mapping[str, str]:
        own = self.simulation.fingerprint(seed)
        found = self.ask("data", {rank: {"seed": seed} for rank in self._others})
        for rank, other in found.items():
            for part, value in own.items():
                if other.get(part) != value:
                    raise UserError(
                        f"rank {rank}: its data differ from those of rank 0 in {part} (seed {seed}); allowed: the same "
                        "files on all machines"
                    )
        self._same_data.add(seed)
        return own

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        if not tasks:
            return []
        for seed in {task.seed for task in tasks} - self._same_data:
            self.fingerprint(seed)
        steps, whole = [self._steps(task) for task in tasks], [self._whole(task) for task in tasks]
        shares = share_out(steps, whole, self.ranks.count)
        self._trainings += 1
        engine = self.simulation.settled(tasks)
        common = {"training": self._trainings, "engine": engine, "tasks": [task_content(task) for task in tasks]}
        state = self.simulation.snapshot()
        contents = [
            {"clients": clients, "state": None if rank == 0 else _of_clients(state, tasks, clients)}
            for rank, clients in enumerate(shares)
        ]
        answers = self.ask_all("train", contents, common)
        kept = {name: held for rank in self._others for name, held in answers[rank]["state"].items()}
        if kept:
            self.simulation.restore({**self.simulation.snapshot(), **kept})
        return [self._joined(place, task, answers) for place, task in enumerate(tasks)]

    def _steps(self, task: Task) -> dict[str, int]:
        """How many steps each client of a task takes; one that is not registered, and fails, takes none."""
        context = self.simulation.context
        population = context.population(task.seed)
        known = [name for name in task.clients if name in population.position]
        sizes = population.sizes[[population.position[name] for name in known]]
        counts = step_counts(sizes, context.training, joined=context.setup.batch_norm)
        return dict.fromkeys(task.clients, 0) | dict(zip(known, counts.tolist(), strict=True))

    def _whole(self, task: Task) -> bool:
        """Whether one rank must train the whole cohort: its clients look at each other's models."""
        behaviours = self.simulation.context.population(task.seed).behaviours.values()
        return task.algorithm.listens or any(how.attack in OMNISCIENT for how in behaviours)

    def _joined(self, place: int, task: Task, answers: Mapping[int, Content]) -> Updates:
        parts = {rank: answers[rank]["answers"][place] for rank in sorted(answers)}
        updates, places = joined(task, {rank: part for rank, part in parts.items() if part is not None})
        context, frozen = self.simulation.context, self.simulation.frozen(task.algorithm)
        received = task.parameters.to(context.device)
        which = (self._trainings, place)
        models = RankedModels(self.ask, which, task.seed, places, received, context.matrix, frozen)
        return replace(updates, payload=models)

    def close(self) -> None:
        if not self.ranks.broken:
            with suppress(RankLost):  # what went wrong first is what is reported
                self.ask("release", dict.fromkeys(self._others))
        self.clients.close()


def _of_clients(
    state: Mapping[str, torch.Tensor], tasks: Sequence[Task], clients: Sequence[Sequence[str]]
) -> dict[str, torch.Tensor]:
    """Return what a rank needs of all that clients keep: models of earlier rounds, and all of its own clients."""
    mine = {(task.federation, name) for task, names in zip(tasks, clients, strict=True) for name in names}
    found: dict[str, torch.Tensor] = {}
    for key, held in state.items():
        kind, federation, whose, *_ = json.loads(key)
        if kind == "global" or (federation, whose) in mine:
            found[key] = held
    return found


class RankedEvaluator(Evaluator):
    """Tests models on rows that the ranks share among them; on few rows this process does it alone."""

    def __init__(self, setup: TrainingSetup, clients: RankedSimulation) -> None:
        super().__init__(setup)
        self._clients = clients

    def test(
        self, models: torch.Tensor, dataset: DeviceDataset, rows: torch.Tensor, loss: LossState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = self._clients.ranks.count
        if self._clients.answering or len(rows) < max(count, FEWEST_ROWS):
            return super().test(models, dataset, rows, loss)
        common = {"models": models, "loss": asdict(loss), "seed": self._clients.simulation.context.seed_of(dataset)}
        contents = [{"rows": part} for part in rows.tensor_split(count)]
        answers = self._clients.ask_all("test", contents, common)
        parts = [answers[rank] for rank in range(count)]
        device = self.setup.device
        return (
            torch.cat([predictions.to(device) for predictions, _ in parts], dim=1),
            torch.cat([losses.to(device) for _, losses in parts], dim=1),
        )
