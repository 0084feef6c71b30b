"""The measures that clients take of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from steelyard.clients.local.stock import Stock
from steelyard.errors import UserError
from steelyard.messages import Floats
from steelyard.weighing.criteria import Criterion

Facts = Mapping[str, Mapping[str, Mapping[str, float]]]


class Measures:
    """Takes the client-side criteria of a cohort; those about the data are taken once, since data do not change."""

    def __init__(self, criteria: Iterable[Criterion], facts: Facts) -> None:
        self.criteria = [criterion for criterion in criteria if criterion.measured_by == "client"]
        self.facts = facts
        self._known: dict[tuple[int, str], dict[str, float]] = {}

    def take(
        self, stock: Stock, names: tuple[str, ...], models: torch.Tensor
    ) -> tuple[dict[str, Floats], dict[str, str]]:
        """Return raw values by criterion, and for clients on which a measure failed the reason."""
        values = {criterion.name: np.zeros(len(names)) for criterion in self.criteria}
        refused: dict[str, str] = {}
        for criterion in self.criteria:
            known = self._known.setdefault((id(stock), criterion.name), {})
            for place, name in enumerate(names):
                value = known.get(name) if criterion.about == "data" else None
                if value is None:
                    try:
                        value = self._one(criterion, stock, name, models[place])
                    except UserError:
                        raise
                    except Exception as error:
                        refused[name] = f"criterion {criterion.name} failed: {type(error).__name__}: {error}"
                        continue
                    if criterion.about == "data":
                        known[name] = value
                values[criterion.name][place] = value
        return values, refused

    def _one(self, criterion: Criterion, stock: Stock, name: str, model: torch.Tensor) -> float:
        given = model.detach() if criterion.about == "model" else None
        return criterion.on_client(stock.local(name, self.facts.get(name, {}), given))
