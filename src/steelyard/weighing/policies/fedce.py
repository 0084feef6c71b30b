"""FedCE: contribution by direction and by what the model lacks without it (Jiang et al. 2023).

    Gᵢ = 1 − mean over rounds of cos(Δᵢ, Σ_{j≠i} wⱼΔⱼ)
    Eᵢ = 1 − mean over rounds of client i's score of the model without itself, (Θ − wᵢθᵢ)/(1 − wᵢ)
    w = the sum (or product) of G and E, each divided by its sum, divided by its sum again

Clients score on the rows that they test on, after each round, with the weights of that round; their first score is 0,
as in NVFlare's recipe (nvflare/app_opt/pt/fedce.py), and so are the priors of clients that come later. Every round
tests as many models more as it has clients.
https://openaccess.thecvf.com/content/CVPR2023/html/Jiang_Fair_Federated_Medical_Image_Segmentation_via_Client_Contribution_Estimation_CVPR_2023_paper.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from steelyard.weighing.builtin import cosines_with_sum
from steelyard.weighing.policy import CohortView, Floats, Measures, Memory, Needs, Policy, by_client, policy, remember

WEIGHTS, COSINES, COUNTS, SCORES = "fedce/weights", "fedce/cosines", "fedce/counts", "fedce/scores"
FIRST = [0.0, 1.0]
"""Mean and number of a client's scores before it has given any: its first counts as 0."""
LEAST = 1e-6
"""No part of a contribution is below this; NVFlare's."""


@policy("fedce")
class FedCe(Policy):
    """Contribution by direction and by loss; use it with few clients that each know something of their own."""

    criteria = ("EQ",)
    needs = Needs(models=True, task="classes", client_tests=True)

    mode: Literal["plus", "times"] = "plus"
    """How the two parts are joined."""

    def weigh(self, measures: Measures, view: CohortView) -> Floats:
        known = view.memory.get(WEIGHTS, {})
        before = by_client(view.memory, WEIGHTS, view, 1.0 / (len(known) + 1))
        similar = cosines_with_sum(view.gram, before)
        counts = by_client(view.memory, COUNTS, view, 0.0) + 1
        means = by_client(view.memory, COSINES, view, 0.0)
        means = means + (similar - means) / counts
        remember(view, COUNTS, counts)
        remember(view, COSINES, means)
        scores = view.memory.get(SCORES, {})
        lacking = np.array([1.0 - scores.get(client, FIRST)[0] for client in view.clients])
        direction, lacking = _shares(np.maximum(0.0, 1.0 - means)), _shares(lacking)
        found = _shares(direction + lacking if self.mode == "plus" else direction * lacking)
        remember(view, WEIGHTS, found)
        return found

    def after_tests(self, memory: Mapping[str, Memory], scores: Mapping[str, float]) -> dict[str, Memory]:
        kept = memory.get(SCORES, {})
        added: dict[str, list[float]] = {}
        for client, score in scores.items():
            mean, count = kept.get(client, FIRST)
            added[client] = [mean + (score - mean) / (count + 1), count + 1]
        return {SCORES: {**kept, **added}}


def _shares(values: Floats) -> Floats:
    least = np.maximum(values, LEAST)
    return least / least.sum()
