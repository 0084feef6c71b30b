"""FPL one user and one triple at a time, in plain Python: slow, readable, and what the fast one is held to."""

import math
from collections import defaultdict


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def local_update(q, b, p, triples, alpha, sent):
    """One user's pass (Eq. 4.3 to 4.9): returns her new vector and the changes she sends, by item.

    `q` and `b` are lists by item and stay as they are; `sent(item)` says whether a positive's change is sent.
    """
    p = list(p)
    changes = defaultdict(lambda: [0.0] * (len(p) + 1))
    user_decay, positive_decay, negative_decay = alpha / 20, alpha / 20, alpha / 200
    for liked, other in triples:
        margin = (b[liked] + dot(q[liked], p)) - (b[other] + dot(q[other], p))
        weight = sigmoid(-margin)
        for h in range(len(p)):
            if sent(liked):
                changes[liked][h] += weight * p[h] - positive_decay * q[liked][h]
            changes[other][h] += -weight * p[h] - negative_decay * q[other][h]
        if sent(liked):
            changes[liked][-1] += weight
        changes[other][-1] += -weight
        p = [p[h] + alpha * (weight * (q[liked][h] - q[other][h]) - user_decay * p[h]) for h in range(len(p))]
    return p, dict(changes)


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def add(q, b, changes, alpha):
    """The server's step (Eq. 4.10): Θ += α Σ_u Δ_u, in place."""
    for item, change in changes.items():
        for h in range(len(change) - 1):
            q[item][h] += alpha * change[h]
        b[item] += alpha * change[-1]
