"""Rounds that weighed one client: its weight is all there is, so that such a round tells nothing of a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steelyard.rounds.progress import RAISE
from steelyard.runs.reader import History


def weighed_one(history: History) -> list[dict[str, Any]]:
    """Return each rule and seed that had such rounds, with how many of how many; a sound run has none."""
    frame: Any = history.rounds
    frame = frame[frame["round"] > 0]
    frame = frame.assign(single=(frame["answered"] == 1) & (frame["kept_old"] == 0))
    return [
        {"rule": str(rule), "seed": int(seed), "rounds": int(rows["single"].sum()), "of": len(rows)}
        for (rule, seed), rows in frame.groupby(["rule", "seed"], sort=False)
        if rows["single"].any()
    ]


def weighed_one_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a reader must know of such rounds: one sentence for all rules and seeds, or none."""
    if not found:
        return []
    most = max(found, key=lambda row: row["rounds"] / row["of"])
    more = f", and so did {len(found) - 1} more of the rules and seeds" if len(found) > 1 else ""
    return [
        f"Warning: {most['rounds']} of {most['of']} rounds of {most['rule']}, seed {most['seed']}, weighed one client "
        f"only{more}: no rule can prefer one client to another there. {RAISE}"
    ]
