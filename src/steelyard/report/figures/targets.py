"""The figure of rounds to target."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from steelyard.report.figures.shared import WIDTH, described, rule_colour, rule_dash
from steelyard.report.view import RunView, plain


def targets(view: RunView) -> alt.FacetChart | None:
    """Draw how many rounds each rule needs until a share of the devices reach a target: steep and left is good."""
    rows = _target_rows(view)
    if not rows:
        return None
    known = [label for label in view.labels if any(row["rule"] == label for row in rows)]
    order = [_goal(target) for target in sorted({float(row["goal"]) for row in rows})]
    chart = (
        alt.Chart(pd.DataFrame(rows))
        .mark_line(point=alt.OverlayMarkDef(size=36))
        .encode(
            alt.X("rounds:Q", title="rounds needed", axis=alt.Axis(tickMinStep=1)),
            alt.Y("share:Q", title="share of devices", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
            rule_colour(view.labels, known),
            rule_dash(view.labels, known),
            order=alt.Order("share:Q"),
            tooltip=[
                alt.Tooltip("rule:N"),
                alt.Tooltip("share:Q", format=".0%", title="share of devices"),
                alt.Tooltip("rounds:Q", format=".1f", title="rounds needed"),
                alt.Tooltip("unreached:Q", title="seeds that did not reach it"),
            ],
        )
        .properties(width=WIDTH // 2 - 50, height=190)
        .facet(alt.Facet("target:N", sort=order, title=None))
        .properties(columns=2)
    )
    note = (
        "A rule that reaches a target in no seed has no point there; where some seeds do not, they count as the limit."
    )
    return described(chart, "Rounds needed until a share of the devices reach each target, by rule.", note)


def _goal(target: float) -> str:
    return f"until they reach {target:.0%}"


def _target_rows(view: RunView) -> list[dict[str, Any]]:
    """Return the rounds that each rule needs for each target and share; what no seed reached is left out."""
    rows: list[dict[str, Any]] = []
    for index, document in enumerate(view.documents):
        for section in document["rounds_to_target"] if document else ():
            base = section["rows"][0]
            for row in section["rows"]:
                for cell, first in zip(row["cells"], base["cells"], strict=True):
                    rounds = cell["mean"] if row is base else first["mean"] - cell["mean"]
                    if cell["unreached"] < len(cell["values"]):
                        rows.append(
                            {
                                "rule": view.label(index, row["rule"]),
                                "target": _goal(section["target"]),
                                "goal": section["target"],
                                "share": cell["share"],
                                "rounds": plain(float(rounds)),
                                "unreached": cell["unreached"],
                            }
                        )
    return rows
