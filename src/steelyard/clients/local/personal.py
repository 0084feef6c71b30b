"""Models of the clients' own: where they begin, what stays at home, second trainings, and what each client tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from steelyard.algorithms.flexlora import cut_to_ranks
from steelyard.base.errors import UserError
from steelyard.clients.local.client_state import KeptVectors
from steelyard.clients.local.cohort import Cohort
from steelyard.clients.local.context import SimulationContext
from steelyard.clients.local.engines.choice import ChosenEngine
from steelyard.clients.local.evaluator import Evaluator, evaluations
from steelyard.clients.local.population import DevicePopulation
from steelyard.learning import parameters
from steelyard.learning.settings import no_part
from steelyard.messages.algorithm import LAST, OWN, Algorithm, Listening, LocalTraining, SecondTraining
from steelyard.messages.updates import Evaluations, Floats, LossState, Question

TESTED_TOGETHER = 64
"""Clients whose own models lie in memory at once while they are tested."""


class OwnModels:
    """What personal algorithms add to a simulation; the vectors themselves are the clients' kept ones."""

    def __init__(self, context: SimulationContext, vectors: KeptVectors) -> None:
        self.context = context
        self.vectors = vectors
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
                kept = self.vectors.of(task.federation, task.algorithm, names, models[jobs])
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

    def keep(self, cohort: Cohort, models: torch.Tensor) -> None:
        """Let clients keep their whole model where a part of it is private; what is sent lacks that part."""
        for number, task in enumerate(cohort.tasks):
            jobs, names = cohort.jobs(number)
            if task.algorithm.private != "nothing" and len(names):
                self.vectors.keep(task.federation, names, {OWN: models[jobs]})
                private = self.private(task.algorithm).to(models.device)
                models[jobs] = models[jobs].where(~private, task.parameters.to(models.device))

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

    def listen(
        self, cohort: Cohort, number: int, models: torch.Tensor, own: torch.Tensor, evaluator: Evaluator
    ) -> Floats:
        """Let each client of a task weigh the models that all have sent, and keep its own mixture of them.

        `own` are the models that the clients trained, whatever they sent. Returns the weights, [clients, models].
        """
        task, (jobs, names) = cohort.tasks[number], cohort.jobs(number)
        device = self.context.device
        received = task.parameters.to(device).expand(len(names), -1)
        last = self.vectors.of(task.federation, task.algorithm, names, received)[LAST]
        sent = models[jobs].to(device)
        heard = self._heard(cohort, number, sent, last, evaluator)
        matrix = task.algorithm.listen(heard)
        mixed = matrix @ sent.nan_to_num(0.0, 0.0, 0.0) + (1 - matrix.sum(dim=1, keepdim=True)) * last
        self.vectors.keep(task.federation, names, {OWN: mixed, LAST: own})
        return matrix.to(torch.float64).cpu().numpy()

    def _heard(
        self, cohort: Cohort, number: int, sent: torch.Tensor, last: torch.Tensor, evaluator: Evaluator
    ) -> Listening:
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
        each = torch.cat([evaluator.losses(part, *given) for part in sent.split(TESTED_TOGETHER)])
        losses = torch.stack([part.mean(dim=1) for part in each.split(counts, dim=1)])
        own = [
            evaluator.losses(model[None], population.dataset, population.rows[span], population.labels[span], loss)
            for model, span in zip(last, spans, strict=True)
        ]
        before = torch.stack([part.mean() for part in own])
        distances = torch.stack([torch.linalg.vector_norm(sent - model, dim=1) for model in last])
        return Listening(losses, before, distances)

    def tested(
        self, question: Question, population: DevicePopulation, evaluator: Evaluator, tuned: torch.Tensor | None
    ) -> Evaluations:
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
                    found = evaluator.test(own[None], dataset, rows[client], loss)
                    predictions[candidate, span], losses[candidate, span] = found[0][0], found[1][0]
        return evaluations(question, tests, dataset, predictions, losses)

    def _models(self, question: Question, clients: Sequence[str], model: torch.Tensor) -> torch.Tensor:
        """Return what some clients test for one candidate: [clients, parameters]."""
        shared = model.expand(len(clients), -1)
        kept = self.vectors.of(question.federation, question.algorithm, clients, shared)
        return question.algorithm.own_models(shared, kept, self.private(question.algorithm))
