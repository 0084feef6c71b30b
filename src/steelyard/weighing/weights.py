"""From raw measures to weights: normalise each criterion over the cohort, score, divide by the sum, limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from steelyard.base.errors import UserError
from steelyard.base.settings import Section
from steelyard.base.tallies import quotient
from steelyard.messages.updates import Floats

Normalising = Literal["share", "max", "rank"]

ROUNDING = 1e-12
SMALLEST = 1e-300
"""A weight below this is none: a limit divided by it is no number."""


@dataclass(frozen=True, eq=False)
class Weighing:
    """All that was computed to weigh one cohort; it is stored per client and round."""

    criteria: tuple[str, ...]
    raw: Floats
    """[clients, criteria] as measured."""
    normalised: Floats
    """[clients, criteria], each column brought to [0, 1] over the cohort."""
    scores: Floats
    weights: Floats
    all_zero: tuple[str, ...]
    """Criteria whose raw values were all 0 over the cohort: they say nothing, so every client got 1/n."""
    uniform: bool
    """True when all scores were 0 and the weights are uniform for that reason."""


def normalise(raw: Floats, how: Normalising = "share") -> tuple[Floats, Floats]:
    """Bring each criterion of raw[clients, criteria] to [0, 1] over the cohort; returns (normalised, zero[criteria]).

    share: divided by its sum, so that it sums to 1 (the papers' way). With n clients each value is about 1/n, so
    f = c₁(1 + c₂(1 + c₃)) ≈ c₁ and from ten clients on only the first criterion counts.
    max: divided by the cohort's best, so that a score does not depend on how many clients there are.
    rank: the client's rank over n, 1 for the best, ties in the middle; use it where a measure has outliers.
    A criterion that is 0 for everyone says nothing: it becomes 1/n (share) or 1 (max, rank) for all, and is noted.
    """
    totals = raw.sum(axis=0)
    zero = totals == 0
    if how == "share":
        return quotient(raw, totals, 1.0 / max(len(raw), 1)), zero
    if how == "max":
        return quotient(raw, raw.max(axis=0, initial=0.0), 1.0), zero
    return np.where(zero, 1.0, _ranks(raw)), zero


def _ranks(raw: Floats) -> Floats:
    """Return each value's rank in its column over the number of rows; equal values share the mean of their ranks."""
    ordered = np.sort(raw, axis=0)
    ranks = np.empty(raw.shape)
    for column in range(raw.shape[1]):
        below = np.searchsorted(ordered[:, column], raw[:, column])
        up_to = np.searchsorted(ordered[:, column], raw[:, column], side="right")
        ranks[:, column] = (below + 1 + up_to) / 2
    return ranks / max(len(raw), 1)


def to_weights(scores: Floats) -> tuple[Floats, bool]:
    """Return f/Σf along the last axis, and whether Σf was 0 (weights are then uniform).

    Scores that already sum to 1 up to rounding stay as they are, so that one normalised criterion gives exactly its
    own shares and the rule "DS alone" is FedAvg to the last bit.
    """
    totals = scores.sum(axis=-1, keepdims=True)
    share = quotient(scores, totals, 1.0 / max(scores.shape[-1], 1))
    return np.where(np.abs(totals - 1.0) <= ROUNDING, scores, share), bool((totals <= 0).any())


def cap_of(clients: int, max_weight: float | None = None, max_shares: float | None = None) -> float:
    """Return the cap on a weight among so many clients: the smaller of a share of all and of some times 1/n."""
    by_shares = 1.0 if max_shares is None else max_shares / max(clients, 1)
    return min(1.0 if max_weight is None else max_weight, by_shares)


def floor_of(clients: int, min_weight: float | None = None, min_shares: float | None = None) -> float:
    """Return the floor under a weight among so many clients: the larger of a share of all and of some times 1/n."""
    return max(min_weight or 0.0, (min_shares or 0.0) / max(clients, 1))


def limited(weights: Floats, low: Floats | float = 0.0, high: Floats | float = 1.0) -> Floats:
    """Return weights that sum to 1, of which none is below `low` or above `high`; order among clients is kept.

    All weights are multiplied by one number s and cut to their limits: w_i = min(h_i, max(l_i, s·w_i)), with the s at
    which they sum to 1. Clients without weight get their floors, and in equal parts what the others may not have.
    Floors that need more than there is share it in proportion; caps that cannot hold it all make the weights equal.
    """
    lows = np.broadcast_to(low, weights.shape)
    highs = np.maximum(high, lows)
    if ((weights >= lows) & (weights <= highs)).all():
        return weights.copy()
    if lows.sum() >= 1.0 - ROUNDING:
        return lows / lows.sum()
    if highs.sum() <= 1.0 + ROUNDING:
        return highs + (1.0 - highs.sum()) / len(weights)
    found = lows.copy()
    has = weights > SMALLEST
    if highs[has].sum() + lows[~has].sum() < 1.0:
        found[has] = highs[has]
        found[~has] = _scaled(np.ones((~has).sum()), lows[~has], highs[~has], 1.0 - highs[has].sum())
    else:
        found[has] = _scaled(weights[has], lows[has], highs[has], 1.0 - lows[~has].sum())
    return found


def _scaled(weights: Floats, lows: Floats, highs: Floats, total: float) -> Floats:
    """Return min(h, max(l, s·w)) for the s at which the sum, which grows with s in straight pieces, is the total."""
    edges = np.concatenate([[0.0], lows / weights, highs / weights])
    cut, free = cut_where(lambda factor: factor * weights, edges, lows, highs, total)
    if not free.any():
        return cut
    # Shares first: a factor s overflows where all that is free are weights near the smallest numbers.
    cut[free] = weights[free] / weights[free].sum() * (total - cut[~free].sum())
    return np.clip(cut, lows, highs)


def cut_where(
    at: Callable[[float], Floats], edges: Floats, low: Floats | float, high: Floats | float, total: float
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return clip(at(t), l, h) within the straight piece of t in which its sum, which grows, becomes the total.

    And which of the numbers are not cut there; pieces meet at the edges.
    """
    edges = np.unique(edges)
    sums = np.array([np.clip(at(edge), low, high).sum() for edge in edges])
    piece = int(np.clip(np.searchsorted(sums, total), 1, len(edges) - 1))
    found = at(edges[piece - 1] + (edges[piece] - edges[piece - 1]) / 2)
    return np.clip(found, low, high), (found > low) & (found < high)


# ---------------------------------------------------------------- bounds, caps and floors


LIMITS = ("bound", "max_weight", "max_shares", "min_weight", "min_shares")
"""The fields that limit what a client can gain by what it says, and how little say it can be left with."""


class LimitSettings(Section):
    """The limits of a rule; every rule has them, whatever it weighs by."""

    bound: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """What clients say of themselves (DS, LD, ...) counts at most this many times the cohort's median; default: all of
    it, and the run's notes name what nothing limits."""
    attested: tuple[str, ...] = ()
    """Criteria that clients measure and that you declare trusted: not bounded, not named in the notes."""
    max_weight: float | None = Field(default=None, gt=0, le=1)
    """No client gets more than this share of all weight; the surplus goes to the others in proportion."""
    max_shares: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """The same cap counted in equal shares: at most this many times 1/n, whatever the size of the cohort."""
    min_weight: float | None = Field(default=None, gt=0, lt=1)
    """A floor: no client of a cohort gets less than this share of all weight; the others give it in proportion."""
    min_shares: float | None = Field(default=None, gt=0, le=1)
    """The same floor counted in equal shares: at least this many times 1/n."""
    floors: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(default_factory=dict[str, float])
    """A floor for single clients, by name, in the rounds in which they take part: {"hospital-a" = 0.1}."""

    @property
    def capped(self) -> bool:
        """Whether no weight can pass a cap."""
        return self.max_weight is not None or self.max_shares is not None

    @property
    def floored(self) -> bool:
        """Whether any weight has a floor."""
        return bool(self.floors) or self.min_weight is not None or self.min_shares is not None

    def check_limits(self) -> None:
        """Refuse floors above caps, and floors that together are more than all weight."""
        for low, high in (("min_weight", "max_weight"), ("min_shares", "max_shares")):
            floor, cap = getattr(self, low), getattr(self, high)
            if floor is not None and cap is not None and floor > cap:
                raise UserError(f"{low}: got {floor:g} with {high} = {cap:g}; allowed: at most {cap:g}")
        for client, floor in self.floors.items():
            if self.max_weight is not None and floor > self.max_weight:
                raise UserError(
                    f"floors.{client}: got {floor:g} with max_weight = {self.max_weight:g}; "
                    f"allowed: at most {self.max_weight:g}"
                )
        if sum(self.floors.values()) > 1 + ROUNDING:
            raise UserError(f"floors: sum to {sum(self.floors.values()):g}; allowed: at most 1 in all")

    def limited(self, weights: Floats, clients: Sequence[str] = ()) -> Floats:
        """Return the weights of one cohort within the floors and caps; as they are where there are none.

        Weights that do not sum to 1 keep their sum: the limits are on shares of it.
        """
        count, total = len(weights), float(weights.sum())
        if not (self.capped or self.floored) or total <= 0:
            return weights
        low = np.full(count, floor_of(count, self.min_weight, self.min_shares))
        if clients:
            low = np.maximum(low, [self.floors.get(client, 0.0) for client in clients])
        high = cap_of(count, self.max_weight, self.max_shares)
        if abs(total - 1.0) <= ROUNDING:
            return limited(weights, low, high)
        return limited(weights / total, low, high) * total
