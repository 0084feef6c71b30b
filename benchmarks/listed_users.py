"""Item-kNN of the thesis' Table 4.2 over the users who get a list: Amazon Digital Music, users with 20 items or more.

    python -m benchmarks.listed_users --neighbours 10

Prints JSON: how many of all users get an item with a score above 0, their mean P@10 and R@10, and how many items are
shown to anyone. The tables of docs/results/recommend.md keep all users. Needs amazon_digital_music in $STEELYARD_DATA.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.kit import start
from steelyard.data.files import find
from steelyard.recommend.baselines.neighbours import ItemKnn
from steelyard.recommend.evaluate import best_unseen
from steelyard.recommend.histories import Histories
from steelyard.recommend.interactions import core, read, temporal
from steelyard.recommend.metrics import GroundTruth, ItemCoverage, Precision, Recall

CUTOFF = 10


def measured(path: Path, neighbours: int) -> dict[str, float]:
    """Return the figures of item-kNN that divides by all neighbours' weights, without items of score 0."""
    split = temporal(core(read(path), users=20))
    scores = ItemKnn(neighbours=neighbours, divide="all").scores(split.train, 1)
    lists, values = best_unseen(Histories.of(split.train), scores, CUTOFF)
    # Items of score 0 would fill the lists in the order of their numbers.
    view = GroundTruth.of(split).view(np.where(values > 0, lists, -1), CUTOFF)
    listed = view.shown.any(axis=1)
    means = {name: metric.per_user(view)[listed].mean() for name, metric in (("P@10", Precision()), ("R@10", Recall()))}
    found = {"all users": split.users, "users with a list": int(listed.sum())}
    return found | {name: round(float(mean), 5) for name, mean in means.items()} | {"items": int(ItemCoverage()(view))}


def main(data: Path = Path("amazon_digital_music/AmazonDigitalMusic.tsv.gz"), neighbours: int = 10) -> None:
    """Measure and print."""
    print(json.dumps(measured(find(data, "Amazon Digital Music"), neighbours)))


if __name__ == "__main__":
    start(main)
