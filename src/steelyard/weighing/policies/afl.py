"""AFL: agnostic federated learning, against the worst mixture of clients (Mohri et al. 2019, Algorithm 1).

    Θ steps by the weights λ;   λ ← nearest point of the simplex to λ + γ·F,   Fᵢ: the loss of the received model

λ begins even. The paper takes one step of gradients a round; here clients train as the experiment says. A client that
falls out of a round keeps its λ, and the others share out what is left.
https://proceedings.mlr.press/v97/mohri19a.html
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import PositiveFloat

from steelyard.weighing.policy import CohortView, Floats, Measures, Needs, Policy, by_name, nearest_shares, policy

MIXTURE = "afl/mixture"


@policy("afl")
class Afl(Policy):
    """The worst mixture of clients; use it with few clients, where the worst-off must not be left behind."""

    criteria = ("LB",)
    needs = Needs(everyone=True)

    rate: PositiveFloat = 0.1
    """γ: how fast the mixture follows the losses."""

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        kept: Mapping[str, float] = view.memory.get(MIXTURE, {})
        names = sorted({*kept, *view.clients})
        mixture = np.array([kept.get(name, 1.0 / len(names)) for name in names])
        here = [names.index(client) for client in view.clients]
        ahead = mixture.copy()
        ahead[here] += self.rate * measures["LB"]
        view.remember(MIXTURE, by_name(names, nearest_shares(ahead)))
        return mixture[here]
