"""The networks in plain torch and the training loop that a researcher writes by hand; shared by the torch peers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from work import Bench


class Convolutional(nn.Module):
    """conv5×5×32, pool, conv5×5×64, pool, dense, dense."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.dense1 = nn.Linear(3136, hidden)
        self.dense2 = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 1, 28, 28)
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.dense2(functional.relu(self.dense1(x.flatten(1))))


def network(bench: Bench) -> nn.Module:
    """Build the benchmark's network from a fixed seed."""
    torch.manual_seed(3)
    if bench.convolutional:
        return Convolutional(bench.hidden, bench.classes)
    return nn.Sequential(nn.Linear(784, bench.hidden), nn.ReLU(), nn.Linear(bench.hidden, bench.classes))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, features: torch.Tensor, labels: torch.Tensor, bench: Bench
) -> None:
    """Train one client in place: tensors in memory, shuffled mini-batches, no loader."""
    for _ in range(bench.epochs):
        order = torch.randperm(len(labels), device=labels.device)
        for rows in order.split(bench.batch):
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(features[rows]), labels[rows]).backward()
            optimizer.step()
