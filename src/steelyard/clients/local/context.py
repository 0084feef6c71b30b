"""What a simulation and its server share: populations on the device, model, settings; cohorts are made here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from steelyard.algorithms.flexlora import cut_to_ranks
from steelyard.base.errors import UserError, fault
from steelyard.clients.local.cohort import Cohort, Kept
from steelyard.clients.local.engines.choice import ChosenEngine
from steelyard.clients.local.engines.engine import Leader, TrainingSetup
from steelyard.clients.local.engines.records import RecordsEngine
from steelyard.clients.local.evaluator import Evaluator
from steelyard.clients.local.hardware import MatrixPool, device_of, memory_of, threads_of
from steelyard.clients.local.population import DeviceDataset, DevicePopulation, Ints
from steelyard.clients.local.settings import ComputeSettings
from steelyard.data.dataset import Population
from steelyard.learning import losses, parameters
from steelyard.learning.descent import Descent
from steelyard.learning.models import Factory
from steelyard.learning.parameters import Layout, for_training
from steelyard.learning.records import RecordNoise
from steelyard.learning.settings import NAMES, ModelSettings, TrainingSettings, no_part
from steelyard.learning.training import seeded, train_client
from steelyard.messages.algorithm import Algorithm
from steelyard.messages.updates import Failure, Floats, LossState, Task

COUNTS = 200_000
"""Numbers of samples by client and class that a run's record holds at most."""

Populations = Mapping[int, Population] | Callable[[int], Population]


class SimulationContext:
    """Holds populations by seed, puts each data set on the device once, and knows how much memory there is."""

    def __init__(
        self,
        populations: Populations,
        model: ModelSettings | Factory,
        training: TrainingSettings,
        compute: ComputeSettings,
        rounds: int = 0,
        records: RecordNoise | None = None,
    ) -> None:
        self.rounds, self.records = rounds, records
        self._sources = populations
        self.model = model
        self.training = training
        self.compute = compute
        self.device = device_of(compute)
        if compute.threads is not None:
            torch.set_num_threads(compute.threads)
        self._populations: dict[int, DevicePopulation] = {}
        self._datasets: dict[int, DeviceDataset] = {}
        self._pool: MatrixPool | None = None
        self._checked_losses: set[str] = set()
        self.make_evaluator: Callable[[TrainingSetup], Evaluator] = Evaluator
        """Makes what tests models; another one may share tests out."""
        self._evaluator: Evaluator | None = None
        self._engine: ChosenEngine | RecordsEngine | None = None
        self.leader: Leader | None = None
        """What shares cohorts out to other processes, where this one leads some."""
        self.kept = Kept(memory_of(compute, self.device) // 4 if self.device.type == "cuda" else 0)
        """What clients keep from round to round."""
        self._masks: dict[str, torch.Tensor] = {}
        self._frozen: dict[str, tuple[tuple[int, int], ...]] = {}
        self._apart: dict[tuple[int, float], DevicePopulation] = {}

    def population(self, seed: int, held_back: float = 0.0) -> DevicePopulation:
        """Return the population of a seed, on the device; a share of its rows may be held back from training."""
        if held_back:
            if (seed, held_back) not in self._apart:
                self._apart[seed, held_back] = self.population(seed).holding_back(held_back, seed)
            return self._apart[seed, held_back]
        if seed not in self._populations:
            source = self._source(seed)
            key = id(source.dataset)
            if key not in self._datasets:
                self._datasets[key] = DeviceDataset.of(source.dataset, self.device)
            self._populations[seed] = DevicePopulation(source, self._datasets[key])
        return self._populations[seed]

    def seed_of(self, dataset: DeviceDataset) -> int:
        """Return a seed whose population is made of a data set that lies on the device."""
        return next(seed for seed, population in self._populations.items() if population.dataset is dataset)

    def _source(self, seed: int) -> Population:
        if not isinstance(self._sources, Mapping):
            return self._sources(seed)
        if seed not in self._sources:
            raise UserError(f"seed: got {seed}; there is no population for it, only for {sorted(self._sources)}")
        return self._sources[seed]

    def notes(self) -> str:
        """Return what reading and partitioning had to do that the user should know, each note once."""
        notes = (note for population in self._populations.values() for note in population.source.notes)
        return "; ".join(dict.fromkeys(notes))

    def flaws(self) -> dict[str, dict[str, list[str]]]:
        """Return by seed and client what makes clients worth less, in words; seeds without flaws are left out."""
        known = sorted(self._populations.items())
        return {
            str(seed): {name: list(words) for name, words in sorted(population.source.flaws.items())}
            for seed, population in known
            if population.source.flaws
        }

    def tested(self) -> dict[str, tuple[int, int]]:
        """Return by seed how many clients test the models, of how many that could; without seeds in which all do."""
        return {
            str(seed): (len(population.tests.clients), population.source.testable)
            for seed, population in sorted(self._populations.items())
            if population.source.testable is not None
        }

    def labels(self) -> dict[str, dict[str, list[int]]]:
        """Return by seed and client how many training samples it has of each class; nothing for a regression.

        Seeds after which there would be more than `COUNTS` numbers are left out, so that the record stays small.
        """
        found: dict[str, dict[str, list[int]]] = {}
        left = COUNTS
        for seed, population in sorted(self._populations.items()):
            source = population.source
            left -= source.dataset.classes * len(source.clients)
            if source.dataset.classes and left >= 0:
                found[str(seed)] = source.label_counts()
        return found

    @cached_property
    def setup(self) -> TrainingSetup:
        """The model and how it is trained; built from the first population that is used."""
        if not self._populations:
            first = next(iter(self._sources)) if isinstance(self._sources, Mapping) else 0
            self.population(first)
        dataset = self._first_dataset()
        module = dataset.build(self.model, seed=0)
        layout = Layout.of(module)
        return TrainingSetup(
            module=module,
            layout=layout,
            training=self.training,
            classes=dataset.classes,
            device=self.device,
            precision=self.compute.precision,
            threads=threads_of(self.compute),
            memory=memory_of(self.compute, self.device),
            chunk=self.compute.chunk,
            rounds=self.rounds,
        )

    @property
    def evaluator(self) -> Evaluator:
        """What tests models; made when first needed."""
        if self._evaluator is None:
            self._evaluator = self.make_evaluator(self.setup)
        return self._evaluator

    @property
    def engine(self) -> ChosenEngine | RecordsEngine:
        """What trains cohorts; made when first needed, and chosen at the first cohort."""
        if self._engine is None and self.records is not None:
            self._engine = RecordsEngine(self.setup, self.records)
        elif self._engine is None:
            self._engine = ChosenEngine(self.setup, self.compute.engine)
        return self._engine

    def check_engine(self) -> None:
        """Refuse a loss or an engine that does not go with the data or the model."""
        loss, engine = self.loss(), self.engine
        if isinstance(engine, RecordsEngine):
            engine.check(loss, self._first_dataset())

    def use_engine(self, choice: str) -> None:
        """Train with the engine that another process has chosen."""
        if self.engine.choice != choice:
            self._engine = ChosenEngine(self.setup, choice)

    def first_losses(self, task: Task, clients: Ints) -> Floats:
        """Return the mean loss of the received model on the training samples of each client, class weights counted."""
        population = self.population(task.seed)
        sizes, begins = population.sizes[clients], population.begins[clients]
        spans = [np.arange(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
        samples = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *spans])).to(self.device)
        rows, labels = population.rows[samples], population.labels[samples]
        received = task.parameters[None].to(self.device)
        outputs = self.evaluator.outputs(received, population.dataset, rows)
        each = self.evaluator.losses(outputs, labels, self.loss(task.loss))[0]
        return np.array([float(part.mean()) for part in each.to(torch.float64).split(sizes.tolist())])

    def _first_dataset(self) -> DeviceDataset:
        return next(iter(self._populations.values())).dataset

    @property
    def outputs(self) -> int:
        """How many outputs the model has."""
        return self._first_outputs.shape[1]

    @cached_property
    def _first_outputs(self) -> torch.Tensor:
        """The model's outputs on the first samples, found by calling it."""
        dataset = self._first_dataset()
        rows = self._first_rows()
        mode = self.setup.module.training
        try:
            with torch.no_grad():
                outputs = self.setup.module.eval()(dataset.gather(rows).cpu())
        except UserError:
            raise
        except Exception as error:
            shape = tuple(dataset.features.shape[1:])
            tokens = dataset.features.dtype == torch.int64
            what = f"tokens from 0 to {int(dataset.features.max())} in rows" if tokens else "features"
            raise UserError(
                f"model.name: the model does not take {what} of shape {shape}: {type(error).__name__}: {error}"
            ) from error
        self.setup.module.train(mode)
        if not isinstance(outputs, torch.Tensor):
            raise UserError(
                f"model.name: the model returned {type(outputs).__name__}; allowed: one tensor [samples, outputs]"
            )
        if not outputs.is_floating_point():
            raise UserError("model.name: the model returned whole numbers; allowed: outputs before any choice of class")
        if outputs.dim() != 2 or len(outputs) != 2:
            raise UserError(f"model.name: the model returned shape {tuple(outputs.shape)}; allowed: [samples, outputs]")
        return outputs

    def _first_rows(self) -> torch.Tensor:
        """Two rows of the data set, or the only one twice: enough to see what a model or a loss gives.

        Of rows of tokens the one with the largest: a model may know too few.
        """
        dataset = self._first_dataset()
        most = dataset.features.flatten(1).amax(1).argmax() if dataset.features.dtype == torch.int64 else 0
        return (torch.arange(2, device=dataset.device) + most) % len(dataset.labels)

    def loss(self, state: LossState | None = None) -> LossState:
        """Return a loss, or the one of [training], with "auto" resolved for this data and model."""
        state = state or LossState()
        if state.name == "auto" and self.training.loss != "auto":
            state = LossState(self.training.loss, state.class_weights, state.shape, state.scale)
        classes, dataset = self.setup.classes, self._first_dataset()
        resolved = losses.resolve(state, classes, self.outputs, task=dataset.task, targets=dataset.outputs)
        if resolved.name not in self._checked_losses:
            labels = dataset.labels[self._first_rows()].cpu()
            losses.check_own(resolved, self._first_outputs, labels)
            if getattr(self.model, "name", self.model) not in NAMES:
                self._check_training(resolved)
            self._checked_losses.add(resolved.name)
        return resolved

    def _check_training(self, loss: LossState) -> None:
        """Train a copy of a user's model for one step: what it does wrong then is said before a run begins."""
        try:
            module = copy.deepcopy(self.setup.module)
        except Exception as error:  # whatever it holds besides its layers
            raise UserError(f"model.name: the model cannot be copied, as every engine must: {fault(error)}") from error
        layout, dataset = self.setup.layout, self._first_dataset()
        batch = 2 if self.training.batch_size == "full" else max(self.training.batch_size, 2)
        rows = torch.arange(batch, device=dataset.device) % len(dataset.labels)
        samples = dataset.gather(rows).cpu(), dataset.labels[rows].cpu(), np.arange(batch)[None]
        with torch.enable_grad():  # a node may be asked for tests first
            train_client(module, layout, layout.read(module), *samples, TrainingSettings(batch_size="full"), loss)

    def too_few(self, samples: int) -> str | None:
        """Say why a client with so many training samples cannot train; None where it can."""
        if not samples:
            return "no training samples"
        if samples < self._least_samples:
            return "1 training sample, and batch norm needs 2 in a batch"
        return None

    @cached_property
    def _least_samples(self) -> int:
        """How many samples a step of this model needs: 2 where batch norm has one value per sample, else 1."""
        if not self.setup.batch_norm:
            return 1
        module = for_training(copy.deepcopy(self.setup.module))
        try:
            with torch.no_grad(), seeded(torch.device("cpu"), 0):
                module(self._first_dataset().gather(self._first_rows()[:1]).cpu())
        except ValueError:  # what torch's batch norm says to a single value
            if self.training.batch_size == 1:
                raise UserError(
                    "training.batch_size: got 1 for a model with batch norm, which needs 2 samples in a batch; "
                    "allowed: 2 or more, or 'full'"
                ) from None
            return 2
        return 1

    def matrix(self, clients: int) -> torch.Tensor:
        """Return memory for the models of a cohort: on the device, else in main memory, else in a file.

        The memory field bounds what lies on the device; a file-backed matrix is read in as it is used, so rules that
        go over the models row by row or as one product keep working.
        """
        size = self.setup.layout.size
        if self.device.type == "cuda" and 4 * clients * size <= self.setup.memory // 3:
            return torch.empty((clients, size), device=self.device)
        if self._pool is None:
            limit = memory_of(self.compute if self.device.type == "cpu" else ComputeSettings(), torch.device("cpu"))
            self._pool = MatrixPool(limit // 2)
        return self._pool.matrix(clients, size)

    def groups(self, tasks: Sequence[Task]) -> list[list[int]]:
        """Indices of the tasks that can be trained in one stack: one data set, one form of the loss, one descent."""
        groups: dict[object, list[int]] = {}
        for index, task in enumerate(tasks):
            loss, dataset = self.loss(task.loss), self.population(task.seed).dataset
            key = (id(dataset), loss.name, loss.shape, loss.scale, self._descent(task))
            if task.algorithm.by_hand:
                key = (*key, task.algorithm)
            groups.setdefault(key, []).append(index)
        return list(groups.values())

    def cohort(self, tasks: Sequence[Task]) -> tuple[Cohort, list[list[Failure]]]:
        """Return the cohort of tasks that train in one stack, and by task who cannot train, with the reason."""
        at_work: dict[tuple[int, int, float], DevicePopulation] = {}
        failures: list[list[Failure]] = [[] for _ in tasks]
        starts: list[torch.Tensor] = [task.parameters for task in tasks]
        jobs: list[tuple[int, int, int]] = []
        populations: list[DevicePopulation] = []
        for number, task in enumerate(tasks):
            # Tasks of one seed and round share the population as it trains then.
            share = task.algorithm.held_back
            if (task.seed, task.round, share) not in at_work:
                whole = self.population(task.seed, share)
                at_work[task.seed, task.round, share] = whole.at_work(task.seed, task.round)
            population = at_work[task.seed, task.round, share]
            populations.append(population)
            self.kept.receive(task, population.behaviours)
            for name in sorted(task.clients):
                position = population.position.get(name)
                why = "not registered" if position is None else self.too_few(int(population.sizes[position]))
                if position is None or why is not None:
                    failures[number].append(Failure(name, why or ""))
                    continue
                start = self.kept.start(task, name, population.behaviours)
                jobs.append((number, position, number if start is task.parameters else len(starts)))
                if start is not task.parameters:
                    starts.append(start)
        table = np.array(jobs, dtype=np.int64).reshape(-1, 3)
        loss, descent = self.loss(tasks[0].loss), self._descent(tasks[0])
        form = LossState(loss.name, None, loss.shape, loss.scale)
        how = self.training, self.setup.batch_norm, form, descent
        made = (tuple(tasks), tuple(populations), *how, table[:, 0], table[:, 1], tuple(starts), table[:, 2])
        cohort = self._begun(Cohort(*made, kept=self.kept))
        return replace(cohort, corrections=self._corrections(cohort)) if descent.corrected else cohort, failures

    def _descent(self, task: Task) -> Descent:
        """How the clients of a task take their steps in this round."""
        algorithm, training = task.algorithm, self.training
        descent = Descent.of(training, algorithm.pull, algorithm.corrects)
        return replace(descent, rate=descent.rate * task.rate, scheduled=training.schedule is not None)

    def _begun(self, cohort: Cohort) -> Cohort:
        """Return the cohort with each job beginning where its algorithm says."""
        ranks = [_ranks(cohort, number) for number in range(len(cohort.tasks))]
        if not any(ranks) and not any(task.algorithm.personal for task in cohort.tasks):
            return cohort
        models = cohort.start(self.device)
        for number, task in enumerate(cohort.tasks):
            jobs, _ = cohort.jobs(number)
            if task.algorithm.personal:
                kept = cohort.of_task(number).vectors(models[jobs])
                models[jobs] = task.algorithm.begin(models[jobs], kept, self.private(task.algorithm))
            if ranks[number]:
                cut_to_ranks(models[jobs], torch.from_numpy(self.setup.layout.adapters), ranks[number])
        return cohort.begin_at(models)

    def _corrections(self, cohort: Cohort) -> torch.Tensor:
        """What each job's algorithm adds to its gradients or steps, [jobs, parameters]."""
        parts: list[torch.Tensor] = []
        for number, task in enumerate(cohort.tasks):
            mine = cohort.of_task(number)
            received = task.parameters.to(self.device).expand(len(mine), -1)
            parts.append(task.algorithm.correction(self.received(task), mine.vectors(received)))
        return torch.cat(parts)

    def received(self, task: Task) -> dict[str, torch.Tensor]:
        """Return the vectors that come with a task, on the device."""
        return {name: vector.to(self.device) for name, vector in task.vectors.items()}

    def private(self, algorithm: Algorithm) -> torch.Tensor:
        """Return for each parameter whether clients keep it to themselves."""
        part = algorithm.private
        if part not in self._masks:
            self._masks[part] = parameters.mask(self.setup.module, part, self.device)
        return self._masks[part]

    def frozen(self, algorithm: Algorithm) -> tuple[tuple[int, int], ...]:
        """Return begin and end of what is not trained under an algorithm, as `DenseModels` takes it."""
        part = algorithm.private
        if part not in self._frozen:
            self._frozen[part] = parameters.spans(self.setup.module, part)
        return self._frozen[part]

    def check_parts(self, algorithms: Sequence[Algorithm]) -> None:
        """Refuse algorithms that keep a part of the model apart which it does not have."""
        for algorithm in algorithms:
            parameters.check_part(self.setup.module, algorithm.private, algorithm.name)
            if algorithm.factored and not len(self.setup.layout.adapters):
                raise UserError(no_part(algorithm.name, "adapters"))
            self.frozen(algorithm)

    @property
    def device_name(self) -> str:
        """The device in words."""
        if self.device.type == "cuda":
            return f"{self.device} ({torch.cuda.get_device_name(self.device)})"
        return str(self.device)

    def close(self) -> None:
        """Release the tensors."""
        for held in (self._populations, self._datasets, self._masks, self._frozen, self._apart):
            held.clear()
        self._pool = self._evaluator = self._engine = None


def _ranks(cohort: Cohort, number: int) -> list[int | None]:
    """Return how many ranks of its adapters each client of a task trains; empty where all train all."""
    algorithm = cohort.tasks[number].algorithm
    found = [algorithm.rank_of(name) for name in cohort.jobs(number)[1]] if algorithm.factored else []
    return found if any(rank is not None for rank in found) else []
