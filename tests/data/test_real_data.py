"""MNIST itself, where it is at hand: the partition of a paper."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from steelyard.data import DataSettings, load, share_out
from steelyard.experiment.loading import load as recipe


def test_the_hostile_clients_of_adafed_3_are_what_they_were():
    folders = (Path(os.environ.get("STEELYARD_DATA", "../shared/data")), Path("../shared/data"))
    if not any((folder / "mnist").exists() for folder in folders):
        pytest.skip("needs mnist in STEELYARD_DATA or ../shared/data")
    described = recipe("adafed-3")
    population = share_out(load(DataSettings(source="mnist")), described.partition, 1, described.flaws)
    digest = hashlib.sha256()
    for client in population.clients:
        digest.update(client.client.encode())
        for part in (client.train, client.test, population.train_labels(client).numpy()):
            digest.update(part.tobytes())
    digest.update(population.server.tobytes() + population.report.tobytes())
    # Measured when copies with wrong labels were a part of the partition.
    assert digest.hexdigest() == "ca0f650ee0cc5331b28ebc391a9e089ea5f5fd8355dc22d0555259e91bee511b"
