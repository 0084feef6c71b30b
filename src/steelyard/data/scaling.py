"""From settings to a data set whose numbers are filled and scaled, once it is known who trains on which rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from steelyard.base.errors import UserError
from steelyard.data.dataset import ClientRows, Dataset, Rows, share_of_rows
from steelyard.data.sources.source import AugmentSettings, DataSettings, FileSource
from steelyard.learning.augmentation import Augmentation


def prepare(dataset: Dataset, clients: Sequence[ClientRows], server: Rows) -> Dataset:
    """Return a table as its clients see it: filled and scaled by training rows alone, a client's own or all clients'.

    Use it once per partition. With normalise = "client", a row that the server holds goes by the client whose row it
    was, or, where there is none, by the server's own rows; no client's numbers depend on another's.
    """
    raw = dataset.raw
    if raw is None:
        return dataset
    if raw.normalise != "client":
        train = np.unique(np.concatenate([client.train for client in clients]))
        numbers = raw.scaled(train, np.arange(len(dataset)))
        return replace(dataset, features=raw.features(numbers), raw=None)
    _check_disjoint(clients, len(dataset))
    numbers = np.zeros_like(raw.numbers)
    for client in clients:
        rows = np.concatenate([client.train, client.test])
        numbers[rows] = raw.scaled(client.train, rows)
    for train, rows in _server_rows(dataset, clients, server):
        numbers[rows] = raw.scaled(train, rows)
    return replace(dataset, features=raw.features(numbers), raw=None)


def _check_disjoint(clients: Sequence[ClientRows], count: int) -> None:
    user = np.full(count, -1)
    for number, client in enumerate(clients):
        rows = np.concatenate([client.train, client.test])
        for other in np.unique(user[rows]).tolist():
            if other >= 0 and not np.array_equal(clients[other].train, client.train):
                raise UserError(
                    f"data.normalise: got 'client', but {clients[other].client} and {client.client} share rows, which "
                    "cannot be scaled for both; allowed: standard, unit"
                )
        user[rows] = number


def _server_rows(dataset: Dataset, clients: Sequence[ClientRows], server: Rows) -> list[tuple[Rows, Rows]]:
    """Return the server's rows in groups, each with the rows that it is scaled by."""
    train = {client.client: client.train for client in clients}
    used = np.concatenate([rows for client in clients for rows in (client.train, client.test)])
    # Rows of a held-out part may serve both: those are scaled already, for the client that tests on them.
    free = np.setdiff1d(server, used)
    owners = np.full(len(free), "") if dataset.owners is None else dataset.owners[free]
    groups = [(train[name], free[owners == name]) for name in np.unique(owners).tolist() if name in train]
    rest = np.setdiff1d(free, np.concatenate([rows for _, rows in groups])) if groups else free
    return [*groups, (rest, rest)] if len(rest) else groups


def load(settings: DataSettings) -> Dataset:
    """Read the data set that the settings name; use it before `share_out`."""
    dataset = settings.read()
    # images draw their share before any picture is decoded.
    if isinstance(settings, FileSource) and settings.share < 1 and settings.source != "images":
        kept = share_of_rows(dataset.owners, len(dataset), settings.share, settings.seed)
        dataset = dataset.take(kept)
    return normalised(dataset, settings)


def normalised(dataset: Dataset, settings: DataSettings) -> Dataset:
    """Return the data set scaled as `data.normalise` asks, with what changes its images while they are trained on.

    Use it for data handed over from Python as well.
    """
    # a table's numbers are filled and scaled when it is shared out, by training rows alone.
    wanted = settings.normalise == "standard" and dataset.raw is None
    if wanted and dataset.tokens:
        raise UserError("data.normalise: got 'standard' for rows of tokens; allowed: unit, which leaves them alone")
    if settings.augment is None:
        return standardised(dataset)[0] if wanted else dataset
    return augmented(dataset, settings.augment, standard=wanted)


def augmented(dataset: Dataset, settings: AugmentSettings, *, standard: bool) -> Dataset:
    """Return the data set normalised as asked, with the draws of `[data.augment]` to come."""
    augment = Augmentation(settings.pad, settings.padding, settings.flip)
    if dataset.task == "segmentation" and (settings.pad or settings.flip):
        raise UserError(
            "data.augment: got pad or flip with masks, which would not move along; allowed: mean, deviation"
        )
    augment.check(dataset.shape)
    given = settings.mean, settings.deviation
    if any(len(part) not in (0, dataset.shape[0]) for part in given):
        raise UserError(
            f"data.augment: got {len(given[0])} in mean and {len(given[1])} in deviation for images of "
            f"{dataset.shape[0]} channels; allowed: a number for each channel"
        )
    if standard or given[0]:
        dataset, black = standardised(dataset, None if standard else given)
        augment = replace(augment, black=tuple(black.flatten().tolist()))
    return replace(dataset, augment=augment if augment.pad or augment.flip else None)


def standardised(
    dataset: Dataset, given: tuple[Sequence[float], Sequence[float]] | None = None
) -> tuple[Dataset, torch.Tensor]:
    """Return the data set with mean 0 and deviation 1 per channel or column, and what became of 0 in each.

    Both are measured on its training part, or given for each channel.
    """
    values = dataset.features.float() / 255 if dataset.features.dtype == torch.uint8 else dataset.features
    if given is not None:
        mean, deviation = (torch.tensor(part).view(1, -1, 1, 1) for part in given)
    else:
        seen = values if dataset.held_out is None else values[torch.from_numpy(~dataset.held_out)]
        axes = [0, *range(2, values.ndim)]
        mean = seen.double().mean(dim=axes, keepdim=True).float()
        deviation = seen.double().std(dim=axes, keepdim=True, correction=0).float()
        deviation[deviation == 0] = 1
    return replace(dataset, features=(values - mean) / deviation), -mean / deviation
