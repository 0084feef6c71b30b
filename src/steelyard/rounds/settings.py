"""[rounds]: the section of an experiment that configures the loop; when a target counts as reached."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from steelyard.base.settings import Section
from steelyard.messages.updates import Floats
from steelyard.rounds.selecting import SelectSettings

Share = Annotated[float, Field(gt=0, le=1)]
SMALL_FEDERATION = 50
"""Up to so many clients all take part in each round, unless a share is given."""
SMALL_COHORT = 10
"""Of more, a tenth takes part, but never fewer than so many."""


class RoundSettings(Section):
    """[rounds]: how many rounds, how many clients in each, when to evaluate and when to stop."""

    count: int = Field(default=50, ge=1, le=10_000_000)
    """Number of rounds."""
    fraction: Share | None = None
    """Share of the clients that train in each round, at least one client. Not given: all of up to 50 clients, and a
    tenth of more, but at least 10; the run's folder names the share that this came to."""
    sampling: Literal["fixed", "poisson"] = "fixed"
    """fixed: each round has as many clients; poisson: each client takes part with probability `fraction`, by itself."""
    select: SelectSettings = SelectSettings()
    """Who is asked in each round, where not everybody alike."""
    withdrawn: tuple[str, ...] = ()
    """Clients that have withdrawn, by name: they are neither asked nor tested; `steelyard withdraw` fills it in."""
    min_clients: int = Field(default=1, ge=0)
    """The run stops (and can be resumed) when fewer clients than this give a usable update; 0 never stops it."""
    evaluate_every: int = Field(default=1, ge=1)
    """Test the model on every client's test set each k rounds; the last round is always tested."""
    target: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Local accuracy that counts as reached, for "rounds to target" and the early stop."""
    share: Share = 0.5
    """Share of the devices that must reach the target."""
    targets: tuple[Share, ...] = ()
    """Targets of the rounds-to-target table; default: `target` alone."""
    shares: tuple[Share, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    """Shares of devices of the rounds-to-target table."""
    reach: Literal["at-least", "above"] = "at-least"
    """When a device has reached a target: at-least: a local accuracy of the target or more (the papers' words); above:
    more than the target (what the authors' programme counts)."""
    last: int = Field(default=5, ge=1)
    """Verdicts also look at the mean of the last so many evaluated rounds, which chance moves less than one round."""
    stop_at_target: bool = False
    """End the run once `share` of the devices reach `target`."""
    samples: bool = False
    """Also record right or wrong for every single test sample in the last round."""

    @model_validator(mode="after")
    def _selected(self) -> Self:
        if self.sampling == "poisson" and self.select.by != "uniform":
            raise ValueError(
                f"select.by: got '{self.select.by}' with sampling = 'poisson', where each client comes by itself; "
                "allowed: uniform, or sampling = 'fixed'"
            )
        return self

    def share_of(self, clients: int) -> float:
        """Return the share of so many clients that trains in each round: the one given, or else the default's."""
        return default_fraction(clients) if self.fraction is None else self.fraction

    def cohort(self, clients: int) -> int:
        """Return how many of so many clients train in a round of a fixed size."""
        return cohort_size(clients, self.share_of(clients), self.min_clients)

    @property
    def above(self) -> bool:
        """Whether only more than a target counts."""
        return self.reach == "above"

    @property
    def all_targets(self) -> tuple[float, ...]:
        """The targets of the table."""
        return self.targets or (self.target,)


def default_fraction(clients: int) -> float:
    """Return the share of the clients that train where none is given: a cohort of one would weigh nothing."""
    return 1.0 if clients <= SMALL_FEDERATION else max(0.1, SMALL_COHORT / clients)


def cohort_size(clients: int, fraction: float, least: int) -> int:
    """Return how many of the clients train in a round: the fraction, rounded, at least one and at least `least`."""
    return min(clients, max(1, least, math.floor(fraction * clients + 0.5)))


def devices_needed(share: float, devices: int) -> int:
    """Return ceil(share · n), the number of devices that must reach a target."""
    # 0.07 · 100 is 7.000000000000001 in binary: without the slack, ceil would ask for an eighth device.
    return math.ceil(share * devices - 1e-9)


def reached(scores: Floats, target: float, share: float, *, above: bool = False) -> NDArray[np.bool_]:
    """Say for each row of scores[..., devices] whether ceil(share · n) devices have a score of at least the target.

    Use it for the early stop and for rounds-to-target tables alike; without devices nothing is reached. `above` asks
    for more than the target, as the programme of the authors of papers 000 and 004 does.
    """
    # Of no devices at least one is asked for.
    return at_target(scores, target, above=above) >= max(1, devices_needed(share, scores.shape[-1]))


def at_target(scores: Floats, target: float, *, above: bool = False) -> NDArray[np.int64]:
    """Count for each row of scores[..., devices] the devices with a score of at least the target."""
    return np.asarray((scores > target if above else scores >= target).sum(axis=-1))
