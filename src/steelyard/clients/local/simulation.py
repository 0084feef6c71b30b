"""The clients of a federation inside this process: a cohort is trained together, every test set tested in one go."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from steelyard.clients.local.cohort import Cohort
from steelyard.clients.local.context import Populations, SimulationContext
from steelyard.clients.local.engines.engine import Trainer
from steelyard.clients.local.evaluator import evaluations, measured
from steelyard.clients.local.hardware import peak_memory
from steelyard.clients.local.outgoing import (
    TESTED_TOGETHER,
    Measured,
    OfAlgorithm,
    OfBehaviour,
    OfVectors,
    Trained,
)
from steelyard.clients.local.population import DevicePopulation
from steelyard.clients.local.settings import ComputeSettings
from steelyard.clients.protocol import Clients, Step, in_order
from steelyard.data.files import fingerprint
from steelyard.data.preparation import Preparation
from steelyard.data.scaling import preparation_of
from steelyard.learning.models import Factory
from steelyard.learning.records import RecordNoise
from steelyard.learning.settings import ModelSettings, TrainingSettings
from steelyard.messages.algorithm import Algorithm
from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Evaluations, Failure, Floats, Question, Task, Updates
from steelyard.weighing.criterion import Criterion


class Simulation(Clients):
    """All clients of a simulation; use it for experiments on one machine, with or without a GPU.

    `populations` gives the population of each seed. Tasks of several federations that arrive in one call are
    trained in one stack.

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
        rounds: int = 0,
        records: RecordNoise | None = None,
    ) -> None:
        # What torch cannot map, such as an LSTM, it does one by one, and asks users to report that.
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
        self.compute = compute or ComputeSettings()
        self.context = SimulationContext(populations, model, training, self.compute, rounds, records)
        self._measured = Measured(self.context, criteria)
        of_training = [kind(self.context) for kind in (OfAlgorithm, OfBehaviour, OfVectors)]
        self.steps: tuple[Step[Trained], ...] = in_order([*of_training, self._measured])
        """What happens to updates before they leave; `SendingClients` has what comes after."""
        self._tests = ClientTests(self.context, self._tuned)
        self._peak = 0

    def names(self, seed: int) -> Sequence[str]:
        return self.context.population(seed).names

    def samples(self, seed: int) -> Mapping[str, int]:
        population = self.context.population(seed)
        return dict(zip(population.names, population.sizes.tolist(), strict=True))

    def check(self, algorithms: Sequence[Algorithm]) -> None:
        """Refuse a model, a loss or an engine that does not go with the data, and algorithms that the model lacks."""
        self.context.too_few(1)  # refuses batch norm with batches of one
        self.context.check_engine()
        self.context.check_parts(algorithms)

    def fingerprint(self, seed: int) -> Mapping[str, str]:
        return fingerprint(self.context.population(seed).source)

    def preparation(self, seed: int) -> Preparation | None:
        return preparation_of(self.context.population(seed).source)

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        answers: dict[int, Updates] = {}
        for group in self.context.groups(tasks):
            answers.update(zip(group, self._train_group([tasks[index] for index in group]), strict=True))
        return [answers[index] for index in range(len(tasks))]

    def _train_group(self, tasks: list[Task]) -> list[Updates]:
        cohort, failures = self.context.cohort(tasks)
        models, losses = self._trained(cohort)
        self._peak = max(self._peak, sum(each.nbytes for each in models))
        return [self._answer(cohort, number, models[number], losses, failures[number]) for number in range(len(tasks))]

    def _answer(
        self, cohort: Cohort, number: int, models: DenseModels, losses: Floats, failures: list[Failure]
    ) -> Updates:
        """Make what a task's clients send of the models that they have trained."""
        task, (jobs, names), context = cohort.tasks[number], cohort.jobs(number), self.context
        clients = cohort.client[jobs]
        updates = Updates(
            federation=task.federation,
            round=task.round,
            clients=tuple(names),
            samples=context.population(task.seed).sizes[clients],
            criteria={},
            losses=losses[jobs],
            payload=models,
            failures=tuple(failures),
            steps=cohort.counts[jobs],
        )
        sending = Trained(task, updates, cohort, number)
        for step in self.steps:
            step.out(sending)
        return sending.updates

    @property
    def trainer(self) -> Trainer:
        """Return what trains cohorts."""
        return self.context.leader or self.context.engine

    def _trained(self, cohort: Cohort) -> tuple[list[DenseModels], Floats]:
        """Return the models of each task, and the losses of all jobs; free riders do no work."""
        idle = np.array([cohort.behaviour(job).free_rider for job in range(len(cohort))], dtype=np.bool_)
        if self.context.leader is not None and not idle.any():
            return self.context.leader.trained(cohort)
        models, losses = self.context.matrix(len(cohort)), np.zeros(len(cohort))
        if not idle.any() and len(cohort):
            losses = self.trainer.train(cohort, models)
        elif not idle.all():
            busy = np.flatnonzero(~idle)
            trained = self.context.matrix(len(busy))
            losses[busy] = self.trainer.train(cohort.take(busy), trained)
            models[torch.from_numpy(busy).to(models.device)] = trained.to(models.device)
        for job in np.flatnonzero(idle).tolist():
            task = cohort.tasks[cohort.task[job]]
            models[job].copy_(self.context.kept.pretended(task, cohort.name(job), cohort.behaviour(job)))
            # What a free rider can say without training: the loss of the model that it hands back.
            losses[job] = self.context.first_losses(task, cohort.client[job : job + 1])[0]
        # Views: jobs of one task stand together.
        frozen = [self.context.frozen(task.algorithm) for task in cohort.tasks]
        return [DenseModels(models[cohort.jobs(n)[0]], each) for n, each in enumerate(frozen)], losses

    def colluders(self, seed: int, round: int) -> Mapping[str, str]:
        behaviours = self.context.population(seed).behaviours.items()
        return {name: how.family for name, how in behaviours if how.attack == "adaptive" and how.attacks_from <= round}

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
            cohort, _ = self.context.cohort([Task(*asked, model, rate=question.rate)])
            models = self._trained(cohort)[0][0].models
            # Who cannot train tests the model as it is.
            every = model.to(models.device).repeat(len(clients), 1)
            every[np.searchsorted(clients, cohort.jobs(0)[1])] = models
            parts.append(every)
        return torch.cat(parts).to(self.context.device)

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        return self.context.kept.snapshot()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.context.kept.restore(state)

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
        engine = self.context.engine.describe()
        notes = self.context.notes()
        by_client = {"flaws": self.context.flaws(), "labels": self.context.labels(), "tested": self.context.tested()}
        found_notes = {"notes": notes} if notes else {}
        found_notes |= {name: json.dumps(found, separators=(",", ":")) for name, found in by_client.items() if found}
        return {**facts, **engine, **found_notes}

    def close(self) -> None:
        if self.context.leader is not None:
            self.context.leader.close()
        self._measured.forget()
        self.context.close()


# Tests of models on the clients' rows: of the common model, or of each client's own.


Tune = Callable[[Question], torch.Tensor | None]
"""From a question to the models that clients have trained on before they test them; None where they do not."""


class ClientTests:
    """Answers questions for all clients of a simulation."""

    def __init__(self, context: SimulationContext, tune: Tune) -> None:
        self.context, self._tune = context, tune

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        """Test models on every client; one answer per question, in order."""
        answers: dict[int, Evaluations] = {}
        for index, question in enumerate(questions):
            if question.algorithm.personal:
                population = self.context.population(question.seed)
                answers[index] = self._own(question, population, self._tune(question))
        common = [index for index in range(len(questions)) if index not in answers]
        for seed in dict.fromkeys(questions[index].seed for index in common):
            # Questions of one seed concern the same samples: all their models are tested on them in one go.
            indices = [index for index in common if questions[index].seed == seed]
            population = self.context.population(seed)
            loss = self.context.loss()
            models = torch.cat([questions[index].models.to(self.context.device) for index in indices])
            predictions, losses = self.context.evaluator.test(models, population.dataset, population.tests.unique, loss)
            counts = [len(questions[index].models) for index in indices]
            for index, *found in zip(indices, predictions.split(counts), losses.split(counts), strict=True):
                asked = questions[index]
                answers[index] = evaluations(asked, population.tests, population.dataset, *found)
                if asked.measure is not None:
                    given = asked.models.to(self.context.device)
                    outputs = self.context.evaluator.outputs(given, population.dataset, population.tests.unique)
                    answers[index] = measured(
                        answers[index], asked.measure, population.tests, population.dataset, outputs
                    )
        for seed in dict.fromkeys(question.seed for question in questions):
            indices = [index for index, question in enumerate(questions) if question.seed == seed]
            asked = [questions[index] for index in indices]
            self._try_backdoor(answers, asked, indices, self.context.population(seed))
        return [answers[index] for index in range(len(questions))]

    def _try_backdoor(
        self,
        answers: dict[int, Evaluations],
        questions: list[Question],
        indices: list[int],
        population: DevicePopulation,
    ) -> None:
        """Add to answers how often the first model of each question takes the pattern of a backdoor for its class."""
        backdoor = population.source.backdoor
        if backdoor is None:
            return
        models = torch.stack([question.models[0] for question in questions]).to(self.context.device)
        held = [backdoor.rows.get(client, np.zeros(0, np.int64)) for client in population.tests.clients]
        rows, where = np.unique(np.concatenate([np.zeros(0, np.int64), *held]), return_inverse=True)
        loss = self.context.loss()
        found, _ = self.context.evaluator.test(
            models, population.dataset, torch.from_numpy(rows).to(self.context.device), loss
        )
        fooled = (found == backdoor.target).to(torch.float64).cpu().numpy()[:, where.reshape(-1)]
        counts = np.array([len(mine) for mine in held], dtype=np.float64)
        ends = np.cumsum(counts).astype(np.int64)
        for index, each in zip(indices, fooled, strict=True):
            parts = np.split(each, ends[:-1])
            rates = np.array([float(part.mean()) if len(part) else 0.0 for part in parts])
            more = {"backdoor": rates, "backdoor_rows": counts}
            answers[index] = replace(answers[index], metrics={**answers[index].metrics, **more})

    def _own(self, question: Question, population: DevicePopulation, tuned: torch.Tensor | None) -> Evaluations:
        """Test each client's own model on the client's own rows, for every candidate of a question.

        `tuned` [candidates · clients, parameters] are the models where clients have trained them on before the test.
        """
        tests, dataset, evaluator = population.tests.apart, population.dataset, self.context.evaluator
        rows, count, loss = tests.unique.split(tests.sizes.tolist()), len(tests.clients), self.context.loss()
        if not count:
            return evaluations(question, tests, dataset, *evaluator.test(question.models, dataset, tests.unique, loss))
        found: list[tuple[torch.Tensor, ...]] = []
        for candidate, model in enumerate(question.models.to(self.context.device)):
            for begin in range(0, count, TESTED_TOGETHER):
                here = slice(begin, begin + TESTED_TOGETHER)
                names, mine = tests.clients[here], rows[here]
                first = candidate * count + begin
                models = self._models(question, names, model) if tuned is None else tuned[first : first + len(names)]
                outputs = evaluator.apart(models, dataset, mine)[None]
                judged = evaluator.judged(outputs, dataset, torch.cat(mine), loss)
                found.append((*judged, judged[0] if question.measure is None else outputs))
        predictions, losses, outputs = (
            torch.cat(parts, dim=1)[0].unflatten(0, (len(question.models), -1)) for parts in zip(*found, strict=True)
        )
        answer = evaluations(question, tests, dataset, predictions, losses)
        if question.measure is None:
            return answer
        return measured(answer, question.measure, tests, dataset, outputs)

    def _models(self, question: Question, clients: Sequence[str], model: torch.Tensor) -> torch.Tensor:
        """Return what some clients test for one candidate: [clients, parameters]."""
        shared = model.expand(len(clients), -1)
        owners = [(question.federation, client) for client in clients]
        kept = self.context.kept.vectors(question.algorithm, owners, shared)
        return question.algorithm.own_models(shared, kept, self.context.private(question.algorithm))
