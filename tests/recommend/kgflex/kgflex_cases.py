"""A few users, items and features, on which the fast forms of KGFlex are held to the slow one."""

import numpy as np
from tests.recommend.fpl_cases import ITEMS, few_histories

from steelyard.recommend.kgflex.model import Knowledge
from steelyard.recommend.kgflex.selection import select
from steelyard.recommend.knowledge.features import ItemFeatures, build
from steelyard.recommend.sampling import Histories

FEATURES, FACTORS = 17, 3
LIMITS = (4, 3)


def few_features(seed: int = 3) -> ItemFeatures:
    """Every item has about a third of the features, the last none at all; some features are of two hops."""
    random = np.random.default_rng(seed)
    marks = random.random((ITEMS, FEATURES)) < 0.35
    marks[-1] = False
    items, features = np.nonzero(marks)
    return build(items, features, ITEMS, [f"f{f}" for f in range(FEATURES)], [1 + f % 2 for f in range(FEATURES)])


def few_known(seed: int = 1) -> tuple[Histories, Knowledge]:
    histories, features = few_histories(), few_features()
    return histories, Knowledge(features, select(histories, features, seed, LIMITS))


def sets_of(features: ItemFeatures) -> list[set[int]]:
    """Each item's features, as the slow reference has them."""
    return [set(features.of(item).tolist()) for item in range(features.items)]
