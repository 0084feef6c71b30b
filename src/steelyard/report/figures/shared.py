"""What several figures need: rows of lists, axes of rounds and scores, colours of rules and clients."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from steelyard.report.view import RunView

WIDTH, HEIGHT = 640, 300
POINTS = 240
"""Rounds that a curve shows at most; more are sampled evenly."""
MOST_RULES = 12
"""Curves in one figure at most."""
_DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3])


def score_format(measure: str) -> str:
    """Return the number format of an axis of scores; accuracies are shown in per cent."""
    return "%" if "accuracy" in measure else ".3~g"


def shown_rules(view: RunView, last: dict[str, float]) -> list[str]:
    """Return the rules that one figure shows: all, or the baseline and those that ended best, in the run's order."""
    if len(view.labels) <= MOST_RULES:
        return view.labels
    ranked = sorted(view.labels, key=lambda label: -last.get(label, float("-inf")))
    kept = {view.baseline, *[label for label in ranked if label != view.baseline][: MOST_RULES - 1]}
    return [label for label in view.labels if label in kept]


def rule_colour(labels: Sequence[str], shown: Sequence[str] | None = None) -> alt.Color:
    """Colour by rule; with all rules as labels, and those that the legend names as shown, alike in every figure."""
    return alt.Color("rule:N", scale=alt.Scale(domain=list(labels)), legend=_legend(shown or labels))


def rule_dash(labels: Sequence[str], shown: Sequence[str] | None = None) -> alt.StrokeDash:
    """Dash the lines of later rules, so that two that coincide are both seen and colour is not the only sign."""
    scale = alt.Scale(domain=list(labels), range=dashes(len(labels)))
    return alt.StrokeDash("rule:N", scale=scale, legend=_legend(shown or labels))


def dashes(count: int) -> list[list[int]]:
    """Return the dashes of so many lines, the first of them none."""
    return [_DASHES[index % len(_DASHES)] for index in range(count)]


def _legend(shown: Sequence[str]) -> alt.Legend:
    return alt.Legend(columns=4, symbolType="stroke", symbolOpacity=1, values=list(shown))


def round_axis(first: float, last: float) -> alt.X:
    """Return an axis of rounds without room at its ends."""
    scale = alt.Scale(domain=[first, max(last, first + 1)], nice=False, zero=False)
    return alt.X("round:Q", title="round", scale=scale, axis=alt.Axis(tickMinStep=1, grid=False))


def lists(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return rows whose cells may be lists, for `transform_flatten`: short documents, few rows."""
    frame = pd.DataFrame(list(rows))
    # Altair tells layers apart by the name of their data, and without one by what pandas prints: far slower for lists.
    object.__setattr__(frame, "name", hashlib.sha256(repr(rows).encode()).hexdigest())
    return frame


def described(chart: Any, description: str, note: str = "") -> Any:
    """Give a figure its description for screen readers, and its note on what was left out, aggregated or sampled."""
    # In its place: Altair's `properties` would copy all layers of a chart that nobody else holds.
    chart.description, chart.usermeta = description, {"note": note} if note else {}
    return chart
