"""From the weights and updates of a cohort to the new model, by the robust rule that a run names.

A rule that needs only inner products gives coefficients, and the new model is Θ + Σ c_a u_a; one that looks at each
parameter by itself goes over the matrix of models, some parameters at a time. Several weightings of one cohort (the
candidates of online adjustment) share what does not depend on weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import numpy as np
import torch

from steelyard.base.randomness import generator
from steelyard.defence import rules
from steelyard.defence.bucketing import buckets
from steelyard.defence.flame import flame
from steelyard.defence.geometry import lengths as lengths_of
from steelyard.defence.settings import BY_COORDINATE, DefenceSettings
from steelyard.defence.spectral import spectral
from steelyard.messages.payloads import Floats, SingleModels

_FIXED = partial(generator, 0, 0)
"""The chance of a rule that stands outside any run."""


class RobustRule:
    """One robust rule on one cohort; make it once a round and combine as many weightings as you like.

    `gram_of` computes the inner products of the updates, `root_of` those with the server's own update u_0 and its
    length, `radius_before` is last round's radius, which adaptive clipping may lean on; `chance` gives the round's
    generator for a purpose.
    """

    def __init__(
        self,
        settings: DefenceSettings,
        payload: SingleModels,
        parameters: torch.Tensor,
        gram_of: Callable[[], Floats],
        root_of: Callable[[], tuple[Floats, float]] | None = None,
        radius_before: float | None = None,
        chance: Callable[..., np.random.Generator] = _FIXED,
    ) -> None:
        self.settings = settings
        self.payload = payload
        self.parameters = parameters.to(payload.like.device)
        self._gram_of = gram_of
        self._root_of = root_of
        self._radius_before = radius_before
        self._chance = chance

    def combine(self, weights: Floats) -> torch.Tensor:
        """Return the new model for weights [clients], or one row per candidate for [candidates, clients]."""
        rows = np.atleast_2d(weights)
        found = self._by_coordinate(rows) if self.settings.rule in BY_COORDINATE else self._by_product(rows)
        if self.settings.rule == "flame":
            found = found + self._noise
        found = self.payload.keep_frozen(found, self.parameters)
        return found if np.ndim(weights) > 1 else found[0]

    def _by_product(self, weights: Floats) -> torch.Tensor:
        coefficients = np.stack([self.coefficients(each) for each in weights])
        sums = self.payload.combine(self.parameters, coefficients)
        rest = torch.as_tensor(1.0 - coefficients.sum(axis=1), dtype=sums.dtype, device=sums.device)
        return sums.addcmul_(rest[:, None], self.parameters[None])

    def coefficients(self, weights: Floats) -> Floats:
        """Return c of the new model Θ + Σ c_a u_a; for rules that need only inner products."""
        mixing, mixed = self._mixed(weights)
        if mixing is None:
            return self._coefficients(mixed, self._gram, mixing)
        return mixing.T @ self._coefficients(mixed, mixing @ self._gram @ mixing.T, mixing)

    def _coefficients(self, weights: Floats, gram: Floats, mixing: Floats | None) -> Floats:
        settings = self.settings
        match settings.rule:
            case "clip":
                return rules.clipped(weights, lengths_of(gram), self._clip_radius(gram))
            case "multi-krum":
                return rules.multi_krum(weights, gram, settings.share)
            case "spectral":
                return spectral(weights, gram, settings.share)
            case "flame":
                return flame(weights, gram, settings.reach or 1.0)[0]
            case "centred-clip":
                return rules.centred_clip(weights, gram, self._radius, settings.steps or 3)
            case "geometric-median":
                return rules.geometric_median(weights, gram, settings.steps or 8, settings.least_distance or 1e-6)
            case "fltrust":
                products, length = self._root
                mine = products if mixing is None else mixing @ products
                return rules.fltrust(weights, lengths_of(gram), mine, length)
            case _:
                return weights

    @cached_property
    def radius(self) -> float:
        """The radius of clip in this round, for the next round to lean on."""
        mixing, _ = self._mixed(np.ones(len(self.payload.like)))
        return self._clip_radius(self._gram if mixing is None else mixing @ self._gram @ mixing.T)

    def _clip_radius(self, gram: Floats) -> float:
        return self._radius(lengths_of(gram), self._radius_before)

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
    def _root(self) -> tuple[Floats, float]:
        if self._root_of is None:
            raise AssertionError("fltrust without a server that trains is refused before a run")
        return self._root_of()

    @cached_property
    def _nearest(self) -> Floats:
        return rules.mixing(self._gram, self.settings.share)

    def _mixed(self, weights: Floats) -> tuple[Floats | None, Floats]:
        """Return the matrix that averages updates before the rule looks at them, and the weights of its rows."""
        if self.settings.mix:
            return self._nearest, weights
        if self.settings.buckets is not None:
            return buckets(weights, self.settings.buckets, self._chance(purpose="defence/buckets"))
        return None, weights

    @cached_property
    def _noise(self) -> torch.Tensor:
        """FLAME's noise, one vector for every weighting of a round."""
        share = 0.001 if self.settings.noise is None else self.settings.noise
        middle = flame(np.ones(len(self._gram)), self._gram)[1]
        drawn = self._chance(purpose="defence/noise").standard_normal(len(self.parameters), dtype=np.float32)
        return torch.from_numpy(drawn).to(self.parameters) * (share * middle)

    def _by_coordinate(self, weights: Floats) -> torch.Tensor:
        kind, device = self.payload.like.dtype, self.payload.like.device
        ready: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        for each in weights:
            mixing, mixed = self._mixed(each / each.sum())
            ready.append(
                (
                    None if mixing is None else torch.as_tensor(mixing, dtype=kind, device=device),
                    torch.as_tensor(mixed, dtype=torch.float64, device=device),
                )
            )
        found = torch.empty((len(weights), len(self.parameters)), dtype=kind, device=device)
        for span, models in self.payload.blocks():
            for row, (mixing, mine) in enumerate(ready):
                values = models if mixing is None else mixing @ models
                if self.settings.rule == "median":
                    found[row, span] = rules.median(values, mine)
                else:
                    found[row, span] = rules.trimmed_mean(values, mine, self.settings.share)
        return found
