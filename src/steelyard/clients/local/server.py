"""What the server computes itself: the first model, and tests on its own samples."""

from __future__ import annotations

import numpy as np
import torch

from steelyard.clients.local.simulation import LocalClients
from steelyard.data.dataset import Rows
from steelyard.errors import UserError
from steelyard.learning import evaluation
from steelyard.learning.models import build
from steelyard.learning.parameters import Layout
from steelyard.messages import LossState, ServerTest


class LocalServer:
    """The server of a simulation; it shares data and model with the clients that it is made from."""

    def __init__(self, clients: LocalClients) -> None:
        self.clients = clients

    def initial(self, seed: int) -> torch.Tensor:
        """Return the first global model, a pure function of the seed."""
        room = self.clients.room
        shelf = room.stock(seed).shelf
        module = build(room.model, shelf.features.shape[1:], shelf.classes, seed)
        return Layout.of(module).read(module).to(room.device)

    def test(self, seed: int, models: torch.Tensor) -> ServerTest:
        """Test models [candidates, parameters] on the rows on which the server weighs."""
        return self._judge(seed, models, self.clients.room.stock(seed).population.server)

    def report(self, seed: int, models: torch.Tensor) -> ServerTest:
        """Test models [candidates, parameters] on the rows on which the server reports."""
        return self._judge(seed, models, self.clients.room.stock(seed).population.report)

    def _judge(self, seed: int, models: torch.Tensor, held: Rows) -> ServerTest:
        room = self.clients.room
        stock = room.stock(seed)
        if not len(held):
            raise UserError(
                "partition.server: the server holds no test samples; allowed: held-out or fraction, with rows in it"
            )
        rows = torch.from_numpy(np.asarray(held, dtype=np.int64)).to(room.device)
        loss = room.loss(LossState(room.training.loss))
        said, _ = self.clients.examiner.judge(models.to(room.device), stock.shelf, rows, loss)
        labels = stock.shelf.labels[rows]
        if stock.shelf.classes:
            counts = evaluation.confusion(said, labels, stock.shelf.classes)
            return ServerTest(evaluation.accuracy(counts), evaluation.f1(counts))
        errors = evaluation.errors(said, labels)
        return ServerTest(np.zeros(len(models)), np.zeros((len(models), 0)), errors)
