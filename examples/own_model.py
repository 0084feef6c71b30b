"""A network and a loss of one's own, on the embedded digits."""

import torch
from torch import nn

from steelyard import Experiment


def network(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Any torch.nn.Module; it is told the shape of a sample and the number of classes."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(feature_shape[-1] * feature_shape[-2], 48), nn.Tanh(), nn.Linear(48, classes)
    )


def smoothed(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss returns one number per sample; the mean is taken for it."""
    return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1, reduction="none")


if __name__ == "__main__":
    experiment = Experiment.load("quickstart").changed(
        {"rounds.count": 10, "model": {"name": f"{__file__}:network"}, "training.loss": f"{__file__}:smoothed"}
    )
    result = experiment.run()
    print(result.history.rounds[["rule", "round", "accuracy"]].tail(4))
