"""A network and a loss of your own, on digits that six wrong clients of twenty spoil.

Prints the accuracy under each rule and draws it over the rounds.
"""

import math

import torch
from torch import nn

from steelyard import Experiment


def network(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Any torch.nn.Module, for samples of this shape."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(feature_shape), 48), nn.Tanh(), nn.Linear(48, classes))


def smoothed(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss returns one number for each sample."""
    return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1, reduction="none")


if __name__ == "__main__":
    experiment = Experiment.load("quickstart", ["rounds.count=8"]).changed(
        {"model": {"name": network}, "training.loss": smoothed}
    )
    result = experiment.run()
    print(result)
    result.plot("server").save("own_network.svg")
