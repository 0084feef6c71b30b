"""FedDG-GA: more weight to clients that lost by averaging (Zhang et al. 2023).

    gᵢ = Fᵢ(Θ) − Fᵢ(θᵢ): how much worse the averaged model does on client i's rows than its own
    aᵢ ← clip(aᵢ + d/n · gᵢ / max|g|, 0, 1), divided by its sum;   d falls to 0 in a straight line over the rounds

a begins even. Fᵢ(θᵢ) is the mean loss of the client's last local epoch, Fᵢ(Θ) that of the model it receives in the next
round, both on its training rows; the authors take a validation set of each client.
https://openaccess.thecvf.com/content/CVPR2023/html/Zhang_Federated_Domain_Generalization_With_Generalization_Adjustment_CVPR_2023_paper.html
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from steelyard.weighing.policy import CohortView, Floats, Measures, Needs, Policy, by_client, policy, remember

ADJUSTED, LOSSES = "feddg-ga/weights", "feddg-ga/losses"


@policy("feddg-ga")
class FedDgGa(Policy):
    """Generalisation adjustment; use it with few clients of different domains, for a domain that none of them has."""

    criteria = ("LB", "LA")
    needs = Needs(everyone=True)

    step: float = Field(default=0.2, gt=0, lt=1)
    """d: the largest change of a weight in the first round, in equal shares; 0.2 in the authors' code."""

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        weights = by_client(view.memory, ADJUSTED, view, 1.0 / len(view.clients))
        if LOSSES in view.memory:
            gaps = measures["LB"] - by_client(view.memory, LOSSES, view, measures["LB"])
            weights = adjusted(weights, gaps, self._size(view))
        remember(view, LOSSES, measures["LA"])
        remember(view, ADJUSTED, weights)
        return weights

    def _size(self, view: CohortView) -> float:
        """Return d of this round: rounds are counted as in the authors' code, whose first is 0."""
        return self.step * (1 - (view.round - 3) / view.rounds) if view.rounds else self.step


def adjusted(weights: Floats, gaps: Floats, step: float) -> Floats:
    """Return the weights moved by the gaps, the largest of which moves its weight by step/n."""
    largest = float(np.abs(gaps).max())
    if largest <= 0:
        return weights
    moved = np.clip(weights + step / len(weights) * gaps / largest, 0.0, 1.0)
    total = moved.sum()
    return moved / total if total > 0 else weights
