"""The measures that clients take of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch

from steelyard.clients.local.device_data.dataset import Ints, Stock
from steelyard.errors import UserError
from steelyard.messages import Floats
from steelyard.weighing.criteria import Criterion, LocalData

Facts = Mapping[str, Mapping[str, Mapping[str, float]]]


class Measures:
    """Takes the client-side criteria of a cohort; those about the data are taken once, since data do not change."""

    def __init__(self, criteria: Iterable[Criterion], facts: Facts) -> None:
        self.criteria = [criterion for criterion in criteria if criterion.measured_by == "client"]
        self.facts = facts
        self._known: dict[tuple[int, str], Floats] = {}
        """Values by population and criterion, one place per registered client; nan where none was taken yet."""

    def take(self, stock: Stock, places: Ints, models: torch.Tensor) -> tuple[dict[str, Floats], dict[str, str]]:
        """Return raw values by criterion of the clients at these places, and for those that failed the reason."""
        refused: dict[str, str] = {}
        values: dict[str, Floats] = {}
        looked: dict[int, LocalData] = {}  # what a client can look at is put together once for all its criteria
        for criterion in self.criteria:
            known = self._values(stock, criterion)
            for job in np.flatnonzero(np.isnan(known[places])).tolist():
                name = stock.names[places[job]]
                if job not in looked:
                    looked[job] = stock.local(name, self.facts.get(name, {}))
                local = looked[job]
                if criterion.about == "model":
                    local = replace(local, model=models[job].detach())
                try:
                    known[places[job]] = criterion.on_client(local)
                except UserError:
                    raise
                except Exception as error:
                    refused[name] = f"criterion {criterion.name} failed: {type(error).__name__}: {error}"
            values[criterion.name] = np.nan_to_num(known[places])
        return values, refused

    def _values(self, stock: Stock, criterion: Criterion) -> Floats:
        """Return what is known of a criterion, one place per registered client; nan where it is still to be taken."""
        if criterion.about != "data":
            return np.full(len(stock.names), np.nan)
        key = (id(stock), criterion.name)
        if key not in self._known:
            at_once = None if criterion.of_labels is None else criterion.of_labels(stock.labelled)
            self._known[key] = np.full(len(stock.names), np.nan) if at_once is None else at_once
        return self._known[key]
