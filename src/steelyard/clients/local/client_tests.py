"""Testing models on the clients' own rows: one model for all, or each client's own; how often a backdoor works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from steelyard.clients.local.context import SimulationContext
from steelyard.clients.local.engines.engine import TrainingSetup
from steelyard.clients.local.evaluator import Evaluator, evaluations
from steelyard.clients.local.personal import OwnModels
from steelyard.clients.local.population import DevicePopulation
from steelyard.messages.updates import Evaluations, LossState, Question

Tune = Callable[[Question], torch.Tensor | None]
"""From a question to the models that clients have trained on before they test them; None where they do not."""


class ClientTests:
    """Answers questions for all clients of a simulation."""

    def __init__(self, context: SimulationContext, own: OwnModels, tune: Tune) -> None:
        self.context, self._own, self._tune = context, own, tune
        self.make_evaluator: Callable[[TrainingSetup], Evaluator] = Evaluator
        """Makes what tests models; another one may share tests out."""
        self._evaluator: Evaluator | None = None

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        """Test models on every client; one answer per question, in order."""
        answers: dict[int, Evaluations] = {}
        for index, question in enumerate(questions):
            if question.algorithm.personal:
                population = self.context.population(question.seed)
                answers[index] = self._own.tested(question, population, self.evaluator, self._tune(question))
        common = [index for index in range(len(questions)) if index not in answers]
        for seed in dict.fromkeys(questions[index].seed for index in common):
            # Questions of one seed concern the same samples: all their models are tested on them in one go.
            indices = [index for index in common if questions[index].seed == seed]
            population = self.context.population(seed)
            loss = self.context.loss(LossState(self.context.training.loss))
            models = torch.cat([questions[index].models.to(self.context.device) for index in indices])
            predictions, losses = self.evaluator.test(models, population.dataset, population.tests.unique, loss)
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
        found, _ = self.evaluator.test(models, population.dataset, torch.from_numpy(rows).to(self.context.device), loss)
        fooled = (found == backdoor.target).to(torch.float64).cpu().numpy()[:, where.reshape(-1)]
        counts = np.array([len(mine) for mine in held], dtype=np.float64)
        ends = np.cumsum(counts).astype(np.int64)
        for index, each in zip(indices, fooled, strict=True):
            parts = np.split(each, ends[:-1])
            rates = np.array([float(part.mean()) if len(part) else 0.0 for part in parts])
            more = {"backdoor": rates, "backdoor_rows": counts}
            answers[index] = replace(answers[index], metrics={**answers[index].metrics, **more})

    @property
    def evaluator(self) -> Evaluator:
        """What tests models; made when first needed."""
        if self._evaluator is None:
            self._evaluator = self.make_evaluator(self.context.setup)
        return self._evaluator

    def close(self) -> None:
        """Let go of what lies on the device."""
        self._evaluator = None
