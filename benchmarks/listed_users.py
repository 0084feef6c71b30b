"""Item-kNN of the thesis' Table 4.2 over the users who get a list: Amazon Digital Music, users with 20 items or more.

    python -m benchmarks.listed_users --neighbours 10

Prints JSON: how many of all users get an item with a score above 0, their mean P@10 and R@10, and how many items are
shown to anyone. The tables of docs/results/recommend.md keep all users. Needs amazon_digital_music in $STEELYARD_DATA.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from steelyard.data.files import find
from steelyard.recommend.baselines.neighbours import item_knn
from steelyard.recommend.filters import core
from steelyard.recommend.reading import read
from steelyard.recommend.splits import temporal

CUTOFF = 10


def measured(path: Path, neighbours: int) -> dict[str, float]:
    """Return the figures of item-kNN that divides by all neighbours' weights, without items of score 0."""
    split = temporal(core(read(path), users=20))
    scores = item_knn(split.train, neighbours=neighbours, divide="all")
    taken, wanted = (
        [part.item[part.user == user] for user in range(split.users)] for part in (split.train, split.test)
    )
    found: list[tuple[bool, float, float]] = []
    shown: set[int] = set()
    for user in range(split.users):
        row = scores(np.array([user]))[0]
        row[taken[user]] = 0
        best = np.argsort(-row, kind="stable")[:CUTOFF]
        best = best[row[best] > 0]  # items of score 0 would fill the list in the order of their numbers
        hits = len(np.intersect1d(best, wanted[user]))
        found.append((len(best) > 0, hits / CUTOFF, hits / len(wanted[user])))
        shown.update(best.tolist())
    listed, precision, recall = np.array(found).T
    users = int(listed.sum())
    figures = {"P@10": round(precision.sum() / users, 5), "R@10": round(recall.sum() / users, 5), "items": len(shown)}
    return {"all users": split.users, "users with a list": users} | figures


def main() -> None:
    """Read the options and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("amazon_digital_music/AmazonDigitalMusic.tsv.gz"))
    parser.add_argument("--neighbours", type=int, default=10)
    options = parser.parse_args()
    print(json.dumps(measured(find(options.data, "Amazon Digital Music"), options.neighbours)))


if __name__ == "__main__":
    main()
