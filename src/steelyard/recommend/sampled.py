"""Leave-one-out with sampled negatives: each test item ranked among a few items that its user never took.

The protocol of X. He et al., *Neural Collaborative Filtering*, 2017, and many after it: each user's newest item is held
out (`interactions.split = "newest"`) and ranked among 99 drawn ones; HR@k asks whether it is among the first k, nDCG@k
adds how far up. It is cheap, but its figures are much higher than those of the full ranking, and may order systems
differently (W. Krichene, S. Rendle, *On Sampled Metrics for Item Recommendation*, 2020): compare it with nothing but
its like. The full ranking is the default here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.base.randomness import stream_keys, words
from steelyard.recommend.interactions import Codes
from steelyard.recommend.lists import Scores
from steelyard.recommend.ranking import Floats, GroundTruth

_CELLS = 1 << 22
"""Scores or words held at a time."""


@dataclass(frozen=True)
class Sampled:
    """How many negatives stand beside each test item, and the seed that they are drawn by, the same in every run."""

    count: int = 99
    seed: int = 42


def draw_negatives(truth: GroundTruth, names: Sequence[str], sampled: Sampled) -> Codes:
    """Return [users, count]: distinct items that each user neither trained on nor is tested on; -1 where none is left.

    Every item gets a word of the user's own stream and those with the smallest words are drawn, so a draw depends on
    the user's name, the seed and her items alone, whoever else there is.
    """
    keys = stream_keys(sampled.seed, 0, names, "sampled negatives")
    found = np.full((truth.users, sampled.count), -1, dtype=np.int64)
    step = max(1, _CELLS // max(truth.items, 1))
    drawn = min(sampled.count, truth.items)
    for start in range(0, truth.users, step):
        block = slice(start, min(start + step, truth.users))
        taken = np.zeros((block.stop - start, truth.items), dtype=np.bool_)
        for user, item in ((truth.train_user, truth.train_item), (truth.test_user, truth.test_item)):
            inside = (user >= start) & (user < block.stop)
            taken[user[inside] - start, item[inside]] = True
        order = np.where(taken, np.uint64(0xFFFFFFFFFFFFFFFF), words(keys[block], truth.items))
        chosen = np.argsort(order, axis=1, kind="stable")[:, :drawn]
        found[block, :drawn] = np.where(np.take_along_axis(taken, chosen, axis=1), -1, chosen)
    return found


def ranks(truth: GroundTruth, negatives: Codes, scores: Scores) -> Codes:
    """Return the rank, from 0, of each relevant test item among its user's negatives; ties by ascending item number."""
    found = np.empty(len(truth.test_user), dtype=np.int64)
    step = max(1, _CELLS // max(truth.items, 1))
    for start in range(0, truth.users, step):
        users = np.arange(start, min(start + step, truth.users))
        pairs = np.flatnonzero((truth.test_user >= start) & (truth.test_user < start + step))
        if not len(pairs):
            continue
        table = np.nan_to_num(scores(users), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        row, item = truth.test_user[pairs] - start, truth.test_item[pairs]
        others = negatives[truth.test_user[pairs]]
        mine, theirs = table[row, item][:, None], table[row[:, None], others]
        ahead = (theirs > mine) | ((theirs == mine) & (others < item[:, None]))
        found[pairs] = (ahead & (others >= 0)).sum(axis=1)
    return found


def per_user(truth: GroundTruth, ranks: Codes, cutoff: int) -> dict[str, Floats]:
    """Return HR@k and nDCG@k of every user, means over her test items: one of them in leave-one-out."""
    inside = ranks < cutoff
    gains = {"hit_rate": inside.astype(np.float64), "ndcg": np.where(inside, 1.0 / np.log2(ranks + 2.0), 0.0)}
    tests = np.maximum(truth.relevant, 1)
    return {name: np.bincount(truth.test_user, gain, truth.users) / tests for name, gain in gains.items()}
