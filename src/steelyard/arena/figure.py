"""The picture of an arena: every rule by its mean rank over the scenes, and how far ranks must lie apart."""

from __future__ import annotations

import math
from typing import Any

import altair as alt
import pandas as pd

from steelyard.report.documents.arena import ArenaDocument
from steelyard.report.figures.shared import WIDTH, described

ROW = 26
"""Height of a rule's line, in pixels."""


def rank_chart(document: ArenaDocument) -> alt.LayerChart | None:
    """Draw mean ranks as points, the best on top; a line through each spans what cannot be told apart from it.

    Two rules whose ranks lie further apart than the critical difference differ: neither point is on the other's line.
    None with fewer than three rules, and where no scene has figures of every rule.
    """
    ranks = document["ranks"]
    if len(ranks) < 3:
        return None
    critical = document["critical_difference"]
    last = float(len(ranks))
    rows = [
        {
            "rule": row["rule"],
            "rank": row["rank"],
            "low": max(1.0, row["rank"] - (critical or 0.0)),
            "high": min(last, row["rank"] + (critical or 0.0)),
            "role": "candidate" if row["rule"] == document["candidate"] else "rival",
        }
        for row in ranks
    ]
    base = alt.Chart(pd.DataFrame(rows))
    rule = alt.Y("rule:N", title=None, sort=[row["rule"] for row in ranks], axis=alt.Axis(labelLimit=220))
    scale = alt.Scale(domain=[1, max(last, 2.0)], nice=False, zero=False, padding=10)
    rank = alt.X("rank:Q", title="mean rank (1 is the best)", scale=scale, axis=alt.Axis(tickMinStep=1))
    colour = alt.Color("role:N", scale=alt.Scale(domain=["candidate", "rival"]), legend=alt.Legend(title=None))
    tips = [alt.Tooltip("rule:N"), alt.Tooltip("rank:Q", format=".2f")]
    layers: list[Any] = [base.mark_point(filled=True, size=90, opacity=1).encode(rank, rule, colour, tooltip=tips)]
    if critical is not None:
        layers.insert(0, base.mark_rule(opacity=0.45).encode(alt.X("low:Q", scale=scale), rule, colour, x2="high:Q"))
    chart = alt.layer(*layers).properties(width=WIDTH, height=ROW * len(ranks))
    note = "" if critical is None else f"Line: ranks less than {critical:.2f} apart, which cannot be told apart (5 %)."
    return described(chart, f"Mean rank of each rule over the scenes of the suite {document['suite']}.", note)


def gain_chart(document: ArenaDocument) -> alt.LayerChart | None:
    """Draw the candidate's gain over the baseline in each scene, with its interval; None before one is done."""
    rows: list[dict[str, Any]] = [
        {"scene": scene["scene"], "verdict": scene["verdict"]}
        | {end: 100 * gain[end] for end in ("mean", "low", "high")}
        for scene in document["scenes"]
        if (gain := scene["gain"]) is not None
    ]
    if not rows:
        return None
    base = alt.Chart(pd.DataFrame(rows))
    scene = alt.Y("scene:N", title=None, sort=[row["scene"] for row in rows], axis=alt.Axis(labelLimit=220))
    title = f"points over {document['baseline']}"
    shape = alt.Shape("verdict:N", legend=alt.Legend(title=None))
    tips = [alt.Tooltip("scene:N"), alt.Tooltip("mean:Q", format="+.1f"), alt.Tooltip("verdict:N")]
    layers: list[Any] = [
        alt.Chart(pd.DataFrame([{"zero": 0.0}])).mark_rule(strokeDash=[4, 3], opacity=0.6).encode(x="zero:Q"),
        base.mark_point(filled=True, size=90, opacity=1).encode(
            alt.X("mean:Q", title=title), scene, shape, tooltip=tips
        ),
    ]
    if not any(math.isnan(row["low"]) for row in rows):
        layers.insert(1, base.mark_rule().encode(alt.X("low:Q", title=title), scene, x2="high:Q"))
    chart = alt.layer(*layers).properties(width=WIDTH, height=ROW * len(rows))
    return described(chart, f"Gain of {document['candidate']} over {document['baseline']} in each scene.", "")
