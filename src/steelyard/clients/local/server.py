"""What the server computes itself: the first model, and tests on its own samples."""

from __future__ import annotations

import numpy as np
import torch

from steelyard.clients.local.simulation import Simulation
from steelyard.data.dataset import Rows
from steelyard.errors import UserError
from steelyard.learning import evaluation
from steelyard.learning.models import build
from steelyard.learning.parameters import Layout
from steelyard.messages import LossState, ServerTest


class SimulationServer:
    """The server of a simulation; it shares data and model with the clients that it is made from."""

    def __init__(self, clients: Simulation) -> None:
        self.clients = clients

    def initial(self, seed: int) -> torch.Tensor:
        """Return the first global model, a pure function of the seed."""
        context = self.clients.context
        dataset = context.population(seed).dataset
        module = build(context.model, dataset.features.shape[1:], dataset.classes, seed)
        return Layout.of(module).read(module).to(context.device)

    def test(self, seed: int, models: torch.Tensor) -> ServerTest:
        """Test models [candidates, parameters] on the rows on which the server weighs."""
        return self._test(seed, models, self.clients.context.population(seed).source.server)

    def report(self, seed: int, models: torch.Tensor) -> ServerTest:
        """Test models [candidates, parameters] on the rows on which the server reports."""
        return self._test(seed, models, self.clients.context.population(seed).source.report)

    def _test(self, seed: int, models: torch.Tensor, held: Rows) -> ServerTest:
        context = self.clients.context
        dataset = context.population(seed).dataset
        if not len(held):
            raise UserError(
                "partition.server: the server holds no test samples; allowed: held-out or fraction, with rows in it"
            )
        rows = torch.from_numpy(np.asarray(held, dtype=np.int64)).to(context.device)
        loss = context.loss(LossState(context.training.loss))
        predictions, _ = self.clients.evaluator.test(models.to(context.device), dataset, rows, loss)
        labels = dataset.labels[rows]
        if dataset.classes:
            counts = evaluation.confusion(predictions, labels, dataset.classes)
            return ServerTest(evaluation.accuracy(counts), evaluation.f1(counts))
        errors = evaluation.errors(predictions, labels)
        return ServerTest(np.zeros(len(models)), np.zeros((len(models), 0)), errors)
