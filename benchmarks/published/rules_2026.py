"""The three weighting rules of 2026, each on the protocol that its authors tried it on, and FedAvg beside it.

FedSCS: NVFlare's pull request 5240. nvflare-adaptive: 5273. trust-mad: Flower's pull request 7335. What their figures
are, and what is not the same here, is said on the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.published.protocols import AUGMENT, CHANNELS, Cell, niid

PUBLISHED = {
    ("FedSCS, noise at one", "fedavg"): "66.19 ± 0.97",
    ("FedSCS, noise at one", "fedscs"): "68.88 ± 0.72",
    ("trust, three of ten hostile", "fedavg"): "10.1",
    ("trust, three of ten hostile", "trust-mad"): "20.8",
    ("trust, all honest", "fedavg"): "20.2",
    ("adaptive, Dirichlet 0.5", "fedavg"): "82.23 ± 0.97",
    ("adaptive, Dirichlet 0.5", "nvflare-adaptive"): "82.47 ± 0.66",
    ("adaptive, Dirichlet 0.1", "fedavg"): "70.61 ± 1.99",
    ("adaptive, Dirichlet 0.1", "nvflare-adaptive"): "70.71 ± 1.56",
}
"""By scene and rule, the last round's accuracy. ±: FedSCS the deviation, adaptive the 95 % interval; trust one run."""
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
    """The three rules of 2026 on their own protocols; the seeds are each protocol's own number."""
    del data, seeds, mu
    for scenes in (_fedscs, _trust, _adaptive):
        yield from scenes()
