"""KGFlex one user, triple and feature at a time, straight from the equations: what the fast one is held to.

Beside it a few users, items and features, on which it is.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

import numpy as np
from tests.recommend.fpl_cases import ITEMS, dot, few_histories

from steelyard.recommend.histories import Histories
from steelyard.recommend.kgflex.model import Knowledge
from steelyard.recommend.kgflex.selection import select
from steelyard.recommend.knowledge.features import ItemFeatures, build

FEATURES, FACTORS = 17, 3
LIMITS = (4, 3)


def few_features(seed: int = 3) -> ItemFeatures:
    """Every item has about a third of the features, the last none at all; some features are of two hops."""
    marks = np.random.default_rng(seed).random((ITEMS, FEATURES)) < 0.35
    marks[-1] = False
    items, features = np.nonzero(marks)
    return build(items, features, ITEMS, [f"f{f}" for f in range(FEATURES)], [1 + f % 2 for f in range(FEATURES)])


def few_known(seed: int = 1) -> tuple[Histories, Knowledge]:
    histories, features = few_histories(), few_features()
    return histories, Knowledge(features, select(histories, features, seed, LIMITS))


def sets_of(features: ItemFeatures) -> list[set[int]]:
    """Each item's features, as the slow reference has them."""
    return [set(features.of(item).tolist()) for item in range(features.items)]


def of_user(knowledge: Knowledge, views: np.ndarray, user: int) -> tuple[dict[int, float], dict[int, list[float]]]:
    """A user's gains and vectors by feature."""
    mine = knowledge.selection.entries(user)
    features = knowledge.selection.features[mine].tolist()
    weights = dict(zip(features, knowledge.selection.weights[mine].tolist(), strict=True))
    return weights, dict(zip(features, views[mine].astype(float).tolist(), strict=True))


Vector = list[float]


def entropy(*counts: int) -> float:
    """Eq. 6.4 of a class distribution given as counts."""
    whole = sum(counts)
    return -sum(count / whole * math.log2(count / whole) for count in counts if count) if whole else 0.0


def gain(liked: Sequence[int], others: Sequence[int], feature: int, of: Sequence[Set[int]]) -> float:
    """Eqs. 6.5 and 6.6: what knowing the feature says about whether an item of D_u is the user's."""
    p, n = (sum(feature in of[item] for item in side) for side in (liked, others))
    whole = len(liked) + len(others)
    present = (p + n) / whole * entropy(p, n)
    absent = (whole - p - n) / whole * entropy(len(liked) - p, len(others) - n)
    return entropy(len(liked), len(others)) - present - absent


def selected(
    liked: Sequence[int], others: Sequence[int], of: Sequence[Set[int]], hops: Sequence[int], limits: Sequence[int]
) -> dict[int, float]:
    """F_u with k_uf: features of her items that tell something, the best so many of each number of hops."""
    gains = {f: gain(liked, others, f, of) for f in set().union(*(of[i] for i in liked), set())}
    kept: dict[int, float] = {}
    for hop, limit in enumerate(limits, 1):
        told = sorted(
            (f for f in gains if hops[f] == hop and gains[f] > 1e-12), key=lambda f: (-round(gains[f], 12), f)
        )
        kept |= {f: gains[f] for f in told[:limit]}
    return kept


def score(k: Mapping[int, float], p: Mapping[int, Vector], g: np.ndarray, b: np.ndarray, item: Set[int]) -> float:
    """Eq. 6.12."""
    return sum(k[f] * (dot(p[f], g[f]) + b[f]) for f in k if f in item)


def local_update(
    k: Mapping[int, float],
    p: Mapping[int, Vector],
    table: np.ndarray,
    triples: Sequence[tuple[Set[int], Set[int]]],
    alpha: float,
    sent: Sequence[bool],
    real: Sequence[bool],
    decays: tuple[float, float, float],
) -> tuple[dict[int, Vector], dict[int, Vector], list[float]]:
    """One user's pass: her new views, the changes that she sends by feature, and the margins."""
    p, g, b = {f: list(vector) for f, vector in p.items()}, table[:, :-1].astype(float), table[:, -1].astype(float)
    width = g.shape[1]
    changes: defaultdict[int, Vector] = defaultdict(lambda: [0.0] * (width + 1))
    margins: list[float] = []
    user_decay, positive_decay, negative_decay = decays
    for (liked, other), shown, hers in zip(triples, sent, real, strict=True):
        margin = score(k, p, g, b, liked) - score(k, p, g, b, other)
        margins.append(margin)
        weight = 1 / (1 + math.exp(margin))
        before = {f: list(vector) for f, vector in p.items()}
        for f in k:
            c = (f in liked) - (f in other)
            c_sent = (f in liked and shown) - (f in other)
            if c_sent:
                decay = positive_decay if c_sent > 0 else negative_decay
                for h in range(width):
                    changes[f][h] += weight * c_sent * k[f] * before[f][h] - decay * g[f][h]
                changes[f][-1] += weight * c_sent * k[f]
            if c and hers:
                p[f] = [
                    before[f][h] + alpha * (weight * c * k[f] * g[f][h] - user_decay * before[f][h])
                    for h in range(width)
                ]
    return p, dict(changes), margins
