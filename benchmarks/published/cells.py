"""The cells of the tables: each is one comparison, its protocol as an experiment, its rules and its seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.published.flower_split import dirichlet_table, label_table

MNIST_LABELS = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
"""Training rows of each digit."""
DATA: Mapping[str, Mapping[str, Any]] = {
    "mnist": {"source": "mnist", "path": "mnist"},
    "fashion-mnist": {"source": "mnist", "path": "fashion-mnist"},
    "cifar10": {"source": "npz", "path": "cifar10.npz", "held_out": "test"},
}
SIZES = {"mnist": MNIST_LABELS, "fashion-mnist": (6000,) * 10, "cifar10": (5000,) * 10}
CLIENTS = 10
ALL_MU = (0.001, 0.01, 0.1, 1.0)


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
    needs: Sequence[str] = field(default=())
    """Files of this folder that are copied beside the experiment: networks and algorithms of our own."""

    @property
    def name(self) -> str:
        """What names it in files and on the page."""
        return f"{self.table}-{self.data}-{self.split}".replace(" ", "-").replace("#", "").replace("=", "")


def prox(values: Sequence[float]) -> list[str]:
    """FedProx as a rule, for each of these μ."""
    return [f"fedprox(mu={value:g})" for value in values]


def split_of_flower(data: str, split: str) -> dict[str, Any]:
    """Return `[partition]` with as many rows of each label at each client as in Flower's baseline."""
    if split == "IID":
        return {"scheme": "iid", "clients": CLIENTS}
    kind, value = split.split("=") if "=" in split else split.split(" ")
    if kind == "Dirichlet":
        return {"scheme": "table", "table": dirichlet_table(SIZES[data], CLIENTS, float(value))}
    return {"scheme": "table", "table": label_table(SIZES[data], CLIENTS, int(value))}


def equal_sizes(partition: Mapping[str, Any]) -> bool:
    """Whether all clients have as many rows: then they take as many steps, and FedNova is FedAvg."""
    return partition["scheme"] == "iid" or len({sum(line) for line in partition["table"]}) == 1


def split_drawn(split: str) -> dict[str, Any]:
    """Return `[partition]` that each seed draws anew, by NIID-Bench's rules."""
    if split == "IID":
        return {"scheme": "iid", "clients": CLIENTS}
    if split.startswith("Dirichlet"):
        alpha = float(split.split(" ")[1])
        return {"scheme": "noniid-labeldir", "clients": CLIENTS, "alpha": alpha, "minimum": 10}
    return {"scheme": split, "clients": CLIENTS}


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
        "store": {"checkpoint_every": 5, "clients_every": 50},
    }


AUGMENT: Mapping[str, Any] = {"pad": 4, "crop": True, "flip": True}
SPLITS = ("IID", "Dirichlet 0.5", "#C=1", "#C=2", "#C=3")


def table_a(data: Sequence[str], seeds: int, mu: Sequence[float]) -> Iterator[Cell]:
    """Table A: every split × FedAvg, SCAFFOLD, FedProx, FedNova."""
    for name in data:
        for split in SPLITS:
            # Where one label a client makes training unstable, the best of four μ is what was published.
            chosen = ALL_MU if split == "#C=1" else mu
            partition = split_of_flower(name, split)
            nova = () if equal_sizes(partition) else ("fednova",)
            rules = ("fedavg", *nova, "scaffold", *prox(chosen))
            yield Cell("A", name, split, niid(name, partition), rules, seeds, 1 + len(rules) / 4)


def table_a_drawn(data: Sequence[str], seeds: int, mu: Sequence[float]) -> Iterator[Cell]:
    """Table A with a split of its own for each seed: what the published deviations leave out."""
    for name in data:
        for split in SPLITS[1:]:
            rules = ("fedavg", "fednova", "scaffold", *prox(mu))
            yield Cell("A-drawn", name, split, niid(name, split_drawn(split)), rules, seeds, 2)


TABLES = {"A": table_a, "A-drawn": table_a_drawn}
