"""Ranked lists as files: columns user, item, score, as `steelyard recommend evaluate` and other tools read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steelyard.recommend.interactions import Codes, Interactions, Names
from steelyard.recommend.ranking import top


def write_lists(
    path: Path,
    users: Sequence[str] | Names,
    items: Sequence[str] | Names,
    lists: Codes,
    scores: NDArray[np.floating] | None = None,
) -> None:
    """Write lists[users, places] as a TSV with header; without scores, minus the place stands for one."""
    with path.open("w", encoding="utf-8") as out:
        out.write("user\titem\tscore\n")
        for row, name in enumerate(users):
            for place, item in enumerate(lists[row].tolist()):
                if item >= 0:
                    score = -place if scores is None else float(scores[row, place])
                    out.write(f"{name}\t{items[item]}\t{score:.9g}\n")


def write_interactions(path: Path, data: Interactions) -> None:
    """Write interactions as a TSV with header user, item, rating, time (where known) and further columns."""
    import pandas as pd

    frame: dict[str, np.ndarray] = {"user": data.users[data.user], "item": data.items[data.item], "rating": data.rating}
    if data.time is not None:
        frame["time"] = data.time.astype(np.int64) if (data.time % 1 == 0).all() else data.time
    frame |= dict(data.columns)
    pd.DataFrame(frame).to_csv(path, sep="\t", index=False, float_format="%g")


def most_popular(train: Interactions, cutoff: int) -> tuple[Codes, NDArray[np.float64]]:
    """Return each user's k most popular items that she did not train on, ties by ascending id, with their counts."""
    popularity = train.per_item().astype(np.float64)
    seen = np.zeros((len(train.users), len(train.items)), dtype=np.bool_)
    seen[train.user, train.item] = True
    lists = np.concatenate([top(np.broadcast_to(popularity, rows.shape), rows, cutoff) for rows in _blocks(seen)])
    return lists, popularity[lists]


def _blocks(seen: NDArray[np.bool_], cells: int = 1 << 22) -> list[NDArray[np.bool_]]:
    """Cut the rows so that a block of float64 scores stays in some 32 MB."""
    step = max(1, cells // max(seen.shape[1], 1))
    return [seen[start : start + step] for start in range(0, len(seen), step)]
