"""Fingerprints of data: cheap to take, and different when a single number of the data is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    # Only for annotations: the process of a node that speaks to the server does without torch.
    from steelyard.data.dataset import Population


def digest(arrays: Iterable[object]) -> str:
    """Return the SHA-256, shortened, of arrays with their types and shapes; texts and None count as themselves."""
    found = hashlib.sha256()
    for array in arrays:
        if isinstance(array, np.ndarray) and array.dtype.kind in "biuf":
            found.update(f"{array.dtype.str}{array.shape}".encode())
            found.update(np.ascontiguousarray(array).view(np.uint8).data)
        else:
            text = "\n".join(map(str, array.tolist())) if isinstance(array, np.ndarray) else str(array)
            found.update(f"{len(text)}:{text}".encode())
    return found.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, or of the names and bytes of all files in a folder."""
    found = hashlib.sha256()
    for file in sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]:
        found.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                found.update(block)
    return found.hexdigest()


def fingerprint(population: Population) -> dict[str, str]:
    """Return what tells a population from another: its features, its labels, and who holds which rows.

    A resumed run holds it against the one that the run began with.
    """
    dataset = population.dataset
    rows: list[object] = [population.server, population.report]
    for client in population.clients:
        labels = None if client.train_labels is None else client.train_labels.numpy()
        rows += [client.client, client.train, client.test, labels]
    behaviours = [f"{name}={how}" for name, how in sorted(population.behaviours.items())]
    return {
        "samples": str(len(dataset)),
        "features": digest([dataset.features.cpu().numpy(), *(dataset.marks[name] for name in sorted(dataset.marks))]),
        "labels": digest([dataset.labels.cpu().numpy()]),
        "clients' rows": digest([*rows, *behaviours]),
    }
