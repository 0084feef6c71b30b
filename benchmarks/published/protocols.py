"""What a cell of a table is, and the protocol that most of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MNIST_LABELS = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
"""Training rows of each digit."""
DATA: Mapping[str, Mapping[str, Any]] = {
    "mnist": {"source": "mnist", "path": "mnist"},
    "fashion-mnist": {"source": "mnist", "path": "fashion-mnist"},
    "cifar10": {"source": "npz", "path": "cifar10.npz", "held_out": "test"},
}
SIZES = {"mnist": MNIST_LABELS, "fashion-mnist": (6000,) * 10, "cifar10": (5000,) * 10}
_FILE = str.maketrans({" ": "-", "#": "", "=": "", "%": "", ".": "", ",": ""})


@dataclass(frozen=True)
class Cell:
    """One comparison of a table."""

    table: str
    data: str
    split: str
    document: Mapping[str, Any]
    rules: Sequence[str]
    seeds: int = 3
    cost: float = 1.0
    """How long it takes beside the others, for sharing them out."""

    @property
    def name(self) -> str:
        """What names it in files and on the page."""
        return f"{self.table}-{self.data}-{self.split}".translate(_FILE)


def niid(data: str, partition: Mapping[str, Any], rounds: int = 50) -> dict[str, Any]:
    """Return NIID-Bench's protocol as Flower's baseline has it; all test rows are the server's."""
    return {
        "name": "published",
        "seed": 1,
        "data": dict(DATA[data]) | ({"augment": AUGMENT} if data == "cifar10" else {}),
        "partition": {**partition, "test": "none", "server": "held-out", "server_report": "same"},
        "model": {"name": "lenet"},
        "training": {"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "epochs": 10, "batch_size": 64},
        "rounds": {"count": rounds, "fraction": 1.0},
        "weighing": {"criteria": ["DS"]},
        "store": {"checkpoint_every": 1, "clients_every": 50},
    }


AUGMENT: Mapping[str, Any] = {"pad": 4, "padding": "reflect", "flip": True}
CHANNELS: Mapping[str, Any] = {
    "mean": [round(value / 255, 6) for value in (125.3, 123.0, 113.9)],
    "deviation": [round(value / 255, 6) for value in (63.0, 62.1, 66.7)],
}
"""How NIID-Bench and NVFlare normalise CIFAR-10; Flower's baseline leaves its pixels between 0 and 1."""
