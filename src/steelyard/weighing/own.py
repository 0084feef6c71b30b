"""Weights that follow from a client alone, for guarantees under which no client's data may move another's weight.

Every other rule shares weight out over a cohort, so whoever comes, leaves or changes moves everybody's. Here the
cohort's sums are replaced by numbers that are known beforehand: a typical client's criteria ĉ and the expected number
of clients m. A client like the typical one gets 1/m, and

    w_a = min(w_max, f(c_a / ĉ m) / (m · f(1/m, ..., 1/m)))        normalise = "share"
    w_a = min(w_max, f(min(1, c_a / ĉ)) / (m · f(1, ..., 1)))      normalise = "max"

The weights sum to about 1, not to 1: what is missing, or too much, is a shorter or longer step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steelyard.base.errors import UserError
from steelyard.messages.updates import Floats
from steelyard.weighing.rule import Rule
from steelyard.weighing.weights import Weighing, cap_of


def own_cap(rule: Rule, expected: float) -> float:
    """Return w_max in cohorts of so many clients on average; a rule without a cap is refused."""
    settings = rule.settings
    if not settings.capped:
        raise UserError(
            "weighing.max_weight: missing; allowed: max_weight or max_shares, one of which must bound the weights"
        )
    by_shares = np.inf if settings.max_shares is None else settings.max_shares / expected
    return float(min(by_shares, cap_of(1, settings.max_weight)))


def weigh_alone(
    rule: Rule, raw: Floats, references: Floats, expected: float, order: Sequence[int] | None = None
) -> Weighing:
    """Weigh each client by itself, from raw measures [clients, criteria] and those of a typical client [criteria]."""
    if rule.settings.normalise == "share":
        normalised, typical = raw / (references * expected), np.full(len(references), 1.0 / expected)
    else:
        normalised, typical = np.minimum(1.0, raw / references), np.ones(len(references))
    standard = float(rule.score(typical[None], order)[0])
    if standard <= 0:
        raise UserError(
            "weighing.score: is 0 for a typical client; allowed with privacy.central.weights = 'own': scores above 0"
        )
    scores = rule.score(normalised, order)
    weights = np.minimum(scores / (standard * expected), own_cap(rule, expected))
    return Weighing(rule.names, raw, normalised, scores, weights, (), False)
