"""TR: a detector over rounds; whose updates keep pointing elsewhere than most is out of the weighing until they do not.

    x_a = cos(u_a, Σ_{b≠a} min(1, r/‖u_b‖) u_b),   r the median of ‖u_b‖
    z_a = (median x − x_a) / (1.4826 · median |x − median x|)
    S_a ← min(max(0, S_a + z_a − k), 2h)        TR_a = 0 while S_a > h, else 1

E. S. Page: "Continuous Inspection Schemes" (Biometrika 1954), the cumulative sum, of what lies k robust standard
deviations below the middle of the cohort (1.4826 makes the median deviation one, for normal numbers). One odd round
raises no alarm below h + k deviations, many odd rounds do; 2h lets a client that behaves again come back after at most
h/k rounds with z_a = 0. k is not the textbook's 0.5: an honest client with odd data is odd in every round, and below k
it is never charged. An alarm that hits an honest client is false: `benchmarks.guarded` counts them.
"""

from __future__ import annotations

import numpy as np

from steelyard.messages.updates import Floats
from steelyard.weighing.contribution import cosines_with_sum
from steelyard.weighing.criteria import CohortView, server_criterion

SLACK = 2.0
"""k: so many deviations below the middle are nothing odd."""
LIMIT = 5.0
"""h: the sum of what lies beyond at which the alarm goes."""
MEMORY = "TR/sums"


@server_criterion(
    "TR",
    description="track record: 0 for clients whose updates have pointed elsewhere over rounds, 1 for all others",
    maximum=1.0,
)
def track_record(view: CohortView) -> Floats:
    """0 while a client's cumulative sum of odd rounds is above the limit; sums are kept by client, in checkpoints."""
    known: dict[str, float] = view.memory.get(MEMORY, {})
    before = np.array([known.get(client, 0.0) for client in view.clients])
    sums = after(before, cosines_with_others(view.gram))
    view.remember(MEMORY, {**known, **dict(zip(view.clients, sums.tolist(), strict=True))})
    return (sums <= LIMIT).astype(np.float64)


def after(sums: Floats, cosines: Floats) -> Floats:
    """Return the cumulative sums after a round; where all agree alike nobody is odd."""
    if not len(cosines):
        return sums
    below = np.median(cosines) - cosines
    spread = 1.4826 * float(np.median(np.abs(below)))
    odd = below / spread if spread > 1e-12 else np.zeros_like(below)
    return np.clip(sums + odd - SLACK, 0.0, 2 * LIMIT)


def cosines_with_others(gram: Floats) -> Floats:
    """Return the cosine of each update with the sum of the others, none of them longer than the median length."""
    sizes = np.sqrt(np.maximum(np.diag(gram), 0.0))
    middle = float(np.median(sizes)) if len(sizes) else 0.0
    cut = np.minimum(1.0, np.divide(middle, sizes, out=np.ones_like(sizes), where=sizes > 0))
    return cosines_with_sum(gram * np.outer(cut, cut))
