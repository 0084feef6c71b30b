"""F1 of every class over the rounds, one small figure a class, all rules in each (paper 001)."""

from __future__ import annotations

import json
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from steelyard.report.figures.shared import WIDTH, described, rule_colour, rule_dash
from steelyard.report.view import RunView, plain, sampled

ROUNDS = 60
"""Rounds that a small figure shows at most."""
MOST = 12
"""Classes that are drawn; more are too small to read."""


def class_f1(view: RunView) -> alt.FacetChart | None:
    """Draw F1 of each class on the server's reporting rows, round by round, the mean of the seeds of each rule."""
    frame = view.rounds
    frame = frame[frame["server_metrics"].notna() & (frame["round"] > 0)]
    values: dict[tuple[str, int], list[list[float]]] = {}
    for rule, number, text in zip(frame["rule"], frame["round"], frame["server_metrics"], strict=True):
        metrics = json.loads(text)
        if "f1" in metrics:
            values.setdefault((str(rule), int(number)), []).append(metrics["f1"])
    if not values:
        return None
    known = [label for label in view.labels if any(rule == label for rule, _ in values)]
    rounds = sorted({number for _, number in values})
    shown = {rounds[index] for index in sampled(len(rounds), ROUNDS)}
    rows: list[dict[str, Any]] = []
    for (rule, number), seeds in values.items():
        if number in shown:
            means = np.mean(seeds, axis=0)[:MOST]
            rows += [
                {"rule": rule, "round": number, "class": f"class {label}", "f1": plain(float(mean))}
                for label, mean in enumerate(means)
            ]
    classes = len(next(iter(values.values()))[0])
    chart = (
        alt.Chart(pd.DataFrame(rows))
        .mark_line()
        .encode(
            alt.X("round:Q", title="round", axis=alt.Axis(tickMinStep=1, grid=False)),
            alt.Y("f1:Q", title="F1", scale=alt.Scale(domain=[0, 1])),
            rule_colour(view.labels, known),
            rule_dash(view.labels, known),
            tooltip=["rule:N", "round:Q", "class:N", alt.Tooltip("f1:Q", title="F1", format=".3f")],
        )
        .properties(width=(WIDTH - 120) // 5, height=90)
        .facet(
            alt.Facet("class:N", title=None, sort=[f"class {label}" for label in range(min(classes, MOST))]), columns=5
        )
    )
    note = f"The first {MOST} of {classes} classes." if classes > MOST else ""
    return described(chart, "F1 of each class on the server's rows over the rounds, by rule.", note)
