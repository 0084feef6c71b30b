"""Trust by median and MAD: sizes, cut down where an update is far longer than most (Flower's pull request 7335).

    zᵢ = (‖Δᵢ‖ − median) / (1.4826·MAD),   wᵢ ∝ nᵢ·exp(−β·max(0, zᵢ − z₀))

z is the modified z-score of Iglewicz and Hoaglin; updates that are short are not touched. Where at least half of the
lengths are the same, the MAD is 0 and all are trusted.
https://github.com/flwrlabs/flower/pull/7335 (an example: TrustAwareFedAvg)
"""

from __future__ import annotations

import numpy as np
from pydantic import NonNegativeFloat

from steelyard.weighing.policy import CohortView, Floats, Measures, Policy, policy

SCALE = 1.4826
"""MAD times this is the standard deviation of normal numbers."""


@policy("trust-mad")
class TrustMad(Policy):
    """Sizes without the outlying; use it where some clients may send broken or huge updates, and most do not."""

    criteria = ("DS", "UL")
    of_measures = True

    beta: NonNegativeFloat = 5.0
    """β: how fast trust falls beyond z₀."""
    z: NonNegativeFloat = 3.5
    """z₀: up to here an update is like the others."""

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        lengths = measures["UL"]
        middle = float(np.median(lengths))
        deviation = SCALE * float(np.median(np.abs(lengths - middle)))
        if deviation < 1e-9:
            return measures["DS"]
        beyond = np.maximum(0.0, (lengths - middle) / deviation - self.z)
        return measures["DS"] * np.exp(-self.beta * beyond)
