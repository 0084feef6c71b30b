"""Ranks as an engine: cohorts are trained and models tested by several processes, and rank 0 leads.

The others do what it asks: train a share of the jobs, sum and test the models that they hold, test models on a share
of the rows. Between two rounds they keep nothing but models that rank 0 still knows of.
"""

from __future__ import annotations

import copy
import heapq
import json
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard import __version__
from steelyard.algorithms.settings import AlgorithmSettings, algorithm_table
from steelyard.base.errors import UserError, in_words
from steelyard.base.settings import validated
from steelyard.clients.local import Simulation, SimulationServer
from steelyard.clients.local.cohort import Cohort, Kept
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.evaluator import Evaluator
from steelyard.clients.local.hardware import device_of, memory_of, threads_of
from steelyard.clients.local.population import DeviceDataset
from steelyard.clients.local.settings import ComputeSettings
from steelyard.clients.ranks.group import Place, RankLost, Ranks
from steelyard.clients.ranks.wire import Content
from steelyard.learning.descent import Descent
from steelyard.messages.payloads import DenseModels, Floats, ServerTest, SingleModels, spans
from steelyard.messages.updates import LossState, Task
from steelyard.proof.signing import digest_of_task


def own_versions() -> dict[str, str]:
    """Return what must be the same on all ranks: other versions draw or round otherwise."""
    return {"steelyard": __version__, "torch": torch.__version__, "numpy": np.__version__}


class Share:
    """One rank's part of the work; rank 0 has one too, and gives itself the same commands as the others."""

    def __init__(self, simulation: Simulation, server: SimulationServer) -> None:
        self.simulation, self.server = simulation, server
        self._held: dict[int, tuple[DenseModels, list[Task]]] = {}
        """By the number of the training: the models that were trained here, and the tasks."""

    def answer(self, command: str, content: Content) -> Content:
        """Do one command of rank 0."""
        match command:
            case "data":
                return dict(self.simulation.fingerprint(content["seed"]))
            case "train":
                return self._train(content)
            case "test":
                return self._test(content)
            case "tested":
                return vars(self.server.test(content["seed"], self._models(content).models))
            case "sum":
                models = self._models(content)
                return models.combine(models.like, content["weights"])
            case "divergence":
                training, number = content["task"]
                start = content["parameters"]
                known = self._held[training][1][number].parameters
                return self._models(content).divergence(known if start is None else start)
            case "finite":
                return self._models(content).finite()
            case _:
                assert command == "rows", command
                return self._models(content).models[:, slice(*content["span"])]

    def _models(self, content: Content) -> DenseModels:
        held, rows = self._held[content["task"][0]][0], content["rows"]
        return held if np.array_equal(rows, np.arange(len(held.models))) else held.select(rows.tolist())

    def _train(self, content: Content) -> Content:
        for number in content["free"]:
            self._held.pop(number, None)
        simulation, context, jobs = self.simulation, self.simulation.context, content["jobs"]
        context.use_engine(content["engine"])
        tasks = [read_task(table) for table in content["tasks"]]
        populations = [context.population(task.seed, task.algorithm.held_back) for task in tasks]
        extra = [] if content["starts"] is None else content["starts"].unbind()
        kept = Kept()
        kept.restore(content["state"] or {})
        cohort = Cohort(
            tuple(tasks),
            tuple(each.at_work(task.seed, task.round) for each, task in zip(populations, tasks, strict=True)),
            *(context.training, context.setup.batch_norm, read_loss(content["loss"])),
            Descent(**content["descent"]),
            *(jobs[:, 0], jobs[:, 1], (*(task.parameters for task in tasks), *extra), jobs[:, 2]),
            corrections=content["corrections"],
            kept=kept,
        )
        models = context.matrix(len(cohort))
        losses = simulation.trainer.train(cohort, models) if len(cohort) else np.zeros(0)
        self._held[content["training"]] = DenseModels(models), tasks
        return {"losses": losses, "state": None if content["state"] is None else kept.snapshot()}

    def _test(self, content: Content) -> Content:
        context = self.simulation.context
        dataset, loss = context.population(content["seed"]).dataset, read_loss(content["loss"])
        rows = content["rows"].to(context.device)
        return context.evaluator.test(content["models"].to(context.device), dataset, rows, loss)


def task_content(task: Task) -> Content:
    """Return a task as it travels, without its clients, and with its digest."""
    algorithm = algorithm_table(task.algorithm)
    return {
        "about": [task.federation, task.seed, task.round],
        "parameters": task.parameters,
        "loss": asdict(task.loss),
        "algorithm": algorithm,
        "vectors": task.vectors,
        "registered": task.registered,
        "rate": task.rate,
        "digest": digest_of_task(task, algorithm),
    }


def read_task(table: Content) -> Task:
    """Return a task; refuse one that is not, number by number, the one that rank 0 knows."""
    federation, seed, round = table["about"]
    task = Task(
        *(federation, seed, round, (), table["parameters"], read_loss(table["loss"])),
        algorithm=validated(AlgorithmSettings, table["algorithm"], "algorithm").made(),
        vectors=table["vectors"],
        registered=table["registered"],
        rate=table["rate"],
    )
    if digest_of_task(task, algorithm_table(task.algorithm)) != table["digest"]:
        raise UserError(
            f"round {round} of {in_words(federation)}: the model, the loss or the algorithm here is not the one "
            "of rank 0; allowed: the same program and the same code of your own on all ranks"
        )
    return task


def read_loss(table: Content) -> LossState:
    """Return a loss that travelled as a table."""
    weights = table["class_weights"]
    return LossState(table["name"], None if weights is None else tuple(weights), table["shape"], table["scale"])


SLACK = 1.1
"""Whole federations go to one rank each where that takes at most so many times as long: no sum is then sent around."""

Unit = tuple[tuple[int, ...], int]
"""What is given to one rank as a whole: some jobs, and their steps."""


def share_out(steps: Sequence[Mapping[int, int]], ranks: int) -> list[list[int]]:
    """Give the jobs of tasks to ranks; `steps` are those of each task's jobs. Each rank's jobs ascend."""
    together: list[Unit] = [(tuple(jobs), sum(jobs.values())) for jobs in steps]
    apart: list[Unit] = [((job,), count) for jobs in steps for job, count in jobs.items()]
    split, longest = _dealt(apart, ranks)
    if len(steps) > 1:
        unsplit, longest_unsplit = _dealt(together, ranks)
        if longest_unsplit <= SLACK * longest:
            split = unsplit
    return [sorted(job for jobs, _ in units for job in jobs) for units in split]


def _dealt(units: Sequence[Unit], ranks: int) -> tuple[list[list[Unit]], int]:
    """Give each unit, longest first, to the rank that has least; returns also the most steps that a rank has."""
    given: list[list[Unit]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-unit[1], unit[0])):
        load, rank = heapq.heappop(loads)
        given[rank].append(unit)
        heapq.heappush(loads, (load + unit[1], rank))
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


@dataclass(eq=False)
class Held:
    """A training whose models lie on the ranks, as long as somebody here knows of it."""

    training: int
    tasks: Sequence[Task]


class RanksEngine:
    """Trains cohorts by several processes; this one is rank 0.

    `experiment` is the document from which the other ranks build the same simulation. Each rank trains its share of
    the jobs with the engine that rank 0 has chosen, in steps of the algorithm's own where it takes these itself.
    """

    def __init__(self, ranks: Ranks, simulation: Simulation, experiment: Mapping[str, Any]) -> None:
        self.ranks, self.context = ranks, simulation.context
        _ = self.context.engine
        # The share of this rank knows nothing of the others: what it does, it does alone.
        alone = copy.copy(simulation)
        alone.context = copy.copy(simulation.context)
        self._share = Share(alone, SimulationServer(alone))
        self._same_data: set[int] = set()
        self._trainings = 0
        self.freed: list[int] = []
        """Trainings of which nobody knows any more; the ranks are told with the next one."""
        described = {"experiment": dict(experiment), "versions": own_versions()}
        self.ask("assemble", dict.fromkeys(self._others, described))
        simulation.context.make_evaluator = lambda setup: RankedEvaluator(setup, self)
        simulation.context.leader = self

    @property
    def _others(self) -> range:
        return range(1, self.ranks.count)

    def ask(self, command: str, contents: Mapping[int, Content]) -> Mapping[int, Content]:
        """Have ranks do a command, each with what it is given; returns their answers by rank."""
        return self.ranks.ask(command, contents, self._share.answer)

    def ask_all(self, command: str, contents: Sequence[Content], common: Content) -> Mapping[int, Content]:
        """Have all ranks do a command, each with what it is given and all with what is common to them."""
        return self.ranks.ask(command, dict(enumerate(contents)), self._share.answer, common)

    def _check_data(self, seed: int) -> None:
        """Refuse ranks whose data are not those of rank 0."""
        own = self._share.answer("data", {"seed": seed})
        for rank, other in self.ask("data", {rank: {"seed": seed} for rank in self._others}).items():
            for part, value in own.items():
                if other.get(part) != value:
                    raise UserError(
                        f"rank {rank}: its data differ from those of rank 0 in {part} (seed {seed}); allowed: the same "
                        "files on all machines"
                    )
        self._same_data.add(seed)

    def train(self, cohort: Cohort, out: torch.Tensor) -> Floats:
        """Train a cohort and bring its models here."""
        models, losses = self.trained(cohort)
        for number, each in enumerate(models):
            jobs, _ = cohort.jobs(number)
            for span, part in each.blocks():
                out[jobs, span] = part.to(out.device)
        return losses

    def trained(self, cohort: Cohort) -> tuple[list[DenseModels], Floats]:
        """Train a cohort; return the models of each task, which stay where they were trained, and all losses."""
        for seed in {task.seed for task in cohort.tasks} - self._same_data:
            self._check_data(seed)
        counts = cohort.counts.tolist()
        numbers = range(len(cohort.tasks))
        slices = [cohort.jobs(number)[0] for number in numbers]
        shares = share_out(
            [{job: counts[job] for job in range(len(cohort))[each]} for each in slices], self.ranks.count
        )
        self._trainings += 1
        common = {
            "training": self._trainings,
            "free": self.freed,
            "engine": self.context.engine.settled(cohort),
            "tasks": [task_content(task) for task in cohort.tasks],
            "loss": asdict(cohort.loss),
            "descent": asdict(cohort.descent),
        }
        answers = self.ask_all("train", [_given(cohort, jobs) for jobs in shares], common)
        self.freed = []
        losses, places = np.zeros(len(cohort)), [(0, 0)] * len(cohort)
        for rank, jobs in enumerate(shares):
            losses[jobs] = answers[rank]["losses"]
            for row, job in enumerate(jobs):
                places[job] = rank, row
        if cohort.algorithm.by_hand:
            told = {key: held for rank in answers for key, held in answers[rank]["state"].items()}
            cohort.kept.restore({**cohort.kept.snapshot(), **told})
        held = Held(self._trainings, cohort.tasks)
        weakref.finalize(held, _note_free, weakref.ref(self), held.training)
        frozen = [self.context.frozen(task.algorithm) for task in cohort.tasks]
        return [RankedModels(self, held, number, places[slices[number]], frozen[number]) for number in numbers], losses

    def close(self) -> None:
        """Let the other ranks go of their simulation."""
        if not self.ranks.broken:
            with suppress(RankLost):  # what went wrong first is what is reported
                self.ask("release", dict.fromkeys(self._others))


def _note_free(engine: weakref.ref[RanksEngine], training: int) -> None:
    if (known := engine()) is not None:
        known.freed.append(training)


def _given(cohort: Cohort, jobs: Sequence[int]) -> Content:
    """Return what a rank needs of a cohort to train some of its jobs, beside the tasks."""
    mine = cohort.take(jobs)
    extra: list[torch.Tensor] = []
    origins: dict[int, int] = {}
    for origin in np.unique(mine.origin).tolist():
        start = cohort.starts[origin]
        same = next((number for number, task in enumerate(cohort.tasks) if task.parameters is start), None)
        origins[origin] = len(cohort.tasks) + len(extra) if same is None else same
        extra += [start] if same is None else []
    origin = np.array([origins[each] for each in mine.origin.tolist()], dtype=np.int64)
    state: dict[str, torch.Tensor] | None = None
    if cohort.algorithm.by_hand:
        whose = {(cohort.tasks[mine.task[job]].federation, mine.name(job)) for job in range(len(mine))}
        state = {key: each for key, each in cohort.kept.snapshot().items() if tuple(json.loads(key)[1:3]) in whose}
    return {
        "jobs": np.stack([mine.task, mine.client, origin], axis=1),
        "starts": torch.stack(extra) if extra else None,
        "corrections": mine.corrections,
        "state": state,
    }


class RankedModels(DenseModels):
    """Whole local models, each on the rank that trained it.

    Sums, distances and tests are done there, and only what comes of them travels. Sums are added up in the order of
    the ranks. Whoever asks for `models` gets all of them into the memory of this process, once a round.
    """

    at_hand = False

    def __init__(
        self,
        lead: RanksEngine,
        held: Held,
        number: int,
        places: Sequence[tuple[int, int]],
        frozen: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Name the rank and the row there of each client; `number` is that of the task in its training."""
        object.__setattr__(self, "frozen", frozen)
        self._lead, self._held, self._number, self._places = lead, held, number, tuple(places)
        self._received = held.tasks[number].parameters.to(lead.context.device)

    @cached_property
    def models(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All models, copied into this process."""
        found = self._lead.context.matrix(len(self._places))
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
        answers = self._asked("tested", seed=self._held.tasks[self._number].seed)
        order = np.argsort([client for clients, _ in answers for client in clients])
        return ServerTest.joined([ServerTest(**found) for _, found in answers], order)

    def here(self) -> DenseModels:
        return DenseModels(self.models, self.frozen)

    def select(self, keep: Sequence[int]) -> RankedModels:
        places = [self._places[place] for place in keep]
        return RankedModels(self._lead, self._held, self._number, places, self.frozen)

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
                "task": [self._held.training, self._number],
                "rows": np.array([self._places[client][1] for client in mine], dtype=np.int64),
                **({} if weights is None else {"weights": weights[rank]}),
            }
            for rank, mine in clients.items()
        }
        answers = self._lead.ask(command, contents)
        return [(clients[rank], answers[rank]) for rank in clients]

    def _in_order(self, answers: Sequence[tuple[list[int], Content]], kind: Any) -> NDArray[Any]:
        found = np.zeros(len(self._places), dtype=kind)
        for clients, values in answers:
            found[clients] = values
        return found


FEWEST_ROWS = 256
"""Rows from which on tests are shared out: on fewer, a model is tested sooner than it is sent."""


class RankedEvaluator(Evaluator):
    """Tests models on rows that the ranks share among them; on few rows this process does it alone."""

    def __init__(self, setup: TrainingSetup, lead: RanksEngine) -> None:
        super().__init__(setup)
        self._lead = lead

    def test(
        self, models: torch.Tensor, dataset: DeviceDataset, rows: torch.Tensor, loss: LossState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = self._lead.ranks.count
        if len(rows) < max(count, FEWEST_ROWS):
            return super().test(models, dataset, rows, loss)
        common = {"models": models, "loss": asdict(loss), "seed": self._lead.context.seed_of(dataset)}
        contents = [{"rows": part} for part in rows.tensor_split(count)]
        answers = self._lead.ask_all("test", contents, common)
        parts = [answers[rank] for rank in range(count)]
        device = self.setup.device
        return (
            torch.cat([predictions.to(device) for predictions, _ in parts], dim=1),
            torch.cat([losses.to(device) for _, losses in parts], dim=1),
        )
