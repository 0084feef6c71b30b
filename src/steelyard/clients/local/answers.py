"""Clients' answers to a question, put together from what the models predicted on all test samples at once."""

from __future__ import annotations

import numpy as np
import torch

from steelyard.clients.local.device_data.dataset import DeviceDataset, Ints, TestRows
from steelyard.learning import evaluation
from steelyard.messages import Evaluations, Floats, Question


def evaluations(
    question: Question, tests: TestRows, dataset: DeviceDataset, predictions: torch.Tensor, losses: torch.Tensor
) -> Evaluations:
    """Return each client's score and loss of each model, from predictions and losses [models, tested rows].

    Scores are accuracies for classes, and minus the root mean squared error for a regression.
    """
    classes = dataset.classes
    labels = dataset.labels[tests.unique]
    metrics: dict[str, Floats] = {}
    right = None
    if classes:
        hits = (predictions == labels).to(torch.float64).cpu().numpy()
        scores = tests.sums(hits) / tests.sizes
        if question.detailed and len(hits):
            right = hits[0][tests.index].astype(bool)
    else:
        metrics = _regression(predictions, labels, tests.index, tests.sizes)
        scores = -np.sqrt(tests.sums((predictions - labels).square().to(torch.float64).cpu().numpy()) / tests.sizes)
    return Evaluations(
        federation=question.federation,
        round=question.round,
        clients=tests.clients,
        samples=tests.sizes,
        scores=scores,
        losses=tests.sums(losses.to(torch.float64).cpu().numpy()) / tests.sizes,
        metrics=metrics,
        right=right,
    )


def _regression(predictions: torch.Tensor, labels: torch.Tensor, index: Ints, sizes: Ints) -> dict[str, Floats]:
    """Return mape, mae and rmse of the first candidate on every client."""
    tested = torch.from_numpy(index).to(predictions.device)
    counts = sizes.tolist()
    parts = zip(predictions[0][tested].split(counts), labels[tested].split(counts), strict=True)
    each = [evaluation.errors(mine, true) for mine, true in parts]
    return {name: np.array([float(found[name]) for found in each]) for name in ("mape", "mae", "rmse")}
