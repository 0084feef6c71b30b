"""AdaFed with transfer learning (paper 001 §1): a network that learnt MNIST is frozen, clients train its last layer.

    python -m benchmarks.transfer --out OUT --seeds 10
    python -m benchmarks.transfer --out OUT --seeds 10 --wrong 0.3

The paper claims it and gives neither data nor figures. Here the layers below learn MNIST's 70,000 images, made 8 by 8
pixels, and twenty clients with few labels each (Dirichlet 0.3) share scikit-learn's digits, which others wrote.
`--wrong` gives a share of the clients wrong labels. Weights are sizes (`fedavg`), accuracy on the server's rows
(`adafed-weights`), or that with the loss of each class adapted besides (`adafed`). `steelyard table OUT` shows the
means over seeds.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Annotated, Any

import torch
import typer
from torch import nn

from benchmarks.kit import Out, start
from steelyard import Experiment
from steelyard.data.sources.source import DataSettings

WIDE, CLASSES = 64, 10
RULES = ("fedavg", "adafed-weights", "adafed")


def small(images: torch.Tensor) -> torch.Tensor:
    """Return MNIST's 28 by 28 bytes as scikit-learn has its digits: 8 by 8 means of blocks, as numbers from 0 to 1."""
    padded = nn.functional.pad(images.reshape(-1, 1, 28, 28).float() / 255, (2, 2, 2, 2))
    return nn.functional.avg_pool2d(padded, 4).flatten(1)


@cache
def pretrained() -> nn.Sequential:
    """Return the network after three epochs of MNIST; the same on every call."""
    data = DataSettings(source="mnist").read()
    rows, labels = small(data.features), data.labels.long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        dense = [nn.Linear(64, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, CLASSES)]
        model = nn.Sequential(nn.Flatten(), *dense)
        optimiser = torch.optim.Adam(model.parameters(), 0.003)
        for _ in range(3):
            for batch in torch.randperm(len(rows)).split(200):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(rows[batch]), labels[batch]).backward()
                optimiser.step()
    return model


def network() -> nn.Module:
    """Return the network with all but its last layer frozen; the last one begins anew."""
    model = copy.deepcopy(pretrained()).requires_grad_(False)
    model[-1] = nn.Linear(WIDE, CLASSES)
    return model


def experiment(wrong: float) -> Experiment:
    """Return the federation on scikit-learn's digits."""
    weights = {"criteria": ["VP"], "when_zero": "keep"}
    described: dict[str, Any] = {
        "name": "transfer",
        "data": {"source": "digits"},
        "partition": {
            "scheme": "dirichlet",
            "alpha": 0.3,
            "clients": 20,
            "minimum": 10,
            "test": "local",
            "test_fraction": 0.2,
            "server": "fraction",
            "server_fraction": 0.3,
            "server_report": "apart",
        },
        "flaws": [{"kind": "labels-flipped", "pick": "random", "share": wrong}] if wrong else [],
        "model": {"name": network},
        "training": {"learning_rate": 0.1, "epochs": 3, "batch_size": 10},
        "rounds": {"count": 20, "fraction": 0.5},
        "weighing": {"name": "adafed", **weights, "loss": {"adapt": "class-f1", "epsilon": 0.1}},
        "beside": {"adafed-weights": weights, "fedavg": {"criteria": ["DS"]}},
    }
    return Experiment(**described)


def main(
    out: Out,
    seeds: int = 10,
    wrong: Annotated[float, typer.Option(help="share of the clients whose labels are wrong")] = 0.0,
) -> None:
    """Train, weigh, print."""
    print(experiment(wrong).compare(RULES, seeds, out, progress=False))


if __name__ == "__main__":
    start(main)
