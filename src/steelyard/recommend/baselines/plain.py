"""The two baselines that know nobody: random and most popular."""

from __future__ import annotations

import numpy as np

from steelyard.base.randomness import stream_keys, uniforms
from steelyard.recommend.interactions import Codes, Interactions
from steelyard.recommend.lists import Scores
from steelyard.recommend.ranking import Floats


def random(train: Interactions, seed: int = 1) -> Scores:
    """Score items by chance, each user from her own stream; the floor that anything learnt must leave behind."""
    keys = stream_keys(seed, 0, train.users.tolist(), "random baseline")

    def scores(users: Codes) -> Floats:
        return uniforms(keys[users], len(train.items))

    return scores


def popular(train: Interactions, seed: int = 1) -> Scores:
    """Score items by their number of training interactions, the same for everyone."""
    popularity = train.per_item().astype(np.float64)

    def scores(users: Codes) -> Floats:
        return np.broadcast_to(popularity, (len(users), len(popularity)))

    return scores
