"""From raw measures to weights: normalise each criterion over the cohort, score, divide by the sum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steelyard.messages import Floats

ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Weighing:
    """All that was computed to weigh one cohort; it is stored per client and round."""

    criteria: tuple[str, ...]
    raw: Floats
    """[clients, criteria] as measured."""
    normalised: Floats
    """[clients, criteria], each column divided by its sum."""
    scores: Floats
    weights: Floats
    all_zero: tuple[str, ...]
    """Criteria whose raw values were all 0 over the cohort: they say nothing, so every client got 1/n."""
    uniform: bool
    """True when all scores were 0 and the weights are uniform for that reason."""


def normalise(raw: Floats) -> tuple[Floats, Floats]:
    """Divide each criterion by its sum over the cohort; all-zero columns become 1/n. Returns (normalised, zero[m])."""
    totals = raw.sum(axis=0)
    zero = totals == 0
    return np.where(zero, 1.0 / max(len(raw), 1), raw / np.where(zero, 1.0, totals)), zero


def to_weights(scores: Floats) -> tuple[Floats, bool]:
    """Return f/Σf along the last axis, and whether Σf was 0 (weights are then uniform).

    Scores that already sum to 1 up to rounding stay as they are, so that one normalised criterion gives exactly its
    own shares and the rule "DS alone" is FedAvg to the last bit.
    """
    totals = scores.sum(axis=-1, keepdims=True)
    empty = totals <= 0
    share = np.where(np.abs(totals - 1.0) <= ROUNDING, scores, scores / np.where(empty, 1.0, totals))
    return np.where(empty, 1.0 / max(scores.shape[-1], 1), share), bool(empty.any())
