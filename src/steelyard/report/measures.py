"""Figures of a run as pure functions of local scores: rounds to target, the worst tenth, percentiles."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from steelyard.messages import Floats
from steelyard.rounds.settings import reached


def rounds_to_target(
    rounds: NDArray[np.int64], scores: Floats, target: float, share: float, *, above: bool = False
) -> int | None:
    """Return the first round at which at least ceil(share · n) devices have a score of at least the target.

    `scores` is [rounds, devices]. None when no round reaches it (SPEC §6). `above` asks for more than the target.
    """
    enough = np.flatnonzero(reached(scores, target, share, above=above))
    return int(rounds[enough[0]]) if len(enough) else None


def worst_tenth(scores: Floats) -> float:
    """Return the mean score of the worst 10 % of the devices (at least one); use it to see who is left behind."""
    count = math.ceil(0.1 * len(scores) - 1e-9)
    return float(np.sort(scores)[:count].mean()) if len(scores) else float("nan")


def jain(scores: Floats) -> float:
    """Jain's fairness index (Σx)² / (n Σx²): 1 when all devices do equally well, 1/n when only one does."""
    squares = float(np.square(scores).sum())
    return float(scores.sum()) ** 2 / (len(scores) * squares) if squares else float("nan")
