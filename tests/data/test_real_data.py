"""The real files, where they are at hand: counts as their makers give them, and the partitions of the papers."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from steelyard.data import Dataset, DataSettings, PartitionSettings, load, share_out
from steelyard.experiment.loading import load as recipe


def needed(name: str) -> str:
    folders = [Path(os.environ.get("STEELYARD_DATA", "../shared/data")), Path("../shared/data")]
    if not any((folder / name).exists() for folder in folders):
        pytest.skip(f"needs {name} in STEELYARD_DATA or ../shared/data")
    return name


@pytest.fixture(scope="module")
def mnist() -> Dataset:
    needed("mnist")
    return load(DataSettings(source="mnist"))


def test_mnist_counts(mnist):
    assert mnist.features.shape == (70000, 1, 28, 28)
    assert mnist.held_out.sum() == 10000
    train = mnist.labels.numpy()[~mnist.held_out]
    assert np.bincount(train).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def test_adafed_simulation_1_draws_with_overlap_and_says_so(mnist):
    lines = [[0] * 10 for _ in range(5)]
    for label in range(10):
        lines[label // 2][label] = {0: 100, 5: 200}.get(label, 5500)
    lines.append([500] * 10)
    settings = PartitionSettings(scheme="table", table=lines, overlap=True, test="none", server="held-out")
    population = share_out(mnist, settings, 1)
    for line, client in zip(lines, population.clients, strict=True):
        assert np.bincount(mnist.labels.numpy()[client.train], minlength=10).tolist() == line
    assert population.notes[0] == "class 2: 6000 rows asked for, 5958 there: 42 drawn with overlap"


def test_the_hostile_clients_of_adafed_3_are_what_they_were(mnist):
    described = recipe("adafed-3")
    population = share_out(mnist, described.partition, 1, described.flaws)
    digest = hashlib.sha256()
    for client in population.clients:
        digest.update(client.client.encode())
        for part in (client.train, client.test, population.train_labels(client).numpy()):
            digest.update(part.tobytes())
    digest.update(population.server.tobytes() + population.report.tobytes())
    # Measured when copies with wrong labels were a part of the partition.
    assert digest.hexdigest() == "ca0f650ee0cc5331b28ebc391a9e089ea5f5fd8355dc22d0555259e91bee511b"
