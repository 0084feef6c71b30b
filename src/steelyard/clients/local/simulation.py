"""The clients of a federation inside this process: a cohort is trained together, every test set tested in one go."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from steelyard.clients.local.by_hand import HandEngine
from steelyard.clients.local.cohort import Cohort, step_counts
from steelyard.clients.local.context import Populations, SimulationContext
from steelyard.clients.local.criteria import ClientCriteria, Facts
from steelyard.clients.local.engines.choice import ChosenEngine
from steelyard.clients.local.hardware import peak_memory
from steelyard.clients.local.hostile import attack
from steelyard.clients.local.kept import Kept
from steelyard.clients.local.personal import ClientTests, OwnModels
from steelyard.clients.local.population import DevicePopulation, Ints
from steelyard.clients.local.settings import ComputeSettings
from steelyard.clients.protocol import Clients
from steelyard.data.files import fingerprint
from steelyard.learning.descent import Descent
from steelyard.learning.models import Factory
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.messages.algorithm import Algorithm, LocalTraining
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Evaluations, Failure, Floats, LossState, Question, Task, Updates
from steelyard.weighing.criterion import Criterion


class CohortBuilder:
    """Builds the cohorts of a simulation from what its clients kept in earlier rounds."""

    def __init__(self, context: SimulationContext, kept: Kept, own: OwnModels) -> None:
        self._context, self._kept, self._own = context, kept, own

    def groups(self, tasks: Sequence[Task]) -> list[list[int]]:
        """Indices of the tasks that can be trained in one stack: one data set, one form of the loss, one descent."""
        groups: dict[object, list[int]] = {}
        for index, task in enumerate(tasks):
            loss, dataset = self._context.loss(task.loss), self._context.population(task.seed).dataset
            key = (id(dataset), loss.name, loss.shape, loss.scale, self._descent(task))
            if task.algorithm.by_hand:
                key = (*key, task.algorithm)
            groups.setdefault(key, []).append(index)
        return list(groups.values())

    def gather(self, tasks: Sequence[Task]) -> tuple[Cohort, list[list[Failure]]]:
        """Return the cohort of tasks that train in one stack, and by task who cannot train, with the reason."""
        populations = self._at_work(tasks)
        failures: list[list[Failure]] = [[] for _ in tasks]
        starts: list[torch.Tensor] = [task.parameters for task in tasks]
        jobs: list[tuple[int, int, int]] = []
        for number, (task, population) in enumerate(zip(tasks, populations, strict=True)):
            self._kept.receive(task, population.behaviours)
            for name in sorted(task.clients):
                position = population.position.get(name)
                why = "not registered" if position is None else self._context.too_few(int(population.sizes[position]))
                if position is None or why is not None:
                    failures[number].append(Failure(name, why or ""))
                    continue
                start = self._kept.start(task, name, population.behaviours)
                jobs.append((number, position, number if start is task.parameters else len(starts)))
                if start is not task.parameters:
                    starts.append(start)
        table = np.array(jobs, dtype=np.int64).reshape(-1, 3)
        loss, descent = self._context.loss(tasks[0].loss), self._descent(tasks[0])
        form = LossState(loss.name, None, loss.shape, loss.scale)
        cohort = Cohort(tuple(tasks), populations, form, descent, table[:, 0], table[:, 1], tuple(starts), table[:, 2])
        cohort = self._own.begin(cohort)
        return replace(cohort, corrections=self._corrections(cohort)) if descent.corrected else cohort, failures

    def _descent(self, task: Task) -> Descent:
        """How the clients of a task take their steps in this round."""
        algorithm, training = task.algorithm, self._context.training
        descent = Descent.of(training, algorithm.pull, algorithm.corrects)
        return replace(descent, rate=descent.rate * task.rate, scheduled=training.schedule is not None)

    def _corrections(self, cohort: Cohort) -> torch.Tensor:
        """What each job's algorithm adds to its gradients or steps, [jobs, parameters]."""
        parts: list[torch.Tensor] = []
        for number, task in enumerate(cohort.tasks):
            _, clients = cohort.jobs(number)
            received = task.parameters.to(self._context.device).expand(len(clients), -1)
            kept = self._kept.vectors(task.federation, task.algorithm, clients, received)
            parts.append(task.algorithm.correction(self.received(task), kept))
        return torch.cat(parts)

    def received(self, task: Task) -> dict[str, torch.Tensor]:
        """Return the vectors that come with a task, on the device."""
        return {name: vector.to(self._context.device) for name, vector in task.vectors.items()}

    def _at_work(self, tasks: Sequence[Task]) -> tuple[DevicePopulation, ...]:
        """The population of each task as it trains this round; tasks of one seed and round share it."""
        found: dict[tuple[int, int, float], DevicePopulation] = {}
        keys = [(task.seed, task.round, task.algorithm.held_back) for task in tasks]
        for seed, round, share in keys:
            if (seed, round, share) not in found:
                training = self._own.holding_back(seed, share)
                found[seed, round, share] = training.at_work(seed, round)
        return tuple(found[key] for key in keys)


class Simulation(Clients):
    """All clients of a simulation; use it for experiments on one machine, with or without a GPU.

    `populations` gives the population of each seed. Tasks of several federations that arrive in one call are
    trained in one stack. `facts` are per-client facts for criteria about the device or the user:
    {"client": {"device": {"battery": 0.7}, "user": {...}}}.

        >>> populations = {1: share_out(rows, PartitionSettings(clients=2), seed=1)}
        >>> clients = Simulation(populations, ModelSettings(name="logistic"), TrainingSettings(epochs=5))

    Raises:
        UserError: this machine has no such device; when clients train, the model or the engine does not fit the data.
    """

    def __init__(
        self,
        populations: Populations,
        model: ModelSettings | Factory,
        training: TrainingSettings,
        compute: ComputeSettings | None = None,
        criteria: Iterable[Criterion] = (),
        facts: Facts | None = None,
        rounds: int = 0,
    ) -> None:
        # What torch cannot map, such as an LSTM, it does one by one, and asks users to report that.
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
        self.compute = compute or ComputeSettings()
        self.context = SimulationContext(populations, model, training, self.compute, rounds)
        self.criteria = ClientCriteria(criteria, facts or {})
        self._engine: ChosenEngine | None = None
        self._by_hand: HandEngine | None = None
        self._kept = Kept()
        self._own = OwnModels(self.context, self._kept)
        self.cohort_builder = CohortBuilder(self.context, self._kept, self._own)
        self._tests = ClientTests(self.context, self._own, self._tuned)
        self._peak = 0

    def names(self, seed: int) -> Sequence[str]:
        return self.context.population(seed).names

    def check(self, algorithms: Sequence[Algorithm]) -> None:
        """Refuse a model, a loss or an engine that does not go with the data, and algorithms that the model lacks."""
        self.context.loss(LossState(self.context.training.loss))
        self.context.too_few(1)  # refuses batch norm with batches of one
        self._main_engine()
        self._own.check(algorithms)

    def fingerprint(self, seed: int) -> Mapping[str, str]:
        return fingerprint(self.context.population(seed).source)

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        answers: dict[int, Updates] = {}
        for group in self.cohort_builder.groups(tasks):
            answers.update(zip(group, self._train_group([tasks[index] for index in group]), strict=True))
        return [answers[index] for index in range(len(tasks))]

    def _train_group(self, tasks: list[Task]) -> list[Updates]:
        cohort, failures = self.cohort_builder.gather(tasks)
        models = self.context.matrix(len(cohort))
        self._peak = max(self._peak, models.numel() * 4)
        losses = self._trained(cohort, models)
        return [self._answer(cohort, number, models, losses, failures[number]) for number in range(len(tasks))]

    def _answer(
        self, cohort: Cohort, number: int, models: torch.Tensor, losses: Floats, failures: list[Failure]
    ) -> Updates:
        """Make what a task's clients send of the models that they have trained, in this order."""
        task, behaviours = cohort.tasks[number], cohort.populations[number].behaviours
        jobs, names = cohort.jobs(number)
        mine = models[jobs]  # a view: jobs of one task stand together
        # What the algorithm makes of the training, before anything stays at home.
        local = self._local(cohort, number, mine)
        trained = mine.clone() if task.algorithm.listens else None
        self._own.keep(task, names, mine)
        if task.algorithm.replaces and local is not None:
            sent, keep = task.algorithm.sent(local)
            mine.copy_(sent)
            self._kept.keep_vectors(task.federation, names, keep)
        # What hostile clients send is made from what they would have sent.
        if behaviours and names:
            attack(task, names, mine, behaviours, self.context.setup.layout)
            for name, model in zip(names, mine, strict=True):
                self._kept.keep_model(task, name, model, behaviours)
        # What is measured, and what clients do with each other's models, is of what was sent.
        updates = self._updates(cohort, number, mine, losses[jobs], failures, local)
        if trained is None:
            return updates
        return replace(updates, listening=self._own.listen(cohort, number, models, trained))

    def _main_engine(self) -> ChosenEngine:
        if self._engine is None:
            self._engine = ChosenEngine(self.context.setup, self.compute.engine)
        return self._engine

    def settled(self, tasks: Sequence[Task]) -> str:
        """Return the engine that trains these tasks, as compute.engine takes it; the choice falls now if it has not."""
        engine = self._main_engine()
        if engine.engine is None:
            cohort, _ = self.cohort_builder.gather([tasks[index] for index in self.cohort_builder.groups(tasks)[0]])
            if len(cohort):
                engine.settled(cohort)
        return engine.choice

    def use_engine(self, choice: str) -> None:
        """Train with the engine that another process has chosen."""
        if self._main_engine().choice != choice:
            self._engine, self._by_hand = ChosenEngine(self.context.setup, choice), None

    def frozen(self, algorithm: Algorithm) -> tuple[tuple[int, int], ...]:
        """Return begin and end of what is not trained under an algorithm, as `DenseModels` takes it."""
        return self._own.spans(algorithm)

    def _hand_engine(self) -> HandEngine:
        if self._by_hand is None:
            self._by_hand = HandEngine(self.context, self._kept, self._main_engine())
        return self._by_hand

    def _trained(self, cohort: Cohort, models: torch.Tensor) -> Floats:
        """Write the model of every job into `models` and return the losses; free riders do no work."""
        engine = self._hand_engine() if cohort.tasks[0].algorithm.by_hand else self._main_engine()
        idle = np.array([cohort.behaviour(job).free_rider for job in range(len(cohort))], dtype=np.bool_)
        losses = np.zeros(len(cohort))
        if not idle.all():
            if not idle.any():
                return engine.train(cohort, models)
            busy = np.flatnonzero(~idle)
            trained = self.context.matrix(len(busy))
            losses[busy] = engine.train(cohort.take(busy), trained)
            models[torch.from_numpy(busy).to(models.device)] = trained.to(models.device)
        for job in np.flatnonzero(idle).tolist():
            task = cohort.tasks[cohort.task[job]]
            models[job].copy_(self._kept.pretended(task, cohort.name(job), cohort.behaviour(job)))
            # What a free rider can say without training: the loss of the model that it hands back.
            population = self.context.population(task.seed)
            losses[job] = self._first_losses(task, population, cohort.client[job : job + 1])[0]
        return losses

    def _updates(
        self,
        cohort: Cohort,
        number: int,
        models: torch.Tensor,
        losses: Floats,
        failures: list[Failure],
        local: LocalTraining | None,
    ) -> Updates:
        jobs, names = cohort.jobs(number)
        task, working, clients = cohort.tasks[number], cohort.populations[number], cohort.client[jobs]
        # Clients measure and report all of their rows, also those that they did not train on this round.
        population = self.context.population(task.seed)
        criteria, refused = self.criteria.measure(population, clients, models, task.round)
        updates = Updates(
            federation=task.federation,
            round=task.round,
            clients=tuple(names),
            samples=_claimed(population, clients, task.round),
            criteria=criteria,
            losses=losses,
            payload=DenseModels(models, self.frozen(task.algorithm)),
            failures=tuple(failures),
            steps=step_counts(working.sizes[clients], self.context.training, joined=self.context.setup.batch_norm),
            first_losses=self._first_losses(task, population, clients) if self.criteria.needs_first_losses else None,
            label_counts=self.criteria.label_counts(population, clients),
        )
        updates = replace(updates, vectors=self._after_training(task, names, local, models))
        if not refused:
            return updates
        keep = [row for row, name in enumerate(names) if name not in refused]
        return updates.select(keep, [Failure(name, why) for name, why in refused.items()])

    def _local(self, cohort: Cohort, number: int, models: torch.Tensor) -> LocalTraining | None:
        """Return what the clients of a task did, with their second training; None where the algorithm asks nothing."""
        task, device = cohort.tasks[number], self.context.device
        jobs, names = cohort.jobs(number)
        if not (task.algorithm.keeps or task.algorithm.sends) or not names:
            return None
        mine = cohort.take(range(len(cohort))[jobs])
        common = len(np.unique(mine.origin)) == 1
        start = mine.starts[mine.origin[0]].to(device)[None] if common else mine.start(device)
        counts = step_counts(mine.sizes, self.context.training, joined=self.context.setup.batch_norm)
        steps = torch.from_numpy(counts).to(device, torch.float32)[:, None]
        kept = self._kept.vectors(task.federation, task.algorithm, names, start.expand(len(names), -1))
        received = self.cohort_builder.received(task)
        local = LocalTraining(start, models.to(device), steps, cohort.descent.rate, received, kept)
        return self._own.train_again(mine, task.algorithm.again(local), local, self._main_engine())

    def _after_training(
        self, task: Task, names: Sequence[str], local: LocalTraining | None, models: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Let the algorithm's clients keep what they keep; return what they send beside their models."""
        if local is None:
            return {name: models.new_zeros((0, models.shape[1])) for name in task.algorithm.sends}
        # A hostile client's vectors follow from the model that it sends, not from the one that it trained.
        keep, sent = task.algorithm.after_training(replace(local, models=models.to(self.context.device)))
        self._kept.keep_vectors(task.federation, names, keep)
        return dict(sent)

    def _first_losses(self, task: Task, population: DevicePopulation, clients: Ints) -> Floats:
        """Return the mean loss of the received model on the training samples of each client, class weights counted."""
        sizes = population.sizes[clients]
        begins = population.begins[clients]
        spans = [np.arange(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
        samples = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *spans])).to(self.context.device)
        rows, labels = population.rows[samples], population.labels[samples]
        received = task.parameters[None].to(self.context.device)
        each = self.context.evaluator.losses(received, population.dataset, rows, labels, self.context.loss(task.loss))[
            0
        ]
        return np.array([float(part.mean()) for part in each.to(torch.float64).split(sizes.tolist())])

    def colluders(self, seed: int) -> Mapping[str, str]:
        behaviours = self.context.population(seed).behaviours
        return {name: how.family for name, how in behaviours.items() if how.attack == "adaptive"}

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        return self._tests.evaluate(questions)

    def _tuned(self, question: Question) -> torch.Tensor | None:
        """Return the models that clients test where they train once more before: [candidates · clients, parameters]."""
        if not question.algorithm.tunes:
            return None
        clients = self.context.population(question.seed).tests.clients
        asked = (question.federation, question.seed, question.round + 1, clients)
        parts: list[torch.Tensor] = []
        for model in question.models:
            cohort, _ = self.cohort_builder.gather([Task(*asked, model, rate=question.rate)])
            models = self.context.matrix(len(cohort))
            if len(cohort):
                self._trained(cohort, models)
            # Who cannot train tests the model as it is.
            every = model.to(models.device).repeat(len(clients), 1)
            every[np.searchsorted(clients, cohort.jobs(0)[1])] = models
            parts.append(every)
        return torch.cat(parts).to(self.context.device)

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        return self._kept.snapshot()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self._kept.restore(state)

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
        by_client = {"flaws": self.context.flaws(), "labels": self.context.labels(), "tested": self.context.tested()}
        found_notes = {"notes": notes} if notes else {}
        found_notes |= {name: json.dumps(found, separators=(",", ":")) for name, found in by_client.items() if found}
        return {**facts, **engine, **found_notes}

    def close(self) -> None:
        self._engine = self._by_hand = None
        self.criteria.forget()
        self._own.forget()
        self.context.close()


def _claimed(population: DevicePopulation, clients: Ints, round: int) -> Ints:
    """Return how many samples the clients at these positions say they have; at least one, as they have some."""
    sizes = population.sizes[clients]
    return np.maximum(1, np.rint(sizes * population.claims(round)[clients])).astype(np.int64)
