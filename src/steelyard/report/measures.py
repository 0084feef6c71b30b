"""Figures of a run as pure functions of local scores: rounds to target, the worst tenth, the rows behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from steelyard.base.measures import MEASURES, Measure, Z
from steelyard.messages.updates import Counts, Floats
from steelyard.report.documents.shared import OnRows, OnSample
from steelyard.rounds.plan import at_target, devices_needed

OF_A_STEP = ("product_error", "factor_error")
"""Figures beside the server's tests of a round that are about the server's step: what weighing adapters lost."""


def rounds_to_target(
    rounds: NDArray[np.int64], scores: Floats, target: float, share: float, *, above: bool = False
) -> int | None:
    """Return the first round at which at least ceil(share · n) devices have a score of at least the target.

    `scores` is [rounds, devices]. None when no round reaches it (SPEC §6). `above` asks for more than the target.
    """
    return rounds_to_shares(rounds, scores, target, [share], above=above)[0]


def rounds_to_shares(
    rounds: NDArray[np.int64], scores: Floats, target: float, shares: Sequence[float], *, above: bool = False
) -> list[int | None]:
    """Return `rounds_to_target` for several shares; the devices at the target are counted once."""
    counts = at_target(scores, target, above=above)
    needed = [max(1, devices_needed(share, scores.shape[-1])) for share in shares]
    found = [np.flatnonzero(counts >= devices) for devices in needed]
    return [int(rounds[enough[0]]) if len(enough) else None for enough in found]


def worst_tenth(scores: Floats) -> float:
    """Return the mean score of the worst 10 % of the devices (at least one); use it to see who is left behind."""
    return float(scores[worst_devices(scores)].mean()) if len(scores) else float("nan")


def worst_score(scores: Floats) -> float:
    """Return the score of the worst device; use it where each client is somebody, such as a hospital."""
    return float(scores.min()) if len(scores) else float("nan")


def worst_devices(scores: Floats) -> NDArray[np.int64]:
    """Return the positions of the worst tenth of the devices, the worst first."""
    return np.argsort(scores, kind="stable")[: math.ceil(0.1 * len(scores) - 1e-9)]


def on_rows(
    scores: Sequence[Floats],
    rows: Sequence[Counts],
    measure: Measure = MEASURES["accuracy"],
    errors: Sequence[Floats | None] = (),
) -> OnRows | None:
    """Return on how many rows the mean score of some devices rests, and its interval; one array for each seed.

    Devices count alike, so that k devices with n rows each carry as much as k²/Σ(1/n) rows of one. Seeds test on the
    same rows, or on others of the same source: they do not multiply them. `errors` are the scores' standard errors,
    for a measure that is no share of rows; None where neither gives an interval.
    """
    carried = float(np.mean([len(mine) ** 2 / float((1 / np.maximum(mine, 1)).sum()) for mine in rows]))
    known = [each for each in errors if each is not None]
    error = math.sqrt(np.mean([float(np.square(each).sum()) / len(each) ** 2 for each in known])) if known else None
    found = measure.interval(float(np.mean([mine.mean() for mine in scores])), carried, error)
    if found is None:
        return None
    few = measure.too_few(carried, *found)
    counted = round(float(np.mean([mine.sum() for mine in rows])))
    return {"rows": counted, "low": found[0], "high": found[1], "too_few": few}


def on_sample(scores: Floats, rows: Counts, of: int) -> OnSample:
    """Return the interval of the score over all test rows, where some clients were drawn (scores, rows) `of` so many.

    The score is a ratio of two sums over clients: its variance is that of each client's part in it (linearised), less
    the share of the clients that were drawn.
    """
    count, total = len(scores), float(rows.sum())
    mean = float(scores @ rows / total)
    parts = rows * (scores - mean) * count / total
    half = Z * math.sqrt((1 - count / of) * float(parts @ parts) / (count * max(count - 1, 1)))
    return {"clients": count, "of": of, "low": mean - half, "high": mean + half}


def jain(scores: Floats) -> float:
    """Jain's fairness index (Σx)² / (n Σx²): 1 when all devices do equally well, 1/n when only one does."""
    squares = float(np.square(scores).sum())
    return float(scores.sum()) ** 2 / (len(scores) * squares) if squares else float("nan")
