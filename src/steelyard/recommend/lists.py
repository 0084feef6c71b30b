"""Ranked lists as files: columns user, item, score, as `steelyard recommend evaluate` and other tools read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steelyard.recommend.histories import Histories
from steelyard.recommend.interactions import Codes, Interactions, Names
from steelyard.recommend.ranking import top

Scores = Callable[[Codes], NDArray[np.floating]]
"""Gives the scores of all items for some users, [users, items]."""


def write_lists(
    path: Path,
    users: Sequence[str] | Names,
    items: Sequence[str] | Names,
    lists: Codes,
    scores: NDArray[np.floating] | None = None,
) -> None:
    """Write lists[users, ranks] as a TSV with header; without scores, minus the rank stands for one."""
    with path.open("w", encoding="utf-8") as out:
        out.write("user\titem\tscore\n")
        for row, name in enumerate(users):
            for rank, item in enumerate(lists[row].tolist()):
                if item >= 0:
                    score = -rank if scores is None else float(scores[row, rank])
                    out.write(f"{name}\t{items[item]}\t{score:.9g}\n")


def write_interactions(path: Path, data: Interactions) -> None:
    """Write interactions as a TSV with header user, item, rating, time (where known) and further columns."""
    # For speed of start: much of the package reads no tables.
    import pandas as pd

    frame: dict[str, np.ndarray] = {"user": data.users[data.user], "item": data.items[data.item], "rating": data.rating}
    if data.time is not None:
        frame["time"] = data.time.astype(np.int64) if (data.time % 1 == 0).all() else data.time
    frame |= dict(data.columns)
    pd.DataFrame(frame).to_csv(path, sep="\t", index=False, float_format="%g")


def best_unseen(
    histories: Histories, scores: Scores, cutoff: int, cells: int = 1 << 22
) -> tuple[Codes, NDArray[np.float64]]:
    """Return each user's k best items that are not in her history, and their scores; users go through in blocks.

    `scores(users)` gives the scores of all items; ties go by ascending item number. Use it for any system: FPL and
    every baseline get their lists here. `cells` is how many scores are held at a time.
    """
    step = max(1, cells // max(histories.catalogue, 1))
    lists: list[Codes] = []
    values: list[NDArray[np.float64]] = []
    for start in range(0, histories.users, step):
        block = np.arange(start, min(start + step, histories.users))
        found = scores(block)
        best = top(found, histories.seen(block), cutoff)
        lists.append(best)
        values.append(np.take_along_axis(found, np.maximum(best, 0), axis=1).astype(np.float64))
    return np.concatenate(lists), np.concatenate(values)
