"""The measures that clients take of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch

from steelyard.clients.local.stock import Stock
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

    def take(
        self, stock: Stock, names: tuple[str, ...], models: torch.Tensor
    ) -> tuple[dict[str, Floats], dict[str, str]]:
        """Return raw values by criterion, and for clients on which a measure failed the reason."""
        places = np.array([stock.position[name] for name in names], dtype=np.int64)
        refused: dict[str, str] = {}
        values: dict[str, Floats] = {}
        looked: dict[int, LocalData] = {}  # what a client can look at is put together once for all its criteria
        for criterion in self.criteria:
            known = self._known.setdefault((id(stock), criterion.name), np.full(len(stock.names), np.nan))
            if criterion.about != "data":
                known = np.full(len(stock.names), np.nan)
            for job in np.flatnonzero(np.isnan(known[places])).tolist():
                if job not in looked:
                    looked[job] = stock.local(names[job], self.facts.get(names[job], {}))
                local = looked[job]
                if criterion.about == "model":
                    local = replace(local, model=models[job].detach())
                try:
                    known[places[job]] = criterion.on_client(local)
                except UserError:
                    raise
                except Exception as error:
                    refused[names[job]] = f"criterion {criterion.name} failed: {type(error).__name__}: {error}"
            values[criterion.name] = np.nan_to_num(known[places])
        return values, refused
