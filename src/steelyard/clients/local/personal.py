"""Models of the clients' own: where they begin, what stays at home, second trainings; tests on the clients' rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from steelyard.algorithms.flexlora import cut_to_ranks
from steelyard.base.errors import UserError
from steelyard.clients.local.cohort import Cohort
from steelyard.clients.local.context import SimulationContext
from steelyard.clients.local.engines.choice import ChosenEngine
from steelyard.clients.local.evaluator import evaluations
from steelyard.clients.local.kept import Kept
from steelyard.clients.local.population import DevicePopulation
from steelyard.learning import parameters
from steelyard.learning.settings import no_part
from steelyard.messages.algorithm import LAST, OWN, Algorithm, Listening, LocalTraining, SecondTraining
from steelyard.messages.updates import Evaluations, Floats, LossState, Question, Task

TESTED_TOGETHER = 64
"""Clients whose own models lie in memory at once while they are tested."""


class OwnModels:
    """What personal algorithms add to a simulation; the vectors themselves are the clients' kept ones."""

    def __init__(self, context: SimulationContext, kept: Kept) -> None:
        self.context = context
        self._kept = kept
        self._masks: dict[str, torch.Tensor] = {}
        self._apart: dict[tuple[int, float], DevicePopulation] = {}

    def forget(self) -> None:
        """Let go of data and engines; what clients keep stays."""
        self._masks.clear()
        self._apart.clear()

    def check(self, algorithms: Sequence[Algorithm]) -> None:
        """Refuse algorithms that keep a part of the model apart which it does not have."""
        for algorithm in algorithms:
            parameters.check_part(self.context.setup.module, algorithm.private, algorithm.name)
            if algorithm.factored and not len(self.context.setup.layout.adapters):
                raise UserError(no_part(algorithm.name, "adapters"))

    def private(self, algorithm: Algorithm) -> torch.Tensor:
        """Return for each parameter whether clients keep it to themselves."""
        part = algorithm.private
        if part not in self._masks:
            self._masks[part] = parameters.mask(self.context.setup.module, part, self.context.device)
        return self._masks[part]

    def spans(self, algorithm: Algorithm) -> tuple[tuple[int, int], ...]:
        """Return begin and end of what the server's model keeps as it is."""
        return parameters.spans(self.context.setup.module, algorithm.private)

    def begin(self, cohort: Cohort) -> Cohort:
        """Return the cohort with each job beginning where its algorithm says."""
        ranks = [self._ranks(cohort, number) for number in range(len(cohort.tasks))]
        if not any(ranks) and not any(task.algorithm.personal for task in cohort.tasks):
            return cohort
        models = cohort.start(self.context.device)
        for number, task in enumerate(cohort.tasks):
            if task.algorithm.personal:
                jobs, names = cohort.jobs(number)
                kept = self._kept.vectors(task.federation, task.algorithm, names, models[jobs])
                models[jobs] = task.algorithm.begin(models[jobs], kept, self.private(task.algorithm))
            if ranks[number]:
                factors = torch.from_numpy(self.context.setup.layout.adapters)
                cut_to_ranks(models[cohort.jobs(number)[0]], factors, ranks[number])
        return cohort.begin_at(models)

    def _ranks(self, cohort: Cohort, number: int) -> list[int | None]:
        """Return how many ranks of its adapters each client of a task trains; empty where all train all."""
        algorithm = cohort.tasks[number].algorithm
        found = [algorithm.rank_of(name) for name in cohort.jobs(number)[1]] if algorithm.factored else []
        return found if any(rank is not None for rank in found) else []

    def keep(self, task: Task, names: Sequence[str], models: torch.Tensor) -> None:
        """Let a task's clients keep their whole model where a part of it is private; what is sent lacks that part."""
        if task.algorithm.private != "nothing" and len(names):
            self._kept.keep_vectors(task.federation, names, {OWN: models})
            private = self.private(task.algorithm).to(models.device)
            models.copy_(models.where(~private, task.parameters.to(models.device)))

    def train_again(
        self, cohort: Cohort, second: SecondTraining | None, local: LocalTraining, engine: ChosenEngine
    ) -> LocalTraining:
        """Do the second training of a task's cohort, where there is one; what is returned holds its models."""
        if second is None:
            return local
        descent = replace(cohort.descent, pull=second.pull, corrects="gradient")
        out = self.context.matrix(len(cohort))
        engine.train(replace(cohort.begin_at(second.start), descent=descent, corrections=second.correction), out)
        return replace(local, second=out.to(self.context.device))

    def holding_back(self, seed: int, share: float) -> DevicePopulation:
        """Return the population of a seed with a share of each client's rows kept from training."""
        if (seed, share) not in self._apart:
            self._apart[seed, share] = self.context.population(seed).holding_back(share, seed)
        return self._apart[seed, share]

    def listen(self, cohort: Cohort, number: int, models: torch.Tensor, own: torch.Tensor) -> Floats:
        """Let each client of a task weigh the models that all have sent, and keep its own mixture of them.

        `own` are the models that the clients trained, whatever they sent. Returns the weights, [clients, models].
        """
        task, (jobs, names) = cohort.tasks[number], cohort.jobs(number)
        device = self.context.device
        received = task.parameters.to(device).expand(len(names), -1)
        last = self._kept.vectors(task.federation, task.algorithm, names, received)[LAST]
        sent = models[jobs].to(device)
        heard = self._heard(cohort, number, sent, last)
        matrix = task.algorithm.listen(heard)
        mixed = matrix @ sent.nan_to_num(0.0, 0.0, 0.0) + (1 - matrix.sum(dim=1, keepdim=True)) * last
        self._kept.keep_vectors(task.federation, names, {OWN: mixed, LAST: own})
        return matrix.to(torch.float64).cpu().numpy()

    def _heard(self, cohort: Cohort, number: int, sent: torch.Tensor, last: torch.Tensor) -> Listening:
        task = cohort.tasks[number]
        population = self.holding_back(task.seed, task.algorithm.held_back)
        sizes = self.context.population(task.seed).sizes
        jobs, _ = cohort.jobs(number)
        spans: list[torch.Tensor] = []
        for client in cohort.client[jobs].tolist():
            begin, kept = int(population.begins[client]), int(population.sizes[client])
            first = kept if kept < sizes[client] else 0  # A client with one row tests on it too.
            spans.append(torch.arange(begin + first, begin + int(sizes[client]), device=self.context.device))
        rows, counts = torch.cat(spans), [len(span) for span in spans]
        loss = self.context.loss(task.loss)
        given = (population.dataset, population.rows[rows], population.labels[rows], loss)
        each = torch.cat([self.context.evaluator.losses(part, *given) for part in sent.split(TESTED_TOGETHER)])
        losses = torch.stack([part.mean(dim=1) for part in each.split(counts, dim=1)])
        own = [
            self.context.evaluator.losses(
                model[None], population.dataset, population.rows[span], population.labels[span], loss
            )
            for model, span in zip(last, spans, strict=True)
        ]
        before = torch.stack([part.mean() for part in own])
        distances = torch.stack([torch.linalg.vector_norm(sent - model, dim=1) for model in last])
        return Listening(losses, before, distances)

    def tested(self, question: Question, population: DevicePopulation, tuned: torch.Tensor | None) -> Evaluations:
        """Test each client's own model on the client's own rows, for every candidate of a question.

        `tuned` [candidates · clients, parameters] are the models where clients have trained them on before the test.
        """
        tests, dataset = population.tests.apart, population.dataset
        loss = self.context.loss(LossState(self.context.training.loss))
        rows = tests.unique.split(tests.sizes.tolist())
        count = len(rows)
        predictions = torch.zeros((len(question.models), len(tests.unique)), device=self.context.device)
        losses = torch.zeros_like(predictions)
        ends = np.cumsum(tests.sizes).tolist()
        for candidate, model in enumerate(question.models.to(self.context.device)):
            for begin in range(0, count, TESTED_TOGETHER):
                names = tests.clients[begin : begin + TESTED_TOGETHER]
                first = candidate * count + begin
                models = self._models(question, names, model) if tuned is None else tuned[first : first + len(names)]
                for client, own in enumerate(models, begin):
                    span = slice(ends[client] - len(rows[client]), ends[client])
                    found = self.context.evaluator.test(own[None], dataset, rows[client], loss)
                    predictions[candidate, span], losses[candidate, span] = found[0][0], found[1][0]
        return evaluations(question, tests, dataset, predictions, losses)

    def _models(self, question: Question, clients: Sequence[str], model: torch.Tensor) -> torch.Tensor:
        """Return what some clients test for one candidate: [clients, parameters]."""
        shared = model.expand(len(clients), -1)
        kept = self._kept.vectors(question.federation, question.algorithm, clients, shared)
        return question.algorithm.own_models(shared, kept, self.private(question.algorithm))


Tune = Callable[[Question], torch.Tensor | None]
"""From a question to the models that clients have trained on before they test them; None where they do not."""


class ClientTests:
    """Answers questions for all clients of a simulation."""

    def __init__(self, context: SimulationContext, own: OwnModels, tune: Tune) -> None:
        self.context, self._own, self._tune = context, own, tune

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        """Test models on every client; one answer per question, in order."""
        answers: dict[int, Evaluations] = {}
        for index, question in enumerate(questions):
            if question.algorithm.personal:
                population = self.context.population(question.seed)
                answers[index] = self._own.tested(question, population, self._tune(question))
        common = [index for index in range(len(questions)) if index not in answers]
        for seed in dict.fromkeys(questions[index].seed for index in common):
            # Questions of one seed concern the same samples: all their models are tested on them in one go.
            indices = [index for index in common if questions[index].seed == seed]
            population = self.context.population(seed)
            loss = self.context.loss(LossState(self.context.training.loss))
            models = torch.cat([questions[index].models.to(self.context.device) for index in indices])
            predictions, losses = self.context.evaluator.test(models, population.dataset, population.tests.unique, loss)
            counts = [len(questions[index].models) for index in indices]
            for index, *found in zip(indices, predictions.split(counts), losses.split(counts), strict=True):
                answers[index] = evaluations(questions[index], population.tests, population.dataset, *found)
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
        loss = self.context.loss(LossState(self.context.training.loss))
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
