"""Is one system better than another, or is it luck? Paired tests over users."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steelyard.errors import UserError
from steelyard.recommend.metrics import PerUser
from steelyard.recommend.ranking import Floats, View


@dataclass(frozen=True)
class Comparison:
    """Two systems on the same users: the mean difference (first − second) and two-sided p-values."""

    users: int
    difference: float
    t: float
    t_p: float
    wilcoxon_p: float


def compare(first: Floats, second: Floats) -> Comparison:
    """Compare per-user values by Student's paired t-test and Wilcoxon's signed-rank test.

    Use it before calling one system better. Equal values for every user give p = 1 in both tests.
    """
    # For speed of start: few evaluations compare two systems.
    from scipy import stats

    if first.shape != second.shape:
        raise UserError(f"compare: got {len(first)} and {len(second)} users; allowed: the same users in the same order")
    difference = np.asarray(first - second, dtype=np.float64)
    if len(difference) < 2 or not difference.any():
        return Comparison(len(difference), float(difference.mean()) if len(difference) else 0.0, 0.0, 1.0, 1.0)
    if np.ptp(difference) == 0:
        # Every user gains the same: no spread, so the t statistic is infinite.
        t, t_p = float(np.copysign(np.inf, difference[0])), 0.0
    else:
        outcome = stats.ttest_rel(first, second)
        t, t_p = float(outcome.statistic), float(outcome.pvalue)
    wilcoxon_p: float = stats.wilcoxon(first, second).pvalue  # pyright: ignore[reportAttributeAccessIssue]
    return Comparison(len(difference), float(difference.mean()), t, t_p, float(wilcoxon_p))


def compare_views(metric: PerUser, first: View, second: View) -> Comparison:
    """Compare two systems' lists under one metric, over the users who have a relevant test item."""
    return compare(metric.per_user(first)[first.judged], metric.per_user(second)[second.judged])
