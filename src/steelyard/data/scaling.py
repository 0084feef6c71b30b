"""Filling and scaling the numbers of a table, once it is known who trains on which rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.data.dataset import ClientRows, Dataset, RawColumns, Rows

Numbers = NDArray[np.float64]


def fill_and_scale(raw: RawColumns, train: Rows, rows: Rows) -> Numbers:
    """Return the numbers of some rows, filled and scaled by what the cells of the rows `train` say.

    Mean and deviation are those of the cells that are there; a column of which `train` holds nothing has mean 0.
    """
    seen, values = raw.numbers[train], raw.numbers[rows]
    if raw.missing == "zero":
        seen, values = np.nan_to_num(seen, nan=0.0), np.nan_to_num(values, nan=0.0)
    there = ~np.isnan(seen)
    count = np.maximum(there.sum(axis=0), 1)
    mean = np.where(there, seen, 0.0).sum(axis=0) / count
    filled = np.where(np.isnan(values), mean, values)
    if raw.normalise == "unit":
        return filled
    deviation = np.sqrt(np.square(np.where(there, seen - mean, 0.0)).sum(axis=0) / count)
    deviation[deviation == 0] = 1
    return (filled - mean) / deviation


def with_columns(dataset: Dataset, raw: RawColumns, numbers: Numbers) -> Dataset:
    """Return the data set with these numbers before its 0/1 columns, and nothing left to do."""
    features = np.concatenate([numbers.astype(np.float32), raw.flags], axis=1)
    return replace(dataset, features=torch.from_numpy(features), raw=None)


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
        return with_columns(dataset, raw, fill_and_scale(raw, train, np.arange(len(dataset))))
    _check_disjoint(clients, len(dataset))
    numbers = np.zeros_like(raw.numbers)
    for client in clients:
        rows = np.concatenate([client.train, client.test])
        numbers[rows] = fill_and_scale(raw, client.train, rows)
    for train, rows in _server_rows(dataset, clients, server):
        numbers[rows] = fill_and_scale(raw, train, rows)
    return with_columns(dataset, raw, numbers)


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
