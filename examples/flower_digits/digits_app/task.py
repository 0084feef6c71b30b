"""The network, the rows of every client, training and testing: nothing here knows of weights."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

SIZES = [450, 450, 100, 100, 100, 100]
"""Rows of each client. The two largest have wrong labels: every digit is called the next one."""
WRONG = 2
SERVER, TEST = slice(1300, 1360), slice(1360, None)
"""Rows that the server holds, and rows that nobody trains on."""


class Net(nn.Module):
    """One hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.relu(self.hidden(x)))


def all_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return features and labels, shuffled in the same way everywhere."""
    features, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(features / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]


def load_data(partition_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of one client."""
    features, labels = all_rows()
    begin = sum(SIZES[:partition_id])
    rows = slice(begin, begin + SIZES[partition_id])
    return features[rows], (labels[rows] + int(partition_id < WRONG)) % 10


def held(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows that no client has: SERVER or TEST."""
    features, labels = all_rows()
    return features[rows], labels[rows]


def train(net: Net, data: tuple[torch.Tensor, torch.Tensor], epochs: int, lr: float) -> float:
    """Train a network in place; returns the last loss."""
    features, labels = data
    optimiser = torch.optim.SGD(net.parameters(), lr=lr)
    loss = torch.tensor(0.0)
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(labels)), 25):
            optimiser.zero_grad()
            loss = F.cross_entropy(net(features[batch]), labels[batch])
            loss.backward()
            optimiser.step()
    return loss.item()


def test(net: Net, data: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """Return loss and accuracy of a network."""
    features, labels = data
    with torch.no_grad():
        outputs = net(features)
    return float(F.cross_entropy(outputs, labels)), float((outputs.argmax(1) == labels).float().mean())
