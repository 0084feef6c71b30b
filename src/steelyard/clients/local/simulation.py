"""The clients of a federation inside this process: a cohort is trained together, every test set tested in one go."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from steelyard.clients.local.answers import evaluations
from steelyard.clients.local.context import Populations, SimulationContext
from steelyard.clients.local.criteria import ClientCriteria, Facts
from steelyard.clients.local.device_data.cohort import Cohort
from steelyard.clients.local.device_data.dataset import DevicePopulation, Ints
from steelyard.clients.local.device_data.schedule import step_counts
from steelyard.clients.local.engines.choice import ChosenEngine
from steelyard.clients.local.evaluator import Evaluator
from steelyard.clients.local.hardware import peak_memory
from steelyard.clients.local.settings import ComputeSettings
from steelyard.learning.models import Factory, ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.messages import DenseModels, Evaluations, Failure, Floats, LossState, Question, Task, Updates
from steelyard.weighing.criteria import Criterion


class Simulation:
    """All clients of a simulation; use it for experiments on one machine, with or without a GPU.

    `populations` gives the population of each seed. Tasks of several federations that arrive in one call are
    trained in one stack. `facts` are per-client facts for criteria about the device or the user:
    {"client": {"device": {"battery": 0.7}, "user": {...}}}.
    """

    def __init__(
        self,
        populations: Populations,
        model: ModelSettings | Factory,
        training: TrainingSettings,
        compute: ComputeSettings | None = None,
        criteria: Iterable[Criterion] = (),
        facts: Facts | None = None,
    ) -> None:
        self.compute = compute or ComputeSettings()
        self.context = SimulationContext(populations, model, training, self.compute)
        self.criteria = ClientCriteria(criteria, facts or {})
        self._engine: ChosenEngine | None = None
        self._evaluator: Evaluator | None = None
        self._own_models: dict[tuple[str, str], torch.Tensor] = {}
        """By federation and client: the model that a client which ignores the global one trains on from."""
        self._peak = 0

    def names(self, seed: int) -> Sequence[str]:
        return self.context.population(seed).names

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        answers: dict[int, Updates] = {}
        for group in self._groups(tasks):
            answers.update(zip(group, self._train_group([tasks[index] for index in group]), strict=True))
        return [answers[index] for index in range(len(tasks))]

    def _groups(self, tasks: Sequence[Task]) -> list[list[int]]:
        """Indices of the tasks that can be trained in one stack: one data set, one form of the loss."""
        groups: dict[object, list[int]] = {}
        for index, task in enumerate(tasks):
            loss = self.context.loss(task.loss)
            key = (id(self.context.population(task.seed).dataset), loss.name, loss.shape, loss.scale)
            groups.setdefault(key, []).append(index)
        return list(groups.values())

    def _train_group(self, tasks: list[Task]) -> list[Updates]:
        cohort, failures = self._cohort(tasks)
        models = self.context.matrix(len(cohort))
        self._peak = max(self._peak, models.numel() * 4)
        if len(cohort):
            engine = self._engine or ChosenEngine(self.context.setup, self.compute.engine)
            self._engine = engine
            losses = engine.train(cohort, models)
        else:
            losses = np.zeros(0)
        self._keep_own_models(cohort, models)
        return [self._updates(cohort, number, models, losses, failures[number]) for number in range(len(tasks))]

    def _cohort(self, tasks: list[Task]) -> tuple[Cohort, list[list[Failure]]]:
        populations = tuple(self.context.population(task.seed) for task in tasks)
        failures: list[list[Failure]] = [[] for _ in tasks]
        starts: list[torch.Tensor] = [task.parameters for task in tasks]
        jobs: list[tuple[int, int, int]] = []
        for number, (task, population) in enumerate(zip(tasks, populations, strict=True)):
            sizes = population.sizes.tolist()
            for name in sorted(task.clients):
                position = population.position.get(name)
                if position is None or not sizes[position]:
                    why = "not registered" if position is None else "no training samples"
                    failures[number].append(Failure(name, why))
                    continue
                own = self._own_models.get((task.federation, name)) if name in population.stubborn else None
                jobs.append((number, position, number if own is None else len(starts)))
                if own is not None:
                    starts.append(own)
        table = np.array(jobs, dtype=np.int64).reshape(-1, 3)
        loss = self.context.loss(tasks[0].loss)
        form = LossState(loss.name, None, loss.shape, loss.scale)
        cohort = Cohort(tuple(tasks), populations, form, table[:, 0], table[:, 1], tuple(starts), table[:, 2])
        return cohort, failures

    def _keep_own_models(self, cohort: Cohort, models: torch.Tensor) -> None:
        """Clients that ignore the model they receive train on from their own: keep it for their next round."""
        if not any(population.stubborn for population in cohort.populations):
            return
        for job in range(len(cohort)):
            name = cohort.name(job)
            if name in cohort.populations[cohort.task[job]].stubborn:
                federation = cohort.tasks[cohort.task[job]].federation
                self._own_models[federation, name] = models[job].detach().cpu().clone()

    def _updates(
        self, cohort: Cohort, number: int, models: torch.Tensor, losses: Floats, failures: list[Failure]
    ) -> Updates:
        jobs = np.flatnonzero(cohort.task == number)
        task, population = cohort.tasks[number], cohort.populations[number]
        clients = cohort.client[jobs]
        names = tuple(population.names[position] for position in clients.tolist())
        # Jobs of one task stand together, so its models are a slice of the matrix, not a copy.
        mine = models[jobs[0] : jobs[-1] + 1] if len(jobs) else models[:0]
        criteria, refused = self.criteria.measure(population, clients, mine)
        updates = Updates(
            federation=task.federation,
            round=task.round,
            clients=names,
            samples=population.sizes[clients],
            criteria=criteria,
            losses=losses[jobs],
            payload=DenseModels(mine),
            failures=tuple(failures),
            steps=step_counts(population.sizes[clients], self.context.training),
            first_losses=self._first_losses(task, population, clients) if self.criteria.tell_first_losses else None,
            label_counts=self.criteria.label_counts(population, clients),
        )
        if not refused:
            return updates
        keep = [row for row, name in enumerate(names) if name not in refused]
        return updates.select(keep, [Failure(name, why) for name, why in refused.items()])

    def _first_losses(self, task: Task, population: DevicePopulation, clients: Ints) -> Floats:
        """Return the mean loss of the received model on the training samples of each client, class weights counted."""
        sizes = population.sizes[clients]
        begins = population.begins[clients]
        spans = [np.arange(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
        samples = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *spans])).to(self.context.device)
        rows, labels = population.rows[samples], population.labels[samples]
        received = task.parameters[None].to(self.context.device)
        each = self.evaluator.losses(received, population.dataset, rows, labels, self.context.loss(task.loss))[0]
        return np.array([float(part.mean()) for part in each.to(torch.float64).split(sizes.tolist())])

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        answers: dict[int, Evaluations] = {}
        for seed in dict.fromkeys(question.seed for question in questions):
            # Questions of one seed concern the same samples: all their models are tested on them in one go.
            indices = [index for index, question in enumerate(questions) if question.seed == seed]
            population = self.context.population(seed)
            loss = self.context.loss(LossState(self.context.training.loss))
            models = torch.cat([questions[index].models.to(self.context.device) for index in indices])
            predictions, losses = self.evaluator.test(models, population.dataset, population.tests.unique, loss)
            counts = [len(questions[index].models) for index in indices]
            for index, *found in zip(indices, predictions.split(counts), losses.split(counts), strict=True):
                answers[index] = evaluations(questions[index], population, *found)
        return [answers[index] for index in range(len(questions))]

    @property
    def evaluator(self) -> Evaluator:
        """What tests models; made when first needed."""
        if self._evaluator is None:
            self._evaluator = Evaluator(self.context.setup)
        return self._evaluator

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        return {json.dumps(["own", *key]): model for key, model in sorted(self._own_models.items())}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        for key, model in state.items():
            _, federation, client = json.loads(key)
            self._own_models[federation, client] = model.cpu()

    def describe(self) -> Mapping[str, str]:
        setup = self.context.setup
        facts = {
            "clients": "local",
            "device": self.context.device_name,
            "precision": setup.precision,
            "threads": str(setup.threads),
            "memory_limit_gb": f"{setup.memory / 1e9:.1f}",
            "memory_peak_gb": f"{peak_memory(setup.device) / 1e9:.2f}",
            "updates_peak_gb": f"{self._peak / 1e9:.3f}",
            "parameters": str(setup.layout.trained),
        }
        engine = self._engine.describe() if self._engine else {"engine_choice": self.compute.engine}
        notes = self.context.notes()
        return {**facts, **engine, **({"notes": notes} if notes else {})}

    def close(self) -> None:
        self._engine = None
        self._evaluator = None
        self.criteria.forget()
        self.context.close()
