"""F1 on the server's rows, macro and class by class, over the rounds and at the end: what AdaFed's figures show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steelyard.report.documents import RuleTables
from steelyard.report.grids import Grid
from steelyard.report.statistics import estimate

MARKS = 6
"""Rounds that the table of macro F1 shows."""
MOST = 20
"""Classes up to which each has a column of its own."""


def by_class(document: RuleTables) -> list[Grid]:
    """Return macro F1 at a few rounds and the last F1 of each class, where the server reports them; else nothing."""
    rows = [row for row in document.get("class_curves", ()) if "f1" in row and row["f1"] and row["f1"][0]]
    if not rows:
        return []
    length = min(len(seed) for row in rows for seed in row["f1"])
    marks = sorted({max(1, math.ceil(length * part / MARKS)) for part in range(1, MARKS + 1)} | {1})
    macro = [
        (row["rule"], *(_cell([sum(seed[mark - 1]) / len(seed[mark - 1]) for seed in row["f1"]]) for mark in marks))
        for row in rows
    ]
    found = [
        Grid("Macro F1 on the server's reporting rows", ("rule", *(f"round {mark}" for mark in marks)), tuple(macro))
    ]
    count = len(rows[0]["f1"][0][0])
    if count <= MOST:
        last = [
            (row["rule"], *(_cell([seed[length - 1][label] for seed in row["f1"]]) for label in range(count)))
            for row in rows
        ]
        headings = ("rule", *(f"class {label}" for label in range(count)))
        found.append(Grid(f"F1 of each class on the server's reporting rows, round {length}", headings, tuple(last)))
    return found


def _cell(values: Sequence[float]) -> str:
    found = estimate(values)
    return f"{found.mean:.3f}" if len(values) < 2 else f"{found.mean:.3f}±{found.half:.3f}"
