"""Who counts most right now: the largest weights of the last round that was stored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steelyard.runs.opening import reading
from steelyard.runs.reader import History
from steelyard.runs.typed import NEWEST

SHOWN = 3


@dataclass(frozen=True)
class Heaviest:
    """The clients with the largest weights in one round of the main rule."""

    round: int
    clients: tuple[tuple[str, float], ...]
    """(client, weight), the largest first."""
    cohort: int
    """Clients that were weighed."""


def heaviest(folder: Path, shown: int = SHOWN) -> Heaviest | None:
    """Return who counts most in the newest round of the main rule; None before any client was weighed.

    Only that round is read.
    """
    newest = _newest(folder)
    if newest is None:
        return None
    rule, seed, round = newest
    # Not simply the newest round: a store may keep single clients each k rounds only.
    found = History(folder).cohorts(rule, seed, after=round - 1)
    weights = np.nan_to_num(found.weight)
    order = np.argsort(-weights, kind="stable")[:shown]
    if not np.isfinite(found.weight).any():
        return None
    ranked = tuple((found.clients[found.client[index]], float(weights[index])) for index in order)
    return Heaviest(round, ranked, len(weights))


def _newest(folder: Path) -> tuple[str, int, int] | None:
    with reading(folder) as connection:
        for key, (rule, seed) in connection.federations().items():
            found = connection.rows("updates", ("round",), NEWEST, key)
            return (rule, seed, found[0][0]) if found else None  # of the first federation, the main rule's
    return None
