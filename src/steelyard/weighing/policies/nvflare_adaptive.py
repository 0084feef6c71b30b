"""Adaptive weights under heterogeneity: sizes, moved a little where clients differ (NVFlare's pull request 5273).

    αᵢ ∝ nᵢ^γ · Hᵢ^β · e^(f·deficitᵢ) · Qᵢ^δ, between a floor and a cap
    H: 0.5 + 0.9·(JS divergence of i's labels from all, over the largest) + 0.1·(how rare its labels are)
    deficit: the best client's metric less i's, small clients' metrics drawn to the mean: nᵢ/(nᵢ + prior)
    Q: 0.75 to 1.25, by how much local training lowered the loss
    w = (1 − B)·n + B·α,   B = most · gate(mean JS) · gate(gap of metrics)

B is 0 in the first `warmup` rounds, until it would have been above 0 in `patience` rounds in a row, and after a change
of the cohort. The metric is e^(−loss before training), the geometric mean of the probability of the right label: the
pull request leaves it to the client to send a validation accuracy.
https://github.com/NVIDIA/NVFlare/pull/5273
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

from steelyard.weighing.policy import (
    CohortView,
    Counts,
    Floats,
    Measures,
    Needs,
    Policy,
    nearest_shares,
    policy,
    to_weights,
)

ROUNDS, STREAK, COHORT = "nvflare-adaptive/rounds", "nvflare-adaptive/streak", "nvflare-adaptive/cohort"
EPSILON = 1e-12


@policy("nvflare-adaptive")
class NvflareAdaptive(Policy):
    """Sizes with a bounded correction; use it where the same clients of different labels take part in every round."""

    # KL asks clients for their label counts, and shows how far each is from all labels alike.
    criteria = ("DS", "LB", "LA", "KL")
    needs = Needs(label_counts=True, task="classes")

    gamma: float = Field(default=0.65, gt=0, le=1)
    """γ: the power of the size."""
    beta: NonNegativeFloat = 0.7
    """β: the power of how much a client represents, H."""
    delta: NonNegativeFloat = 0.0
    """δ: the power of how much local training helped, Q."""
    fairness: NonNegativeFloat = 1.0
    """f: how much clients count that are behind."""
    prior: NonNegativeFloat = 100.0
    """How many samples stand against a client's own metric."""
    spread: float = 0.26
    """The mean divergence at which its gate is half open."""
    spread_width: PositiveFloat = 0.04
    """How wide that gate is."""
    spread_least: NonNegativeFloat = 0.15
    """Up to here it is shut."""
    gap: float = 0.1
    """The gap between the best and the worst metric at which its gate is half open."""
    gap_width: PositiveFloat = 0.03
    """How wide that gate is."""
    gap_least: NonNegativeFloat = 0.05
    """Up to here it is shut."""
    most: float = Field(default=0.2, gt=0, le=1)
    """The largest share B that the correction can have."""
    warmup: int = Field(default=3, ge=0)
    """Rounds without any correction."""
    patience: int = Field(default=2, ge=1)
    """How many rounds in a row must ask for it."""
    same_cohort: bool = True
    """Whether a changed cohort begins the count anew."""
    least_weight: float = Field(default=0.0, ge=0, lt=1)
    """The floor under a weight."""
    most_weight: float = Field(default=1.0, gt=0, le=1)
    """The cap on a weight."""

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        sizes, metrics = measures["DS"], np.exp(-measures["LB"])
        shares = to_weights(sizes)[0]
        assert view.label_counts is not None  # on_server of LB and the check of needs saw to it
        represents, divergence = _representation(view.label_counts, shares)
        reliable = sizes / (sizes + self.prior)
        mean = float(shares @ metrics)
        shrunk = reliable * metrics + (1 - reliable) * mean
        gap = float(shrunk.max() - shrunk.min())
        blend = self.most * _gate(divergence, self.spread, self.spread_width, self.spread_least)
        blend = self._granted(blend * _gate(gap, self.gap, self.gap_width, self.gap_least), view)
        if blend == 0:
            return shares
        raw = sizes**self.gamma * represents**self.beta * np.exp(self.fairness * (shrunk.max() - shrunk))
        raw = raw * _quality(measures["LB"] - measures["LA"]) ** self.delta
        target = nearest_shares(raw / raw.sum(), self.least_weight, self.most_weight)
        return nearest_shares((1 - blend) * shares + blend * target, self.least_weight, self.most_weight)

    def _granted(self, blend: float, view: CohortView) -> float:
        """Return the correction's share now, after the warm-up and once enough rounds in a row have asked for it."""
        rounds = view.memory.get(ROUNDS, 0) + 1
        streak = view.memory.get(STREAK, 0)
        cohort = list(view.clients)
        if self.same_cohort and view.memory.get(COHORT) not in (None, cohort):
            streak = 0
        streak = streak + 1 if blend > 0 else 0
        view.remember(ROUNDS, rounds)
        view.remember(STREAK, streak)
        view.remember(COHORT, cohort)
        return 0.0 if rounds <= self.warmup or streak < self.patience else blend


def _distributions(counts: Floats | Counts) -> Floats:
    shares = np.maximum(counts / np.maximum(counts.sum(axis=-1, keepdims=True), EPSILON), EPSILON)
    return shares / shares.sum(axis=-1, keepdims=True)


def _representation(counts: Counts, shares: Floats) -> tuple[Floats, float]:
    """Return H of every client, and the mean Jensen-Shannon divergence of their labels from all labels."""
    own = _distributions(counts)
    whole = _distributions(shares @ own)
    middle = (own + whole) / 2
    divergence = ((own * np.log(own / middle)).sum(axis=1) + (whole * np.log(whole / middle)).sum(axis=1)) / 2
    rarity = own @ (1.0 / np.sqrt(whole))
    novelty = divergence / max(float(divergence.max()), EPSILON)
    return 0.5 + 0.9 * novelty + 0.1 * rarity / rarity.max(), float(shares @ divergence)


def _gate(value: float, threshold: float, width: float, least: float) -> float:
    return 0.0 if value <= least else float(1.0 / (1.0 + np.exp(-(value - threshold) / width)))


def _quality(gains: Floats) -> Floats:
    span = float(gains.max() - gains.min())
    return np.ones_like(gains) if span <= EPSILON else 0.75 + 0.5 * (gains - gains.min()) / span
