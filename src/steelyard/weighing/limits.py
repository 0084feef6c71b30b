"""What limits a client's say under any rule: bounds on what it claims, caps on its weight, floors under it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from steelyard.base.errors import UserError
from steelyard.base.settings import Section
from steelyard.messages.updates import Floats
from steelyard.weighing.weights import ROUNDING, cap_of, floor_of, limited

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

    def limits(self) -> list[str]:
        """Return the limits as words of `--rules` write them: "max_shares=2", "floors.a=0.1"."""
        found = [f"{name}={value:g}" for name in LIMITS if (value := getattr(self, name)) is not None]
        return [*found, *(f"floors.{client}={floor:g}" for client, floor in self.floors.items())]
