"""Tests of models on the clients' rows: of the common model, or of each client's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from steelyard.clients.local.context import SimulationContext
from steelyard.clients.local.evaluator import evaluations
from steelyard.clients.local.population import DevicePopulation
from steelyard.messages.updates import Evaluations, LossState, Question

TESTED_TOGETHER = 64
"""Clients whose own models lie in memory at once while they are tested."""


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

    def _own(self, question: Question, population: DevicePopulation, tuned: torch.Tensor | None) -> Evaluations:
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
        kept = self.context.kept.vectors(question.federation, question.algorithm, clients, shared)
        return question.algorithm.own_models(shared, kept, self.context.private(question.algorithm))
