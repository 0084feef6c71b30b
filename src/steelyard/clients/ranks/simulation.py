"""Simulated clients that several processes train; for the round loop they are clients like any others."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.clients.local import Simulation, SimulationServer
from steelyard.clients.local.cohort import step_counts
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.evaluator import Evaluator
from steelyard.clients.local.hardware import device_of, memory_of, threads_of
from steelyard.clients.local.population import DeviceDataset
from steelyard.clients.local.settings import ComputeSettings
from steelyard.clients.protocol import WrappedClients
from steelyard.clients.ranks.group import Place, RankLost, Ranks
from steelyard.clients.ranks.share import Share, joined, own_versions, task_content
from steelyard.clients.ranks.wire import Content
from steelyard.data.flaws import OMNISCIENT
from steelyard.messages.payloads import DenseModels, Floats, ServerTest, SingleModels, spans
from steelyard.messages.updates import LossState, Task, Updates

SLACK = 1.1
"""Whole federations go to one rank each where that takes at most so many times as long: no sum is then sent around."""

Unit = tuple[int, tuple[str, ...], int]
"""What is given to one rank as a whole: a task by its place, some of its clients, and their steps."""
Shares = list[list[list[str]]]
"""For each rank and each task the clients that the rank trains, ascending."""


def share_out(steps: Sequence[Mapping[str, int]], whole: Sequence[bool], ranks: int) -> Shares:
    """Give the clients of tasks to ranks; `steps` are those of each task's clients, `whole` tasks are not split."""
    together: list[Unit] = [(task, tuple(clients), sum(clients.values())) for task, clients in enumerate(steps)]
    apart: list[Unit] = [
        unit
        for task, clients in enumerate(steps)
        for unit in ([together[task]] if whole[task] else [(task, (name,), n) for name, n in clients.items()])
    ]
    split, longest = _given(apart, ranks)
    if len(steps) > 1:
        unsplit, longest_unsplit = _given(together, ranks)
        if longest_unsplit <= SLACK * longest:
            split = unsplit
    found: Shares = [[[] for _ in steps] for _ in range(ranks)]
    for rank, units in enumerate(split):
        for task, clients, _ in units:
            found[rank][task] += clients
    return [[sorted(clients) for clients in tasks] for tasks in found]


def _given(units: Sequence[Unit], ranks: int) -> tuple[list[list[Unit]], int]:
    """Give each unit, longest first, to the rank that has least; returns also the most steps that a rank has."""
    given: list[list[Unit]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-unit[2], unit[0], unit[1])):
        load, rank = heapq.heappop(loads)
        given[rank].append(unit)
        heapq.heappush(loads, (load + unit[2], rank))
    return given, max(load for load, _ in loads)


def on_rank(compute: ComputeSettings, place: Place) -> ComputeSettings:
    """Return the settings for one of several processes of a machine: what is given stays, the rest is shared out.

    The ranks of a machine take its CUDA devices in turn, unless one is named.
    """
    changes: dict[str, object] = {}
    sharing = place.local_count
    device = device_of(compute)
    if device.type == "cuda" and compute.device in ("auto", "cuda"):
        devices = torch.cuda.device_count()
        device = torch.device("cuda", place.local_rank % devices)
        changes["device"] = str(device)
        sharing = math.ceil(place.local_count / devices)
    if compute.threads is None:
        changes["threads"] = max(1, threads_of(compute) // place.local_count)
    if compute.memory_gb is None:
        changes["memory_gb"] = memory_of(compute, device) / sharing / 1e9
    return compute.model_copy(update=changes)


class Asking(Protocol):
    """From a command and what each rank is given for it to the answers by rank."""

    def __call__(self, command: str, contents: Mapping[int, Content]) -> Mapping[int, Content]: ...


class RankedModels(DenseModels):
    """Whole local models, each on the rank that trained it.

    Sums, distances and tests are done there, and only what comes of them travels. Sums are added up in the order of
    the ranks. Whoever asks for `models` gets all of them into the memory of this process, once a round.
    """

    at_hand = False

    def __init__(
        self,
        ask: Asking,
        task: tuple[int, int],
        seed: int,
        places: Sequence[tuple[int, int]],
        received: torch.Tensor,
        memory: Callable[[int], torch.Tensor],
        frozen: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Name the rank and the row there of each client; `task` is the number of the training, and its place in it.

        `memory` gives a matrix for so many models, where all of them are wanted here.
        """
        object.__setattr__(self, "frozen", frozen)
        self._ask, self._task, self._seed, self._received = ask, task, seed, received
        self._places, self._memory = tuple(places), memory

    @cached_property
    def models(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All models, copied into this process."""
        found = self._memory(len(self._places))
        for span, models in self.blocks():
            found[:, span] = models
        return found

    @property
    def nbytes(self) -> int:
        return 4 * len(self._places) * self._received.numel()

    @property
    def like(self) -> torch.Tensor:
        return self._received.new_empty((len(self._places), 0))

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for span in spans(self._received.numel(), len(self._places), self._received.device.type):
            found = self._received.new_empty((len(self._places), span.stop - span.start))
            for clients, rows in self._asked("rows", span=[span.start, span.stop]):
                found[clients] = rows.to(found.device)
            yield span, found

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        given = np.asarray(weights, dtype=np.float64)
        total = self._received.new_zeros((*given.shape[:-1], self._received.numel()))
        by_rank = {rank: given[..., clients] for rank, clients in self._clients().items()}
        for _, part in self._asked("sum", by_rank):
            total += part.to(total.device)
        return self.keep_frozen(total, parameters)

    def divergence(self, parameters: torch.Tensor) -> Floats:
        # The ranks have the model that they were sent.
        known = torch.equal(parameters.to(self._received.device), self._received)
        return self._in_order(self._asked("divergence", parameters=None if known else parameters), np.float64)

    def gram(self, parameters: torch.Tensor) -> Floats:
        return SingleModels.gram(self, parameters)

    def finite(self) -> NDArray[np.bool_]:
        return self._in_order(self._asked("finite"), np.bool_)

    def tested(self, test: Callable[[torch.Tensor], ServerTest]) -> ServerTest:
        """Return the test of every model by the server of the rank that holds it: all have the same rows."""
        answers = self._asked("tested", seed=self._seed)
        order = np.argsort([client for clients, _ in answers for client in clients])
        return ServerTest.joined([ServerTest(**found) for _, found in answers], order)

    def select(self, keep: Sequence[int]) -> RankedModels:
        places = [self._places[place] for place in keep]
        return RankedModels(self._ask, self._task, self._seed, places, self._received, self._memory, self.frozen)

    def content(self) -> Sequence[NDArray[Any]] | None:
        return DenseModels(self.models).content()

    def _clients(self) -> dict[int, list[int]]:
        """By rank, in order: which of the clients it trained."""
        found: dict[int, list[int]] = {rank: [] for rank in sorted({rank for rank, _ in self._places})}
        for client, (rank, _) in enumerate(self._places):
            found[rank].append(client)
        return found

    def _asked(
        self, command: str, weights: Mapping[int, Floats] | None = None, **given: Content
    ) -> list[tuple[list[int], Content]]:
        """Have each rank do something with its models; returns the clients that it trained, and its answer."""
        clients = self._clients()
        contents = {
            rank: {
                **given,
                "task": self._task,
                "rows": np.array([self._places[client][1] for client in mine], dtype=np.int64),
                **({} if weights is None else {"weights": weights[rank]}),
            }
            for rank, mine in clients.items()
        }
        answers = self._ask(command, contents)
        return [(clients[rank], answers[rank]) for rank in clients]

    def _in_order(self, answers: Sequence[tuple[list[int], Content]], kind: Any) -> NDArray[Any]:
        found = np.zeros(len(self._places), dtype=kind)
        for clients, values in answers:
            found[clients] = values
        return found


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
        simulation.context.make_evaluator = lambda setup: RankedEvaluator(setup, self)

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
        context, frozen = self.simulation.context, self.simulation.context.frozen(task.algorithm)
        received, which = task.parameters.to(context.device), (self._trainings, place)

        def models(places: Sequence[tuple[int, int]]) -> RankedModels:
            return RankedModels(self.ask, which, task.seed, places, received, context.matrix, frozen)

        return joined(task, {rank: part for rank, part in parts.items() if part is not None}, models)

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
