"""The cells of the tables: each is one comparison, its protocol as an experiment, its rules and its seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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

CLIENTS = 10


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


PERSONAL = ("fedavg", "local-only", "fine-tuned", "ditto", "fedala", "fedrep", "apfl", "fedfomo")
"""FedAvg, and what stands on PFLlib's board of Fashion-MNIST and is built in; fine-tuning is not on it."""


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
        yield Cell("C", "fashion-mnist", word, document, PERSONAL, 1, 3)


def table_scaffold(data: Sequence[str], seeds: int, mu: Sequence[float]) -> Iterator[Cell]:
    """Why SCAFFOLD ends at 10 % elsewhere: one step as other code takes it, a tenth of 100 clients a round."""
    del data, mu
    rules = ("fedavg", "scaffold", "scaffold-inside", "scaffold-unshared", "scaffold-both")
    for alpha, momentum in ((0.5, 0.0), (0.5, 0.9), (0.1, 0.0), (0.1, 0.9)):
        partition = {"scheme": "dirichlet", "clients": 100, "alpha": alpha, "minimum": 20}
        document = niid("cifar10", partition, rounds=200)
        document["data"] = {**DATA["cifar10"], "normalise": "standard"}
        document["training"]["momentum"] = momentum
        document["rounds"]["fraction"] = 0.1
        document["algorithm"] = {"plugins": ["variants.py"]}
        yield Cell("scaffold", "cifar10", f"Dirichlet {alpha}, momentum {momentum}", document, rules, seeds, 10)


SITES, NOISY, SALT, PEPPER = 5, 0.8, 0.3, 0.3
NETWORK = f"{Path(__file__).parent / 'network.py'}:three_convolutions"
HALVES = {"mean": [0.5] * 3, "deviation": [0.5] * 3}


def with_noise(source: Path, target: Path) -> None:
    """Write CIFAR-10 dealt to five sites, 80 % of the last one's images with white and black pixels in place of 60 %.

    One split and one noise for all seeds, as there. Whether colours are struck one by one is not said; here a pixel is.
    """
    chance = np.random.default_rng(0)
    with np.load(source) as arrays:
        images, labels, test = arrays["x"].copy(), arrays["y"], arrays["test"]
    site = np.zeros(len(labels), dtype=np.int64)
    training = chance.permutation(np.flatnonzero(~test))
    for number, rows in enumerate(np.array_split(training, SITES)):
        site[rows] = number
    struck = chance.permutation(np.flatnonzero(~test & (site == SITES - 1)))
    struck = struck[: round(NOISY * len(struck))]
    drawn = chance.random((len(struck), *images.shape[1:3]))
    part = images[struck]
    part[drawn < SALT] = 255
    part[drawn > 1 - PEPPER] = 0
    images[struck] = part
    np.savez(target, x=images, y=labels, test=test, site=site)


def _fedscs() -> Iterator[Cell]:
    rules = ("fedavg", "fedscs", "trust-mad", "nvflare-adaptive")
    for word, partition in (
        ("FedSCS, noise at one", {"scheme": "natural", "clients": SITES}),
        ("FedSCS, no noise", {"scheme": "iid", "clients": SITES}),
    ):
        document = niid("cifar10", partition, rounds=10)
        del document["data"]["augment"]
        if partition["scheme"] == "natural":
            document["data"]["owner"] = "site"
        document["model"] = {"name": NETWORK}
        document["training"] = {"learning_rate": 0.01, "momentum": 0.9, "epochs": 4, "batch_size": 64}
        yield Cell("2026", "cifar10", word, document, rules, 5, 6)


def _trust() -> Iterator[Cell]:
    """Ten clients of 4,000 rows, five rounds of one epoch; the hostile ones add noise 31 times as long as an update."""
    flaw = {"kind": "gaussian", "amount": 31, "clients": ["client-000", "client-001", "client-002"]}
    for rate, tail in ((0.1, ""), (0.01, ", rate .01")):
        for word, flaws in (("three of ten hostile", [flaw]), ("all honest", [])):
            document = niid("cifar10", {"scheme": "iid", "clients": 10, "samples": 4000}, rounds=5)
            document["data"]["augment"] = HALVES
            document["training"] = {"learning_rate": rate, "momentum": 0.9, "epochs": 1, "batch_size": 32}
            rules = ("fedavg", "trust-mad", "fedscs", "nvflare-adaptive")
            yield Cell("2026", "cifar10", f"trust, {word}{tail}", document | {"flaws": flaws}, rules, 10)


def _adaptive() -> Iterator[Cell]:
    """Eight sites, a split a seed, nine tenths of their rows; the rest tells how the worst site fares."""
    for alpha in (0.5, 0.1):
        partition = {"scheme": "noniid-labeldir", "clients": 8, "alpha": alpha, "minimum": 20}
        document = niid("cifar10", partition)
        document["partition"] |= {"test": "local", "test_fraction": 0.1}
        document["data"]["augment"] = {**AUGMENT, **CHANNELS}
        document["model"] = {"name": "moderate-cnn"}
        document["training"] = {"learning_rate": 0.05, "momentum": 0.9, "epochs": 4, "batch_size": 64}
        document["training"] |= {"schedule": {"kind": "cosine", "lowest": 0.01}}
        yield Cell("2026", "cifar10", f"adaptive, Dirichlet {alpha}", document, ("fedavg", "nvflare-adaptive"), 5, 20)


def table_2026(data: Sequence[str], seeds: int, mu: Sequence[float]) -> Iterator[Cell]:
    """The three rules of 2026, each on the protocol that its authors tried it on, and FedAvg beside it.

    FedSCS: NVFlare's pull request 5240. nvflare-adaptive: 5273. trust-mad: Flower's pull request 7335. The seeds are
    each protocol's own number.
    """
    del data, seeds, mu
    for scenes in (_fedscs, _trust, _adaptive):
        yield from scenes()


TABLES = {
    "A": table_a,
    "A-later": table_a_later,
    "A-drawn": table_a_drawn,
    "A-normalised": table_a_normalised,
    "B": table_b,
    "2026": table_2026,
    "C": table_c,
    "scaffold": table_scaffold,
}
