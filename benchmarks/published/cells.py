"""The cells of the tables: each is one comparison, its protocol as an experiment, its rules and its seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.published.flower_split import (
    Chance,
    dirichlet_table,
    label_table,
    of_later_code,
    of_the_table,
    pairs_table,
)
from benchmarks.published.protocols import AUGMENT, CHANNELS, SIZES, Cell, niid
from benchmarks.published.rules_2026 import table_2026

CLIENTS = 10
ALL_MU = (0.001, 0.01, 0.1, 1.0)


def prox(values: Sequence[float]) -> list[str]:
    """FedProx as a rule, for each of these μ."""
    return [f"fedprox(mu={value:g})" for value in values]


def split_of_flower(data: str, split: str, chance: Callable[[], Chance] = of_the_table) -> dict[str, Any]:
    """Return `[partition]` with as many rows of each label at each client as for Flower's table, or by later code."""
    if split == "IID":
        return {"scheme": "iid", "clients": CLIENTS}
    kind, value = split.split("=") if "=" in split else split.split(" ")
    if kind == "Dirichlet":
        return {"scheme": "table", "table": dirichlet_table(SIZES[data], CLIENTS, float(value), chance())}
    return {"scheme": "table", "table": label_table(SIZES[data], CLIENTS, int(value), chance())}


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


SPLITS = ("IID", "Dirichlet 0.5", "#C=1", "#C=2", "#C=3")


def table_a(data: Sequence[str], seeds: int, mu: Sequence[float]) -> Iterator[Cell]:
    """Table A: every split × FedAvg, SCAFFOLD, FedProx, FedNova; the best of all four μ is what was published."""
    for name in data:
        for split in SPLITS:
            partition = split_of_flower(name, split)
            nova = () if equal_sizes(partition) else ("fednova",)
            rules = ("fedavg", *nova, "scaffold", *prox(mu))
            yield Cell("A", name, split, niid(name, partition), rules, seeds, 1 + len(rules) / 4)


def table_a_later(data: Sequence[str], seeds: int, mu: Sequence[float]) -> Iterator[Cell]:
    """Table A on the splits that Flower's code draws since 6 November 2023: not those of its table."""
    for name in data:
        for split in ("Dirichlet 0.5", "#C=2", "#C=3"):
            rules = ("fedavg", "fednova", "scaffold", *prox(mu))
            yield Cell("A-later", name, split, niid(name, split_of_flower(name, split, of_later_code)), rules, seeds, 2)


def table_a_drawn(data: Sequence[str], seeds: int, mu: Sequence[float]) -> Iterator[Cell]:
    """Table A with a split of its own for each seed: what the published deviations leave out."""
    for name in data:
        for split in SPLITS[1:]:
            rules = ("fedavg", "fednova", "scaffold", *prox(mu))
            yield Cell("A-drawn", name, split, niid(name, split_drawn(split)), rules, seeds, 2)


def table_a_normalised(data: Sequence[str], seeds: int, mu: Sequence[float]) -> Iterator[Cell]:
    """FedAvg on CIFAR-10 at Dirichlet .5 with normalised pixels, as NIID-Bench has them: Flower's split, drawn ones."""
    del data, mu
    for word, partition in (
        ("split 42", split_of_flower("cifar10", "Dirichlet 0.5")),
        ("drawn", split_drawn("Dirichlet 0.5")),
    ):
        document = niid("cifar10", partition)
        document["data"]["augment"] = {**AUGMENT, **CHANNELS}
        yield Cell("A-normalised", "cifar10", f"Dirichlet 0.5 {word}", document, ("fedavg",), seeds)


def nvflare(alpha: float, **training: Any) -> dict[str, Any]:
    """Return NVFlare's CIFAR-10 example: eight sites, the split of its seed 0, ModerateCNN, four epochs, a cosine."""
    table = dirichlet_table(SIZES["cifar10"], 8, alpha, np.random.RandomState(0))
    document = niid("cifar10", {"scheme": "table", "table": table})
    document["data"]["augment"] = {**AUGMENT, **CHANNELS}
    document["model"] = {"name": "moderate-cnn"}
    document["training"] = {"learning_rate": 0.05, "momentum": 0.9, "epochs": 4, "batch_size": 64}
    document["training"] |= {"schedule": {"kind": "cosine", "lowest": 0.01}} | training
    document["algorithm"] = {"plugins": ["variants.py"]}
    document["store"]["checkpoint_every"] = 2  # a checkpoint holds every client's controls, some 600 MB
    return document


def table_b(data: Sequence[str], seeds: int, mu: Sequence[float]) -> Iterator[Cell]:
    """SCAFFOLD at Dirichlet .1, 82.6 or 11.3: with one thing changed at a time."""
    del data, mu
    main = nvflare(0.1)
    rules = ("fedavg", "scaffold", "scaffold-inside", "scaffold-frozen")
    yield Cell("B", "cifar10", "all take part", main, rules, 1, 8)
    constant = nvflare(0.1)
    del constant["training"]["schedule"]
    yield Cell("B", "cifar10", "rate stays", constant, ("fedavg", "scaffold"), 1, 4)
    some = nvflare(0.1)
    some["rounds"]["fraction"] = 0.75
    yield Cell("B", "cifar10", "75 % take part", some, ("fedavg", "scaffold", "scaffold-unshared"), 1, 6)
    gentle = nvflare(0.1, learning_rate=0.01)
    yield Cell("B", "cifar10", "rate .01", gentle, ("fedavg", "scaffold", "nvflare-adaptive"), 1, 6)
    plain = nvflare(0.1)
    plain["data"]["augment"] = dict(CHANNELS)
    yield Cell("B", "cifar10", "no crops, no flips", plain, ("fedavg", "scaffold"), 1, 4)
    yield Cell("B", "cifar10", "one epoch", nvflare(0.1, epochs=1), ("fedavg", "scaffold"), 1, 1)
    yield Cell("B", "cifar10", "three seeds", main, ("fedavg", "scaffold"), 3, 12)


def table_c(data: Sequence[str], seeds: int, mu: Sequence[float]) -> Iterator[Cell]:
    """PFLlib's board on Fashion-MNIST: 20 clients, models of their own, tested on a quarter of each client's rows.

    All 70,000 images are shared out, by the draws of PFLlib's seed 1.
    """
    del data, mu
    for word, table in (
        ("two labels", pairs_table((7000,) * 10, 20, np.random.RandomState(1))),
        ("Dirichlet 0.1", dirichlet_table((7000,) * 10, 20, 0.1, np.random.RandomState(1))),
    ):
        document = niid("fashion-mnist", {}, rounds=2000)
        document["partition"] = {"scheme": "table", "table": table, "rows": "all"}
        document["partition"] |= {"test": "local", "test_fraction": 0.25}
        document["data"]["augment"] = {"mean": [0.5], "deviation": [0.5]}
        document["model"] = {"name": "lenet", "arguments": {"first": 32, "second": 64, "hidden": [512]}}
        document["training"] = {"learning_rate": 0.005, "epochs": 1, "batch_size": 10}
        document["rounds"]["evaluate_every"] = 10
        yield Cell("C", "fashion-mnist", word, document, ("fedavg", "fine-tuned", "ditto", "fedala"), 1, 3)


TABLES = {
    "A": table_a,
    "A-later": table_a_later,
    "A-drawn": table_a_drawn,
    "A-normalised": table_a_normalised,
    "B": table_b,
    "2026": table_2026,
    "C": table_c,
}
