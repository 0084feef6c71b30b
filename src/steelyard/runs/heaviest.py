"""Who counts most right now: the largest weights of the last round that was stored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steelyard.runs.reader import History
from steelyard.runs.schema import reading

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
    if not len(order) or not np.isfinite(found.weight).any():
        return None
    ranked = tuple((found.clients[found.client[index]], float(weights[index])) for index in order)
    return Heaviest(round, ranked, len(weights))


def _newest(folder: Path) -> tuple[str, int, int] | None:
    with reading(folder) as connection:
        row = connection.execute(
            "SELECT f.rule, f.seed, u.round FROM federations f JOIN updates u ON u.federation = f.id "
            "WHERE f.id = (SELECT min(id) FROM federations) ORDER BY u.round DESC LIMIT 1"
        ).fetchone()
    return None if row is None else (str(row[0]), int(row[1]), int(row[2]))
