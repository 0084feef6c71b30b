"""A backdoor: something in images that hostile clients teach the model to take for one class.

The pattern is a full-bright square in the bottom right corner, a ninth of the height wide (at least 2 pixels), in every
channel (T. Gu, B. Dolan-Gavitt, S. Garg: "BadNets", 2017). Test rows with the pattern say how often it works.
A semantic backdoor changes no pixel: images of one class that have something in common, here the brightest quarter of
it, are to be taken for another (E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin, V. Shmatikov: "How To Backdoor Federated
Learning", AISTATS 2020, with cars of one look).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.data.dataset import Backdoor, Dataset, Rows


def stamped(features: torch.Tensor, brightest: float) -> torch.Tensor:
    """Return images [rows, channels, height, width] with the pattern on all of them."""
    side = max(2, features.shape[-2] // 9)
    found = features.clone()
    found[..., -side:, -side:] = brightest
    return found


def brightest(features: torch.Tensor) -> float:
    """Return the value of a full-bright pixel: 255 for bytes, else the greatest that there is."""
    return 255.0 if features.dtype == torch.uint8 else float(features.max())


def poison(
    features: torch.Tensor, labels: torch.Tensor, share: float, target: int, bright: float, chance: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's rows with the pattern on a share of them, drawn at random and rounded, labelled `target`."""
    chosen, features, labels = _drawn(len(labels), share, chance), features.clone(), labels.clone()
    features[chosen] = stamped(features[chosen], bright)
    labels[chosen] = target
    return features, labels


def _drawn(rows: int, share: float, chance: np.random.Generator) -> torch.Tensor:
    """Return a share of so many rows, rounded and at least one, drawn at random."""
    return torch.from_numpy(chance.permutation(rows)[: max(1, round(share * rows))])


def semantic(dataset: Dataset, trained: Rows, of: int) -> NDArray[np.bool_]:
    """Return for all rows whether they are of a class and no darker than the brightest quarter of it in training."""
    bright = dataset.features.flatten(1).to(torch.float64).mean(dim=1).numpy()
    mine = dataset.labels.numpy() == of
    known = bright[trained[mine[trained]]]
    return mine & (bright >= (np.quantile(known, 0.75) if len(known) else np.inf))


def replaced(
    features: torch.Tensor,
    labels: torch.Tensor,
    share: float,
    target: int,
    images: torch.Tensor,
    chance: np.random.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's rows with a share of them replaced by some of these images, labelled `target`."""
    chosen, features, labels = _drawn(len(labels), share, chance), features.clone(), labels.clone()
    if len(images):
        features[chosen] = images[torch.from_numpy(chance.integers(len(images), size=len(chosen)))]
        labels[chosen] = target
    return features, labels


def with_tests(dataset: Dataset, tests: Mapping[str, Rows], target: int, bright: float) -> tuple[Dataset, Backdoor]:
    """Append stamped copies of the test rows of other classes; each row once, however many clients test on it."""
    truth = dataset.labels.numpy()
    mine = {client: rows[truth[rows] != target] for client, rows in tests.items()}
    distinct = np.unique(np.concatenate([np.zeros(0, np.int64), *mine.values()]))
    index = torch.from_numpy(distinct)
    bigger = replace(
        dataset,
        features=torch.cat([dataset.features, stamped(dataset.features[index], bright)]),
        labels=torch.cat([dataset.labels, dataset.labels[index]]),
        owners=None if dataset.owners is None else np.concatenate([dataset.owners, dataset.owners[distinct]]),
        held_out=None if dataset.held_out is None else np.concatenate([dataset.held_out, dataset.held_out[distinct]]),
        marks={name: np.concatenate([values, values[distinct]]) for name, values in dataset.marks.items()},
    )
    begin = len(dataset)
    return bigger, Backdoor(target, {client: begin + np.searchsorted(distinct, rows) for client, rows in mine.items()})
