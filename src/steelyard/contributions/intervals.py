"""From the values of rounds to one value of each client with a 95 % interval: over test rows, rounds and seeds.

The variance of a sum over rounds has three parts:

    rows    of the groups of test rows, each summed over the rounds first: the same rows are tested in every round
    rounds  of the differences between rounds that follow each other, which a slow trend does not enter
    draws   where coalitions were drawn

Estimates by Shapley also have the method's own error, which was measured against retrained coalitions (`widened`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from steelyard.base.measures import Z, half_per_deviation
from steelyard.messages.updates import Counts, Floats
from steelyard.runs.history import StoredValues

Interval = tuple[Floats, Floats]
"""A value and its standard error, one of each for every client."""
METHOD_ERROR = 0.2
"""Standard error of the estimates themselves, as a share of the clients' mean absolute value: a model trained without a
client goes another way. Of 0.05, 0.1, 0.15, ... it is the least with which 95 % of the retrained values lay inside, in
the scenes with a free rider and with noisy images, over 8 seeds; docs/results/contributions.md has the other scenes."""


@dataclass(frozen=True, eq=False)
class Series:
    """The values of one federation over its rounds."""

    seed: int
    values: Floats
    """[rounds, clients, 1 + groups]; 0 for a client that was not weighed."""
    there: NDArray[np.bool_]
    """[rounds, clients]: who was weighed."""
    errors: Floats
    """[rounds, clients]: of drawing coalitions."""
    sizes: Counts | None
    """[groups]: test rows of each; None where they are not the same in all rounds."""
    before: float
    after: float

    @classmethod
    def of(cls, stored: Sequence[StoredValues], clients: Sequence[str], rounds: Sequence[int]) -> Self:
        """Lay the values of one federation out by round and client."""
        sizes = stored[0].found.sizes
        same = all(np.array_equal(each.found.sizes, sizes) for each in stored)
        groups = len(sizes) if same else 0
        values = np.zeros((len(rounds), len(clients), 1 + groups))
        errors = np.zeros((len(rounds), len(clients)))
        there = np.zeros(errors.shape, dtype=np.bool_)
        column = {name: place for place, name in enumerate(clients)}
        for each in stored:
            row, columns = rounds.index(each.round), [column[name] for name in each.found.clients]
            values[row, columns] = each.found.values[:, : 1 + groups]
            errors[row, columns], there[row, columns] = each.found.error, True
        ends = stored[0].found.before, stored[-1].found.after
        return cls(stored[0].seed, values, there, errors, sizes if same else None, *ends)

    @property
    def sampled(self) -> bool:
        """Whether coalitions were drawn."""
        return bool(self.errors.any())

    def summed(self) -> Series:
        """Return the series of all clients together, as if they were one."""
        errors = np.zeros((len(self.values), 1))  # drawn values sum to the gain exactly
        there = np.asarray(self.there.any(axis=1, keepdims=True))
        values = self.values.sum(axis=1, keepdims=True)
        return Series(self.seed, values, there, errors, self.sizes, self.before, self.after)


def add_over_rounds(series: Series, *, mean: bool = False) -> Interval:
    """Return each client's sum over the rounds, or its mean over those in which it was weighed, and the error of it."""
    value = series.values[:, :, 0].sum(axis=0)
    variance = _of_rows(series, value) + _of_rounds(series) + np.square(series.errors).sum(axis=0)
    rounds = np.maximum(series.there.sum(axis=0), 1) if mean else 1
    return value / rounds, np.sqrt(variance) / rounds


def _of_rows(series: Series, value: Floats) -> Floats:
    if series.sizes is None or len(series.sizes) < 2:
        return np.zeros(len(value))
    groups = series.values[:, :, 1:].sum(axis=0)
    share = series.sizes / series.sizes.sum()
    count = len(share)
    return count / (count - 1) * np.square(share * (groups - value[:, None])).sum(axis=1)


def _of_rounds(series: Series) -> Floats:
    found = np.zeros(series.there.shape[1])
    for client in range(len(found)):
        mine = series.values[series.there[:, client], client, 0]
        if len(mine) > 1:
            found[client] = len(mine) / (len(mine) - 1) * np.square(np.diff(mine)).sum() / 2
    return found


def over_seeds(found: Sequence[Interval]) -> tuple[Floats, Floats, Floats]:
    """Return value, low and high: of one seed by its own error, of several by how they differ from seed to seed."""
    values = np.array([value for value, _ in found])
    value = values.mean(axis=0)
    half = Z * found[0][1] if len(found) == 1 else half_per_deviation(len(found)) * values.std(axis=0, ddof=1)
    return value, value - half, value + half


def widened(value: Floats, low: Floats, high: Floats) -> tuple[Floats, Floats, Floats]:
    """Return estimated Shapley values with the method's own error in the interval; without weight it stays 0."""
    method = Z * METHOD_ERROR * np.abs(value).mean()
    weightless = (low == 0) & (high == 0)
    half = np.where(weightless, 0.0, np.hypot((high - low) / 2, method))
    return value, value - half, value + half
