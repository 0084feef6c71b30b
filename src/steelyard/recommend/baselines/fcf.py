"""FCF, federated collaborative filtering (Ammad-ud-din et al., 2019): implicit matrix factorisation, federated.

Confidence c_ui = 1 + w·r_ui with r_ui = 1 for items taken. Each device solves for its own vector in closed form from
the item factors, and sends the gradient of every item's factors; the server sums the gradients and steps with Adam.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from steelyard.base.logs import doing
from steelyard.base.randomness import generator
from steelyard.recommend.baselines.neighbours import matrix
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.lists import Scores
from steelyard.recommend.ranking import Floats


def fcf(
    train: Interactions,
    seed: int = 1,
    factors: int = 20,
    rate: float = 0.1,
    epochs: int = 30,
    confidence: float = 4.0,
    decay: float = 1.0,
) -> Scores:
    """Train FCF with all users in every round and return the scores; `confidence` is w, `decay` is λ."""
    taken = matrix(train)
    table = generator(seed, 0, "", "fcf items").normal(0.0, 0.1, (len(train.items), factors))
    first, second = np.zeros_like(table), np.zeros_like(table)
    vectors = np.zeros((len(train.users), factors))
    for epoch in range(1, epochs + 1):
        with doing(f"epoch {epoch} of {epochs}"):
            vectors = solve(taken, table, confidence, decay)
            gradient = item_gradient(taken, table, vectors, confidence, decay)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        table = table - rate * (first / (1 - 0.9**epoch)) / (np.sqrt(second / (1 - 0.999**epoch)) + 1e-8)
    vectors = solve(taken, table, confidence, decay)

    def scores(users: Codes) -> Floats:
        return vectors[users] @ table.T

    return scores


def solve(taken: Any, table: Floats, confidence: float, decay: float) -> Floats:
    """Return each user's vector (Qᵀ C_u Q + λ I)⁻¹ Qᵀ C_u r_u; QᵀQ is the same for all, her items add to it."""
    common = table.T @ table + decay * np.eye(table.shape[1])
    found = np.empty((taken.shape[0], table.shape[1]))
    for user in range(taken.shape[0]):
        mine = table[taken.indices[taken.indptr[user] : taken.indptr[user + 1]]]
        found[user] = np.linalg.solve(common + confidence * mine.T @ mine, (1 + confidence) * mine.sum(axis=0))
    return found


def item_gradient(taken: Any, table: Floats, vectors: Floats, confidence: float, decay: float) -> Floats:
    """Return Σ_u −2 c_ui (r_ui − q_i·p_u) p_u + 2 λ q_i for every item: what the devices' gradients sum to.

    Untaken items contribute q_i·p_u p_u, which sums to Q (PᵀP) without visiting them one by one.
    """
    users = np.repeat(np.arange(taken.shape[0]), np.diff(taken.indptr))
    met = vectors[users]
    predicted = np.einsum("rf,rf->r", met, table[taken.indices])
    pull = ((1 + confidence) * (1 - predicted) + predicted)[:, None] * met
    sums = np.zeros_like(table)
    np.add.at(sums, taken.indices, pull)
    return 2 * (table @ (vectors.T @ vectors) - sums + decay * table)
