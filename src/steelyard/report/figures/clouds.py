"""Feature clouds before and after recommendation, as words with bars (the thesis' Figure 6.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt
import pandas as pd

from steelyard.report.documents.recommenders import CloudWord

TITLES = {"before": "in what users took", "after": "in what they are shown"}


def clouds(rows: Sequence[CloudWord]) -> alt.HConcatChart:
    """Draw the most prominent features of both sides, best on top; those of both sides stand out.

    `rows` are those of `Explained.clouds`: when, rank, feature, weight.
    """
    sides = {when: {str(row["feature"]) for row in rows if row["when"] == when} for when in TITLES}
    both = sides["before"] & sides["after"]
    marked = [{**row, "kept": "on both sides" if row["feature"] in both else "on one side"} for row in rows]
    charts = [_side([row for row in marked if row["when"] == when], title) for when, title in TITLES.items()]
    # Lists are shorter than histories, so their gains are larger: words are sized on each side by themselves.
    return alt.hconcat(*charts).resolve_scale(size="independent")


def _side(rows: Sequence[Mapping[str, object]], title: str) -> alt.LayerChart | alt.FacetChart:
    count = max(len(rows), 1)
    y = alt.Y("rank:O", axis=None)
    x = alt.X("weight:Q", title="information gain, summed over users", axis=alt.Axis(grid=False))
    colour = alt.Color(
        "kept:N", scale=alt.Scale(domain=["on both sides", "on one side"]), legend=alt.Legend(title=None, orient="top")
    )
    chart = alt.Chart(pd.DataFrame(rows))
    bars = chart.mark_bar(opacity=0.35).encode(
        x, y, colour, tooltip=["feature:N", alt.Tooltip("weight:Q", format=".3f")]
    )
    # The most prominent features are the largest words, as in a cloud.
    words = chart.mark_text(align="left", dx=4, limit=330).encode(
        alt.XDatum(0), y, alt.Text("feature:N"), size=alt.Size("weight:Q", scale=alt.Scale(range=[9, 14]), legend=None)
    )
    return alt.layer(bars, words, width=340, height=18 * count, title=title)
