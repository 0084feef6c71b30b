"""The criteria that clients measure on themselves: of their data, their model, their device or their user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch

from steelyard.clients.local.device_data.dataset import DevicePopulation, Ints
from steelyard.errors import UserError
from steelyard.messages import Floats
from steelyard.weighing.criteria import Criterion, LocalData

Facts = Mapping[str, Mapping[str, Mapping[str, float]]]


class ClientCriteria:
    """Measures the client-side criteria of a cohort; those of the data once a client, since data do not change."""

    def __init__(self, criteria: Iterable[Criterion], facts: Facts) -> None:
        self.criteria = [criterion for criterion in criteria if criterion.measured_by == "client"]
        self.facts = facts
        self._known: dict[tuple[DevicePopulation, str], Floats] = {}
        """Values by population (one per seed) and criterion, one for each registered client; nan where not measured."""

    def measure(
        self, population: DevicePopulation, clients: Ints, models: torch.Tensor
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
                local = seen[job]
                if criterion.about == "model":
                    local = replace(local, model=models[job].detach())
                try:
                    known[clients[job]] = criterion.on_client(local)
                except UserError:
                    raise
                except Exception as error:
                    refused[name] = f"criterion {criterion.name} failed: {type(error).__name__}: {error}"
            values[criterion.name] = np.nan_to_num(known[clients])
        return values, refused

    def _values(self, population: DevicePopulation, criterion: Criterion) -> Floats:
        """Return the known values of a criterion, one for each registered client; nan where not measured yet."""
        if criterion.about != "data":
            return np.full(len(population.names), np.nan)
        key = (population, criterion.name)
        if key not in self._known:
            at_once = None if criterion.of_labels is None else criterion.of_labels(population.labelled)
            self._known[key] = np.full(len(population.names), np.nan) if at_once is None else at_once
        return self._known[key]

    def forget(self) -> None:
        """Drop the values measured so far, and with them the populations."""
        self._known.clear()
