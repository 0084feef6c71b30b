"""The jobs of a round, from one task or from many, in the form in which engines take them; the schedule of a stack.

A cohort carries what its clients keep from round to round: models of those that do not keep the protocol, and vectors
of an algorithm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base import randomness
from steelyard.clients.local.population import DeviceDataset, DevicePopulation, Ints, as_numbers
from steelyard.data.dataset import HONEST, Behaviour
from steelyard.learning.descent import Descent
from steelyard.learning.settings import TrainingSettings
from steelyard.learning.training import batch_limit, chance_of, orders
from steelyard.messages.algorithm import Algorithm, Part, Vectors
from steelyard.messages.updates import LossState, Task


class Kept:
    """All that the clients of a simulation keep; part of every checkpoint, so that a resume gives the same bits.

    A vector that is held is never written into: whoever keeps a copy of the table can tell what has changed since.
    `room` is how many bytes of it may lie on a GPU.
    """

    def __init__(self, room: int = 0) -> None:
        self._room = room
        self._held: dict[tuple[str, str, str | int, str], torch.Tensor] = {}
        """The model ("own", federation, client) that a client which ignores the global one goes on from; the global
        model ("global", federation, round), as far back as a stale client looks; ("vector", federation, client, name).
        """

    def _past(self, federation: str) -> dict[int, torch.Tensor]:
        """Return the global models of earlier rounds."""
        return {int(key[2]): held for key, held in self._held.items() if key[:2] == ("global", federation)}

    def receive(self, task: Task, behaviours: Mapping[str, Behaviour]) -> None:
        """Remember the global model of a task for clients that will start from it later; call it before `start`."""
        reach = max((max(how.stale, how.pretends) for how in behaviours.values()), default=0)
        if not reach:
            return
        self._held["global", task.federation, task.round, ""] = task.parameters.detach().cpu().clone()
        for round in self._past(task.federation):
            # A later round is one that a resumed run does again.
            if not task.round - reach <= round <= task.round:
                del self._held["global", task.federation, round, ""]

    def start(self, task: Task, client: str, behaviours: Mapping[str, Behaviour]) -> torch.Tensor:
        """Return the model that a client starts from; the one it received unless it has reasons of its own."""
        how = behaviours.get(client, HONEST)
        if how.own_model:
            return self._held.get(("own", task.federation, client, ""), task.parameters)
        if how.stale:
            past = self._past(task.federation)
            return past.get(task.round - how.stale, past[min(past)])
        return task.parameters

    def pretended(self, task: Task, client: str, how: Behaviour) -> torch.Tensor:
        """Return what a free rider sends: the model it received, or, of colluders, that with its last step once more.

        Each adds noise of a tenth of the step's size (disguised free riders: Y. Fraboni, R. Vidal, M. Lorenzi,
        "Free-rider Attacks on Model Aggregation in Federated Learning", AISTATS 2021).
        """
        before = self._held.get(("global", task.federation, task.round - 1, "")) if how.pretends else None
        if before is None:
            return task.parameters
        step = task.parameters - before.to(task.parameters.device)
        chance = randomness.generator(task.seed, task.round, client, "attack/free-rider")
        noise = torch.from_numpy(chance.standard_normal(len(step), dtype=np.float32)).to(step.device)
        return task.parameters + step + 0.1 * step.square().mean().sqrt() * noise

    def keep_model(self, task: Task, client: str, model: torch.Tensor, behaviours: Mapping[str, Behaviour]) -> None:
        """Keep the model that a client ended with, where it will go on from it."""
        if behaviours.get(client, HONEST).own_model:
            self._held["own", task.federation, client, ""] = model.detach().cpu().clone()

    def vectors(
        self, algorithm: Algorithm, owners: Sequence[tuple[str, str]], received: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return what clients, each named behind its federation, keep: [clients, parameters or 1] by name.

        `received` [clients, parameters] is what they received: a model of their own begins as that.
        """

        def stacked(name: str) -> torch.Tensor:
            fresh = algorithm.fresh(name, received)
            held = [self._held.get(("vector", *owner, name)) for owner in owners]
            if not any(each is not None for each in held):
                return fresh.clone()
            return torch.stack(
                [new if each is None else each.to(new.device) for each, new in zip(held, fresh, strict=True)]
            )

        return {name: stacked(name) for name in algorithm.keeps}

    def keep_vectors(self, owners: Sequence[tuple[str, str]], vectors: Vectors) -> None:
        """Keep what clients ended with, [clients, parameters] by name; on their device while there is room."""
        for name, rows in vectors.items():
            keys = [("vector", *owner, name) for owner in owners]
            if rows.is_cuda:
                mine = set(keys)
                others = (held.nbytes for key, held in self._held.items() if held.is_cuda and key not in mine)
                rows = rows if sum(others) + rows.nbytes <= self._room else rows.cpu()
            for key, row in zip(keys, rows.detach(), strict=True):
                self._held[key] = row.clone()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return all of it by name: its kind, then federation, and client or round, and vector."""
        named = {json.dumps([part for part in key if part != ""]): held for key, held in self._held.items()}
        return dict(sorted(named.items()))

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Hold what `snapshot` returned and nothing else; entries of other kinds are passed over."""
        self._held.clear()
        for key, held in state.items():
            kind, federation, whose, *name = json.loads(key)
            if kind in ("own", "global", "vector"):
                self._held[kind, federation, whose, name[0] if name else ""] = held.cpu()


@dataclass(frozen=True, eq=False)
class Cohort:
    """Clients to be trained together: they share the data set and the form of the loss, not the starting model."""

    tasks: tuple[Task, ...]
    populations: tuple[DevicePopulation, ...]
    """The population of each task's seed, as it trains this round."""
    training: TrainingSettings
    joined: bool
    """Whether the network normalises over batches, so that a last batch of one row is joined to the one before."""
    loss: LossState
    """Form of the loss; the class weights are per task."""
    descent: Descent
    """How every job takes a step."""
    task: Ints
    """For each job, the position of its task."""
    client: Ints
    """For each job, the position of its client in the task's population."""
    starts: tuple[torch.Tensor, ...]
    """Distinct starting models."""
    origin: Ints
    """For each job, which starting model it trains from."""
    corrections: torch.Tensor | None = None
    """[jobs, parameters]: each job's correction, where the descent is corrected."""
    kept: Kept = field(default_factory=Kept)
    """What clients keep, these and all others."""
    part: Part = "everything"
    """The part of the model that moves."""
    before: int = 0
    """Trainings of these jobs in this round before this one: each draws anew."""

    def __len__(self) -> int:
        return len(self.task)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the first job; where it takes the steps itself, that of all."""
        return self.tasks[self.task[0] if len(self) else 0].algorithm

    @property
    def dataset(self) -> DeviceDataset:
        return self.populations[0].dataset

    @property
    def sizes(self) -> Ints:
        """Number of training samples of each job."""
        found = np.zeros(len(self), dtype=np.int64)
        for number, population in enumerate(self.populations):
            mine = self.task == number
            found[mine] = population.sizes[self.client[mine]]
        return found

    @property
    def counts(self) -> Ints:
        """Number of steps of each job."""
        return step_counts(self.sizes, self.training, joined=self.joined)

    def name(self, job: int) -> str:
        return self.populations[self.task[job]].names[self.client[job]]

    def behaviour(self, job: int) -> Behaviour:
        """Return how the client of a job departs from the protocol."""
        behaviours = self.populations[self.task[job]].behaviours
        return behaviours.get(self.name(job), HONEST) if behaviours else HONEST

    def jobs(self, number: int) -> tuple[slice, list[str]]:
        """Return where the jobs of a task stand, and the names of their clients; jobs of one task stand together."""
        begin, end = np.searchsorted(self.task, (number, number + 1)).tolist()
        return slice(begin, end), [self.name(job) for job in range(begin, end)]

    @property
    def owners(self) -> list[tuple[str, str]]:
        """The federation and the client of each job."""
        return [(self.tasks[number].federation, self.name(job)) for job, number in enumerate(self.task)]

    def vectors(self, received: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the clients kept, [jobs, parameters or 1] by name; see `Kept.vectors`."""
        return self.kept.vectors(self.algorithm, self.owners, received)

    def keep(self, vectors: Vectors) -> None:
        """Let the clients keep what they ended with, [jobs, parameters] by name."""
        self.kept.keep_vectors(self.owners, vectors)

    def of_task(self, number: int) -> Cohort:
        """Return the jobs of one task."""
        begin, end = np.searchsorted(self.task, (number, number + 1)).tolist()
        return self.take(range(begin, end))

    def begin_at(self, models: torch.Tensor) -> Cohort:
        """Return the same jobs, each beginning at its row of models [jobs, parameters]."""
        return replace(self, starts=tuple(models.unbind()), origin=np.arange(len(self)))

    def take(self, jobs: Sequence[int] | Ints) -> Cohort:
        """Return some of the jobs, in the order asked for."""
        picked = np.asarray(jobs, dtype=np.int64)
        corrections = self.corrections
        if corrections is not None:
            corrections = corrections[torch.from_numpy(picked).to(corrections.device)]
        mine = {"task": self.task[picked], "client": self.client[picked], "origin": self.origin[picked]}
        return replace(self, **mine, corrections=corrections)

    def samples(self, job: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features and labels of one job."""
        population = self.populations[self.task[job]]
        begin = int(population.begins[self.client[job]])
        end = begin + int(population.sizes[self.client[job]])
        return population.dataset.gather(population.rows[begin:end]), population.labels[begin:end]

    def order(self, job: int) -> NDArray[np.int64]:
        """Return the order in which one job visits its samples: [epochs, size]."""
        task = self.tasks[self.task[job]]
        size = int(self.populations[self.task[job]].sizes[self.client[job]])
        return orders(task.seed, task.round, [self.name(job)], size, self.training)[0]

    def chance(self, job: int) -> int:
        """Return the seed of layers that draw, and the key of the stream of draws by name, in this training."""
        task = self.tasks[self.task[job]]
        return chance_of(task.seed, task.round, self.name(job), self.before)

    def loss_of(self, job: int) -> LossState:
        """Return the loss of one job with its class weights."""
        return replace(self.loss, class_weights=self.tasks[self.task[job]].loss.class_weights)

    def class_weights(self) -> torch.Tensor | None:
        """Return κ of every job, [jobs, classes], or None where every class of every job counts 1."""
        given = [task.loss.class_weights for task in self.tasks]
        if all(weights is None for weights in given):
            return None
        width = max(len(weights) for weights in given if weights is not None)
        table = torch.tensor([weights or (1.0,) * width for weights in given], dtype=torch.float32)
        return table[torch.from_numpy(self.task)].to(self.dataset.device)

    def keys(self, device: torch.device) -> torch.Tensor:
        """Return the key of the stream from which each job's dropout by name draws, [jobs]."""
        return torch.tensor([self.chance(job) for job in range(len(self))], dtype=torch.int64, device=device)

    def start(self, device: torch.device) -> torch.Tensor:
        """Return the starting model of every job, stacked: [jobs, parameters]."""
        return self.spread(self.distinct(device)).contiguous()

    def distinct(self, device: torch.device) -> torch.Tensor:
        """Return the starting models that these jobs have among them, each once; `spread` gives every job its own."""
        return torch.stack([self.starts[origin].to(device) for origin in np.unique(self.origin)])

    def spread(self, distinct: torch.Tensor) -> torch.Tensor:
        """Return the row of every job: a view where all begin alike."""
        if len(distinct) == 1:
            return distinct.expand(len(self), -1)
        places = np.unique(self.origin, return_inverse=True)[1]
        return distinct[torch.from_numpy(places).to(distinct.device)]


# The schedule: which samples every client of a stack uses in every step, and the step that is being taken.


@dataclass(frozen=True, eq=False)
class Schedule:
    """Steps of stacked clients. Clients stand by falling number of steps, so those still at work are a prefix."""

    rows: torch.Tensor
    """[steps, clients, batch]: rows of the data set; padding repeats a row of the client."""
    labels: torch.Tensor
    """[steps, clients, batch]; a mask or several labels have one axis more."""
    weights: torch.Tensor
    """[steps, clients, batch]: κ of the label over the size of the client's batch; 0 for padding."""
    report: torch.Tensor
    """[steps, clients, batch]: κ over the client's number of samples in its last epoch, else 0."""
    valid: torch.Tensor
    """[steps, clients, batch]: whether this is a sample and no padding; κ may be 0 for a sample, too."""
    active: Ints
    """[steps]: how many clients at the front still have work."""

    @property
    def steps(self) -> int:
        return len(self.active)


@dataclass(frozen=True, eq=False)
class CurrentStep:
    """The step that the first `busy` clients of a stack are taking, and its samples.

    Where `number` is a counter on the device, the same object serves every step of a captured graph.
    """

    dataset: DeviceDataset
    tables: Schedule
    number: int | torch.Tensor
    losses: torch.Tensor
    """[clients]: the losses of the last epoch so far."""
    busy: int
    keys: torch.Tensor | None
    """[clients]: the streams from which draws by name come; None where nothing is drawn."""
    common: torch.Tensor | None = None
    """One model that all clients still hold, in the order of the step: its forward is one plain product."""

    @property
    def samples(self) -> int:
        """Samples of each client, padding included."""
        return self.tables.rows.shape[2]

    @property
    def counter(self) -> torch.Tensor:
        """The number of the step, on the device."""
        assert isinstance(self.number, torch.Tensor)
        return self.number

    def now(self, table: torch.Tensor) -> torch.Tensor:
        """Return this step's part of a table [steps, clients, ...]."""
        if isinstance(self.number, int):
            return table[self.number, : self.busy]
        return table.index_select(0, self.number)[0, : self.busy]

    @property
    def taken(self) -> torch.Tensor:
        """The samples of this step as they lie in the data set."""
        return self.dataset.take(self.now(self.tables.rows))

    @property
    def features(self) -> torch.Tensor:
        """The samples of this step as they are trained on: where images are changed at random, as changed now."""
        features = as_numbers(self.taken)
        return features if self.dataset.augment is None else self.dataset.augment(features, self.chance)

    @property
    def labels(self) -> torch.Tensor:
        return self.now(self.tables.labels)

    @property
    def weights(self) -> torch.Tensor:
        return self.now(self.tables.weights)

    @property
    def valid(self) -> torch.Tensor:
        return self.now(self.tables.valid)

    @property
    def chance(self) -> torch.Tensor:
        """The clients' streams and the number of the step, [clients, 2]: what draws by name come from."""
        assert self.keys is not None  # who trains with draws gives the streams
        mine, number = self.keys[: self.busy], self.number
        steps = torch.full_like(mine, number) if isinstance(number, int) else number.expand_as(mine)
        return torch.stack([mine, steps], dim=1)

    def add(self, each: torch.Tensor) -> None:
        """Count these samples' losses where they are reported; padding may hold anything."""
        report = self.now(self.tables.report)
        self.losses[: self.busy] += torch.where(report > 0, each * report, torch.zeros_like(each)).sum(dim=1)


def step_counts(sizes: Ints, training: TrainingSettings, *, joined: bool = False) -> Ints:
    """Return how many steps clients of these sizes take in a round.

    `joined`: the network normalises over batches, so a last batch of one row is joined to the one before.
    """
    if training.updates is not None or training.batch_size == "full":
        return np.full(len(sizes), training.updates or training.epochs, dtype=np.int64)
    steps = -(-sizes // training.batch_size)
    single = joined & (sizes % training.batch_size == 1) & (steps > 1)
    return training.epochs * (steps - single)


def longest_first(cohort: Cohort) -> NDArray[np.int64]:
    """Return the jobs by falling number of steps and samples; jobs that are alike keep their order."""
    return np.lexsort((np.arange(len(cohort)), -cohort.sizes, -cohort.counts))


def schedule(cohort: Cohort) -> Schedule:
    """Lay out the steps of a cohort whose jobs stand by falling number of steps."""
    sizes, counts, device = cohort.sizes, cohort.counts, cohort.dataset.device
    training, joined = cohort.training, cohort.joined
    batch = max(_widest(training, int(size), joined) for size in np.unique(sizes))
    alike = _alike(cohort, sizes)
    steps = int(counts.max())
    # What the host makes goes to the device once: the order of the samples for each job, shares for each size only.
    order = np.zeros((len(cohort), steps, batch), dtype=np.int64)
    shares = np.zeros((2, steps, len(alike), batch), dtype=np.float32)
    begins, kind = np.zeros(len(cohort), dtype=np.int64), np.zeros(len(cohort), dtype=np.int64)
    for number, (mine, jobs, size, visited) in enumerate(alike):
        begins[jobs], kind[jobs] = mine, number
        passes = -(-size // batch_limit(training, size)) - _single(training, size, joined)
        _fill(order, shares[:, :, number], jobs, visited, batch_limit(training, size), passes, int(counts[jobs[0]]))
    positions = (sent(order, device) + sent(begins, device)[:, None, None]).transpose(0, 1).contiguous()
    scale, report = sent(shares, device).index_select(2, sent(kind, device)).unbind()
    rows, labels = _look_up(cohort, positions)
    kappa = _kappa(cohort, labels)
    valid = scale > 0
    if labels.is_floating_point() and labels.dim() == positions.dim():
        # Padding has no time, for losses that hold the samples of a batch against each other.
        labels = labels * valid
    active = (counts[None, :] > np.arange(steps)[:, None]).sum(axis=1)
    return Schedule(rows, labels, scale * kappa, report * kappa, valid, active)


def sent(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array on a device, without waiting for what the device is doing."""
    found = torch.from_numpy(array)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def _single(training: TrainingSettings, size: int, joined: bool) -> bool:
    """Whether a pass ends with one row that is joined to the batch before."""
    batch = batch_limit(training, size)
    return joined and size > batch and size % batch == 1


def _widest(training: TrainingSettings, size: int, joined: bool) -> int:
    """Return how many samples the largest batch of a client holds."""
    return batch_limit(training, size) + _single(training, size, joined)


def _alike(cohort: Cohort, sizes: Ints) -> list[tuple[Ints, Ints, int, NDArray[np.int64]]]:
    """Jobs of one task and one size at a time, with the order in which they visit their samples."""
    found: list[tuple[Ints, Ints, int, NDArray[np.int64]]] = []
    for number, task in enumerate(cohort.tasks):
        mine = np.flatnonzero(cohort.task == number)
        population = cohort.populations[number]
        for size in np.unique(sizes[mine]):
            jobs = mine[sizes[mine] == size]
            names = [population.names[position] for position in cohort.client[jobs]]
            order = orders(task.seed, task.round, names, int(size), cohort.training)
            found.append((population.begins[cohort.client[jobs]], jobs, int(size), order))
    return found


def _fill(
    order: NDArray[np.int64],
    shares: NDArray[np.float32],
    jobs: Ints,
    visited: NDArray[np.int64],
    batch: int,
    steps: int,
    taken: int,
) -> None:
    """Write the batches of jobs of one size, `steps` of them a pass: which samples, and the share of each."""
    _, passes, size = visited.shape
    # All batches of a pass but the last are whole; the last has what is left.
    whole = (steps - 1) * batch
    widest = max(batch, size - whole)
    padded = np.zeros((len(jobs), passes, steps, widest), dtype=np.int64)
    padded[:, :, :-1, :batch] = visited[:, :, :whole].reshape(len(jobs), passes, steps - 1, batch)
    padded[:, :, -1, : size - whole] = visited[:, :, whole:]
    order[jobs, :taken, :widest] = padded.reshape(len(jobs), passes * steps, widest)[:, :taken]
    valid = np.zeros((steps, widest), dtype=np.float32)
    valid[:-1, :batch] = 1
    valid[-1, : size - whole] = 1
    scale, report = shares
    scale[:taken, :widest] = np.tile(valid / valid.sum(axis=1, keepdims=True), (passes, 1))[:taken]
    # The last pass, or what of it the steps allow.
    last = np.tile(valid, (passes, 1))[:taken][-steps:]
    report[taken - len(last) : taken, :widest] = last / last.sum()


def _look_up(cohort: Cohort, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn positions in population's list of samples into rows of the data set and the labels trained on."""
    populations = {id(population): population for population in cohort.populations}
    if len(populations) == 1:
        population = cohort.populations[0]
        return population.rows[positions], population.labels[positions]
    rows = torch.empty_like(positions)
    kind = cohort.populations[0].labels
    labels = torch.empty((*positions.shape, *kind.shape[1:]), dtype=kind.dtype, device=positions.device)
    for population in populations.values():
        mine = np.flatnonzero([cohort.populations[t] is population for t in cohort.task])
        jobs = torch.from_numpy(mine).to(positions.device)
        rows[:, jobs] = population.rows[positions[:, jobs]]
        labels[:, jobs] = population.labels[positions[:, jobs]]
    return rows, labels


def _kappa(cohort: Cohort, labels: torch.Tensor) -> torch.Tensor:
    table = cohort.class_weights()
    if table is None:
        return torch.ones((), device=labels.device)
    jobs = torch.arange(len(cohort), device=labels.device)[None, :, None]
    return table[jobs, labels.long()]
