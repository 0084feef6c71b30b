"""From the weights and updates of a cohort to the new model, by the robust rule that a run names.

A rule that needs only inner products gives coefficients, and the new model is Θ + Σ c_a u_a; one that looks at each
parameter by itself goes over the matrix of models, some parameters at a time. Several weightings of one cohort (the
candidates of online adjustment) share what does not depend on weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from steelyard.defence import rules
from steelyard.defence.geometry import lengths as lengths_of
from steelyard.defence.settings import BY_COORDINATE, DefenceSettings
from steelyard.messages import Floats, SingleModels


class RobustRule:
    """One robust rule on one cohort; make it once a round and combine as many weightings as you like.

    `gram_of` computes the inner products of the updates, `root_of` the model that the server trained on its own rows,
    `radius_before` is last round's radius, which adaptive clipping may lean on.
    """

    def __init__(
        self,
        settings: DefenceSettings,
        payload: SingleModels,
        parameters: torch.Tensor,
        gram_of: Callable[[], Floats],
        root_of: Callable[[], torch.Tensor] | None = None,
        radius_before: float | None = None,
    ) -> None:
        self.settings = settings
        self.payload = payload
        self.parameters = parameters.to(payload.like.device)
        self._gram_of = gram_of
        self._root_of = root_of
        self._radius_before = radius_before

    def combine(self, weights: Floats) -> torch.Tensor:
        """Return the new model for weights [clients], or one row per candidate for [candidates, clients]."""
        rows = np.atleast_2d(weights)
        found = self._by_coordinate(rows) if self.settings.rule in BY_COORDINATE else self._by_product(rows)
        found = self.payload.keep_frozen(found, self.parameters)
        return found if np.ndim(weights) > 1 else found[0]

    def _by_product(self, weights: Floats) -> torch.Tensor:
        coefficients = np.stack([self.coefficients(each) for each in weights])
        sums = self.payload.combine(self.parameters, coefficients)
        rest = torch.as_tensor(1.0 - coefficients.sum(axis=1), dtype=sums.dtype, device=sums.device)
        return sums.addcmul_(rest[:, None], self.parameters[None])

    def coefficients(self, weights: Floats) -> Floats:
        """Return c of the new model Θ + Σ c_a u_a; for rules that need only inner products."""
        found = self._coefficients(weights, self._mixed_gram)
        return found if self._mixing is None else self._mixing.T @ found

    def _coefficients(self, weights: Floats, gram: Floats) -> Floats:
        settings = self.settings
        match settings.rule:
            case "clip":
                return rules.clipped(weights, lengths_of(gram), self.radius)
            case "multi-krum":
                return rules.multi_krum(weights, gram, settings.share)
            case "centred-clip":
                return rules.centred_clip(weights, gram, self._radius, settings.steps or 3)
            case "geometric-median":
                return rules.geometric_median(weights, gram, settings.steps or 8, settings.least_distance or 1e-6)
            case "fltrust":
                return rules.fltrust(weights, lengths_of(gram), *self._mixed_root)
            case _:
                return weights

    @cached_property
    def radius(self) -> float:
        """The radius of clip in this round, for the next round to lean on."""
        return self._radius(lengths_of(self._mixed_gram), self._radius_before)

    def _radius(self, distances: Floats, before: float | None = None) -> float:
        settings = self.settings
        if settings.radius is not None:
            return settings.radius
        quantile = 0.5 if settings.quantile is None else settings.quantile
        return rules.radius_of(distances, quantile, settings.smooth or 0.0, before)

    @cached_property
    def _gram(self) -> Floats:
        return self._gram_of()

    @cached_property
    def _mixing(self) -> Floats | None:
        return rules.mixing(self._gram, self.settings.share) if self.settings.mix else None

    @cached_property
    def _mixed_gram(self) -> Floats:
        return self._gram if self._mixing is None else self._mixing @ self._gram @ self._mixing.T

    @cached_property
    def _mixed_root(self) -> tuple[Floats, float]:
        """⟨u_a, u_0⟩ of every client and ‖u_0‖ of the server's own update."""
        if self._root_of is None:
            raise AssertionError("fltrust without a server that trains is refused before a run")
        mine = (self._root_of().to(self.parameters.device) - self.parameters).to(torch.float64)
        products = torch.zeros(len(self.payload.like), dtype=torch.float64)
        base = float(mine @ self.parameters.to(torch.float64))
        for span, models in self.payload.blocks():
            products += (models.to(torch.float64) @ mine[span]).cpu()
        found = products.numpy() - base
        return found if self._mixing is None else self._mixing @ found, float(mine.norm())

    def _by_coordinate(self, weights: Floats) -> torch.Tensor:
        kind, device = self.payload.like.dtype, self.payload.like.device
        given = torch.as_tensor(weights / weights.sum(axis=1, keepdims=True), dtype=torch.float64, device=device)
        mixed = None if self._mixing is None else torch.as_tensor(self._mixing, dtype=kind, device=device)
        found = torch.empty((len(weights), len(self.parameters)), dtype=kind, device=device)
        for span, models in self.payload.blocks():
            values = models if mixed is None else mixed @ models
            for row, mine in enumerate(given):
                if self.settings.rule == "median":
                    found[row, span] = rules.median(values, mine)
                else:
                    found[row, span] = rules.trimmed_mean(values, mine, self.settings.share)
        return found
