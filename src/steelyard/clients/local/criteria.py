"""What clients report for weighing: criteria of their own, and what criteria of the server need from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch

from steelyard.clients.local.population import DevicePopulation, Ints
from steelyard.messages.updates import Counts, Floats
from steelyard.weighing.criterion import Criterion, LocalData

SIZE = "DS"
"""The criterion that is a client's number of samples: what it claims of its size, it claims here too."""

Facts = Mapping[str, Mapping[str, Mapping[str, float]]]


class ClientCriteria:
    """Measures the client-side criteria of a cohort; those of the data once a client, since data do not change."""

    def __init__(self, criteria: Iterable[Criterion], facts: Facts) -> None:
        every = list(criteria)
        self.criteria = [criterion for criterion in every if criterion.measured_by == "client"]
        self.needs_first_losses = any(criterion.needs.first_losses for criterion in every)
        """Whether clients measure the loss of the received model: only where a criterion of the run needs it."""
        self._tell_label_counts = any(criterion.needs.label_counts for criterion in every)
        self.facts = facts
        self._known: dict[tuple[DevicePopulation, str], Floats] = {}
        """Values by population (one per seed) and criterion, one for each registered client; nan where not measured."""
        self._label_counts: dict[DevicePopulation, Counts | None] = {}

    def measure(
        self, population: DevicePopulation, clients: Ints, models: torch.Tensor, round: int
    ) -> tuple[dict[str, Floats], dict[str, str]]:
        """Return raw values by criterion of the clients at these positions, and for those that failed the reason."""
        refused: dict[str, str] = {}
        values: dict[str, Floats] = {}
        seen: dict[int, LocalData] = {}  # what a client can look at is put together once for all its criteria
        for criterion in self.criteria:
            known = self._values(population, criterion)
            for job in np.flatnonzero(np.isnan(known[clients])).tolist():
                name = population.names[clients[job]]
                if job not in seen:
                    seen[job] = population.local(name, self.facts.get(name, {}))
                value, why = criterion.taken(_own_copy(seen[job], criterion, models[job]))
                known[clients[job]] = value
                if why is not None:
                    refused[name] = why
            values[criterion.name] = np.nan_to_num(known[clients])
        if SIZE in values:
            values[SIZE] = values[SIZE] * population.claims(round)[clients]
        self._inflate(population, clients, values, round)
        return values, refused

    def _inflate(self, population: DevicePopulation, clients: Ints, values: dict[str, Floats], round: int) -> None:
        """Let clients that inflate their criteria report the most that can be true, or a multiple of what is."""
        factors = population.inflates(round)[clients]
        liars = factors != 1
        if not liars.any():
            return
        for criterion in self.criteria:
            if criterion.name != SIZE:
                most = criterion.most(population.dataset.classes)
                claimed = np.full(len(clients), most) if math.isfinite(most) else values[criterion.name] * factors
                values[criterion.name] = np.where(liars, claimed, values[criterion.name])

    def _values(self, population: DevicePopulation, criterion: Criterion) -> Floats:
        """Return the known values of a criterion, one for each registered client; nan where not measured yet."""
        if criterion.about != "data":
            return np.full(len(population.names), np.nan)
        key = (population, criterion.name)
        if key not in self._known:
            self._known[key] = _at_once(population, criterion)
        return self._known[key]

    def label_counts(self, population: DevicePopulation, clients: Ints) -> Counts | None:
        """Return the samples of each class of the clients at these positions, where a criterion of the run needs it."""
        if not self._tell_label_counts:
            return None
        if population not in self._label_counts:
            self._label_counts[population] = population.labelled.counts()
        counts = self._label_counts[population]
        return None if counts is None else counts[clients]

    def forget(self) -> None:
        """Drop the values measured so far, and with them the populations."""
        self._known.clear()
        self._label_counts.clear()


def _own_copy(local: LocalData, criterion: Criterion, model: torch.Tensor) -> LocalData:
    """What a criterion of the user's gets: copies, so that what it writes changes nobody's data or update."""
    if criterion.built_in:
        return local
    mine = replace(local, labels=local.labels.clone())
    return replace(mine, model=model.detach().clone()) if criterion.about == "model" else mine


def _at_once(population: DevicePopulation, criterion: Criterion) -> Floats:
    """Measure all clients in one go where the criterion can; nan where each has to be measured on its own."""
    nothing = np.full(len(population.names), np.nan)
    if criterion.of_labels is None:
        return nothing
    try:
        found = criterion.of_labels(population.labelled)
        values = nothing if found is None else np.array(found, dtype=np.float64)
    except (Exception, SystemExit):  # of a user's own: measuring one by one says which client it fails for, and why
        return nothing
    return np.where(np.isfinite(values) & (values >= 0), values, np.nan) if values.shape == nothing.shape else nothing
