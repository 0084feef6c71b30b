"""From settings to a data set whose numbers are filled and scaled, once it is known who trains on which rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from steelyard.base.errors import UserError
from steelyard.data.dataset import ClientRows, Dataset, Population, Rows, share_of_rows
from steelyard.data.preparation import MOST_SITES, Preparation, Scale
from steelyard.data.sources.source import AugmentSettings, DataSettings, FileSource
from steelyard.learning.augmentation import Augmentation

MANY = 65_536
"""Rows that are looked at at once."""


def prepare(dataset: Dataset, clients: Sequence[ClientRows], server: Rows) -> Dataset:
    """Return a data set as its clients see it: a table filled and scaled by training rows, a client's own or all.

    Use it once per partition. With normalise = "client", a row that the server holds goes by the client whose row it
    was, or, where there is none, by the server's own rows; no client's numbers depend on another's.
    """
    raw = dataset.raw
    if raw is None:
        return dataset  # the same one for every seed, so that it lies on the device once
    train = np.unique(np.concatenate([client.train for client in clients]))
    preparation = dataset.described.with_ranges(*raw.ranges(train))
    if raw.normalise != "client":
        scale = raw.scale(train)
        found = preparation.model_copy(update={"scale": scale})
        return replace(dataset, features=raw.features(scale.apply(raw.numbers)), raw=None, preparation=found)
    _check_disjoint(clients, len(dataset))
    numbers, sites = np.zeros_like(raw.numbers), dict[str, Scale]()
    for client in clients:
        rows = np.concatenate([client.train, client.test])
        sites[client.client] = raw.scale(client.train)
        numbers[rows] = sites[client.client].apply(raw.numbers[rows])
    for site, rows in _server_rows(dataset, clients, server):
        numbers[rows] = (sites.get(site) or raw.scale(rows)).apply(raw.numbers[rows])
    kept = sites if len(sites) * raw.numbers.shape[1] <= MOST_SITES else {}
    found = preparation.model_copy(update={"sites": kept})
    return replace(dataset, features=raw.features(numbers), raw=None, preparation=found)


def preparation_of(population: Population) -> Preparation:
    """Return what the rows of a population went through, for whoever takes its model away."""
    dataset, found = population.dataset, population.dataset.described
    train = np.unique(np.concatenate([client.train for client in population.clients]))
    if dataset.features.dtype != torch.float32 or found.columns or found.scale is not None or not len(train):
        return found
    # Some rows at a time: those of all clients are as large as the data.
    ends = [
        dataset.features[torch.from_numpy(rows)].aminmax() for rows in np.array_split(train, len(train) // MANY + 1)
    ]
    low, high = min(float(end.min) for end in ends), max(float(end.max) for end in ends)
    return found.model_copy(update={"low": low, "high": high})


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


def _server_rows(dataset: Dataset, clients: Sequence[ClientRows], server: Rows) -> list[tuple[str, Rows]]:
    """Return the server's rows in groups: by the client that they are scaled by, and under "" those of none."""
    names = {client.client for client in clients}
    used = np.concatenate([rows for client in clients for rows in (client.train, client.test)])
    # Rows of a held-out part may serve both: those are scaled already, for the client that tests on them.
    free = np.setdiff1d(server, used)
    owners = np.full(len(free), "") if dataset.owners is None else dataset.owners[free]
    groups = [(name, free[owners == name]) for name in np.unique(owners).tolist() if name in names]
    rest = np.setdiff1d(free, np.concatenate([rows for _, rows in groups])) if groups else free
    return [*groups, ("", rest)] if len(rest) else groups


def load(settings: DataSettings, read: Dataset | None = None) -> Dataset:
    """Read the data set that the settings name, if it is not `read` yet; use it before `share_out`."""
    dataset = settings.read() if read is None else read
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
    values = as_numbers(dataset.features)
    if given is not None:
        mean, deviation = (torch.tensor(part) for part in given)
    else:
        seen = values if dataset.held_out is None else values[torch.from_numpy(~dataset.held_out)]
        axes = [0, *range(2, values.ndim)]
        mean = seen.double().mean(dim=axes).float()
        deviation = seen.double().std(dim=axes, correction=0).float()
        deviation[deviation == 0] = 1
    scale = Scale(mean=mean.tolist(), deviation=deviation.tolist())
    preparation = dataset.described.model_copy(update={"scale": scale})
    return replace(dataset, features=by_channel(values, scale), preparation=preparation), -mean / deviation


def as_numbers(features: torch.Tensor) -> torch.Tensor:
    """Return images or columns as a model takes them: bytes between 0 and 1, all else as they are."""
    return features.float() / 255 if features.dtype == torch.uint8 else features


def by_channel(values: torch.Tensor, scale: Scale) -> torch.Tensor:
    """Return images or columns scaled, each channel or column by a number of its own."""
    axes = (1, -1, *[1] * (values.ndim - 2))
    mean, deviation = (torch.tensor(part, dtype=torch.float32).view(axes) for part in (scale.mean, scale.deviation))
    return (values - mean) / deviation
