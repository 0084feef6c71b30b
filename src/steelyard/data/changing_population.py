"""A population while flaws are applied to it: the rows of each client so far, and the population that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.data import backdoor
from steelyard.data.dataset import Backdoor, Behaviour, ClientRows, Dataset, Population, Rows
from steelyard.data.flaw_settings import FlawSettings
from steelyard.data.sensors import BadSensors


@dataclass(frozen=True, eq=False)
class ChangingClient:
    """The training rows of one client while flaws are applied."""

    rows: Rows
    test: Rows
    labels: torch.Tensor | None = None
    """Wrong labels; None for the true ones."""
    features: torch.Tensor | None = None
    """Changed features; None for those of the data set."""
    marks: Mapping[str, float] = field(default_factory=dict[str, float])
    """What marks of the rows are to be multiplied by: a blurred image is no longer sharp."""

    def take(self, positions: Rows) -> ChangingClient:
        """Return the client with some of its training rows."""
        index = torch.from_numpy(positions)
        return replace(
            self,
            rows=self.rows[positions],
            labels=None if self.labels is None else self.labels[index],
            features=None if self.features is None else self.features[index],
        )


@dataclass(eq=False)
class ChangingPopulation:
    """A population on its way: clients by name, how they behave, what is known to be wrong with them."""

    population: Population
    clients: dict[str, ChangingClient]
    sensors: BadSensors
    behaviours: dict[str, Behaviour] = field(default_factory=dict[str, Behaviour])
    words: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    aim: FlawSettings | None = None
    """The last flaw that teaches to take some rows for another class: how often that works is measured."""
    last: list[str] = field(default_factory=list[str])
    """The clients that the flaw before this one touched; of a copy the new ones."""

    @classmethod
    def of(cls, population: Population) -> ChangingPopulation:
        """Begin with the clients as the partition made them."""
        clients = {rows.client: ChangingClient(rows.train, rows.test, rows.train_labels) for rows in population.clients}
        return cls(population, clients, BadSensors(population))

    def note(self, name: str, words: str) -> None:
        """Write down what is wrong with a client."""
        self.words[name] = (*self.words.get(name, ()), words)

    def labels(self, client: ChangingClient) -> torch.Tensor:
        """The labels that this client trains on so far."""
        return self.population.dataset.labels[torch.from_numpy(client.rows)] if client.labels is None else client.labels

    def features(self, client: ChangingClient) -> torch.Tensor:
        """The features that this client trains on so far."""
        if client.features is not None:
            return client.features
        return self.population.dataset.features[torch.from_numpy(client.rows)]

    def done(self) -> Population:
        """Return the population, with changed features as further rows of its data set."""
        made: list[ClientRows] = []
        changed: list[ChangingClient] = []
        end = len(self.population.dataset)
        for name in sorted(self.clients):
            client = self.clients[name]
            rows = client.rows
            if client.features is not None:
                rows = np.arange(end, end + len(rows), dtype=np.int64)
                end += len(rows)
                changed.append(client)
            made.append(ClientRows(name, rows, client.test, client.labels))
        dataset, found = _with_rows(self.population.dataset, changed) if changed else self.population.dataset, None
        if self.aim is not None:
            dataset, found = self._aimed(dataset, {rows.client: rows.test for rows in made}, self.aim)
        return replace(
            self.population,
            dataset=dataset,
            clients=tuple(made),
            behaviours=self.behaviours,
            flaws=self.words,
            backdoor=found,
        )

    def _aimed(self, dataset: Dataset, tests: Mapping[str, Rows], aim: FlawSettings) -> tuple[Dataset, Backdoor]:
        target = aim.target or 0
        if aim.how == "pixels":
            return backdoor.with_tests(dataset, tests, target, self.bright)
        wanted = self.trigger(aim)[1] if aim.how == "semantic" else dataset.labels.numpy() == aim.classes[0]
        return dataset, Backdoor(target, {client: rows[wanted[rows]] for client, rows in tests.items()})

    def trigger(self, flaw: FlawSettings) -> tuple[Rows, NDArray[np.bool_]]:
        """Return the training rows that stand for a semantic backdoor, and for all rows whether they do."""
        dataset = self.population.dataset
        trained = np.unique(np.concatenate([rows.train for rows in self.population.clients]))
        of = flaw.classes[0] if flaw.classes else ((flaw.target or 0) + 1) % dataset.classes
        shown = backdoor.semantic(dataset, trained, of)
        return trained[shown[trained]], shown

    @property
    def bright(self) -> float:
        """The value of a full-bright pixel."""
        return backdoor.brightest(self.population.dataset.features)


def _with_rows(dataset: Dataset, changed: list[ChangingClient]) -> Dataset:
    """Append the changed features of some clients; labels, owners and marks are those of the rows they come from."""
    rows = np.concatenate([client.rows for client in changed])
    marks = {name: np.concatenate([values, values[rows]]) for name, values in dataset.marks.items()}
    for name, values in marks.items():
        values[len(dataset) :] *= np.repeat(
            [client.marks.get(name, 1.0) for client in changed], [len(client.rows) for client in changed]
        )
    features = [client.features for client in changed if client.features is not None]
    return replace(
        dataset,
        features=torch.cat([dataset.features, *features]),
        labels=torch.cat([dataset.labels, dataset.labels[torch.from_numpy(rows)]]),
        owners=None if dataset.owners is None else np.concatenate([dataset.owners, dataset.owners[rows]]),
        held_out=None if dataset.held_out is None else np.concatenate([dataset.held_out, dataset.held_out[rows]]),
        marks=marks,
    )
