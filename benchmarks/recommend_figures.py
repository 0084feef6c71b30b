"""Pictures of the thesis' Figures 4.2 to 4.4 from the lines of recommend_tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from benchmarks.recommend_plan import VARIANTS
from benchmarks.recommend_systems import Line
from benchmarks.recommend_thesis import TITLES

SHOWN = ("italy", "milan", "rome", "amazon", "librarything", "ml1m")
"""Data sets in the order of the pictures; those without lines are left out."""
ORDER = [mode for mode, _ in VARIANTS[:4]]
COLOURS = alt.Scale(domain=ORDER, range=["#1f4e79", "#6aa6d6", "#2e7d32", "#8bc34a"])


def shown(lines: Sequence[Line], data: str) -> tuple[str, list[Line]]:
    """Return a data set's title and its lines over π, seed 1: of the test set or, before that, of the validation rows.

    Of validation rows the best epoch of each mode and π. A model that exploded shows no item and is left out.
    """
    mine = [
        line
        for line in lines
        if (line["data"], line["seed"]) == (data, 1) and line["item_coverage"] > 0
        if (line["system"], line["settings"].get("epoch")) in VARIANTS[:4]
    ]
    tested = [line for line in mine if line["use"] == "test"]
    if tested:
        return TITLES[data], tested
    tops: dict[tuple[str, float], Line] = {}
    for line in sorted(mine, key=lambda line: line["precision"]):
        tops[line["system"], line["settings"]["pi"]] = line
    return f"{TITLES[data]}, validation rows", list(tops.values())


def frame(lines: Sequence[Line]) -> pd.DataFrame:
    """Return the lines of the modes of FPL over π as a table, with the + modes as the thesis' tables have them."""
    rows: list[dict[str, Any]] = []
    for data in SHOWN:
        title, mine = shown(lines, data)
        rows += [
            {
                "data": title,
                "mode": line["system"],
                "π": line["settings"]["pi"],
                "F1@10": line["f1"],
                "P@10": line["precision"],
                "items shown": line["item_coverage"],
                "updates": line.get("updates", {}),
            }
            for line in sorted(mine, key=lambda line: (line["system"], line["settings"]["pi"]))
        ]
    return pd.DataFrame(rows)


def draw(lines: Sequence[Line], folder: Path) -> None:
    """Write recommend-pi.svg (4.2), recommend-coverage.svg (4.3) and recommend-updates.svg (4.4)."""
    found = frame(lines)
    if found.empty:
        return
    order = list(dict.fromkeys(found["data"]))
    colour = alt.Color("mode:N", scale=COLOURS, sort=ORDER, title=None)
    base = alt.Chart(found[found["π"] > 0]).properties(width=230, height=150)
    over = base.mark_line(point=True).encode(x="π:Q", y=alt.Y("F1@10:Q", scale=alt.Scale(zero=False)), color=colour)
    _save(_facets(over, order), folder / "recommend-pi.svg")
    # As in the thesis: coverage to the right, precision upwards, a white point where everything is sent.
    wide = base.encode(
        x=alt.X("items shown:Q", scale=alt.Scale(zero=False)),
        y=alt.Y("P@10:Q", scale=alt.Scale(zero=False)),
        color=colour,
    )
    ends = wide.mark_point(filled=False, fill="white", size=45, opacity=1).transform_filter("datum['π'] == 1")
    _save(
        _facets(alt.layer(wide.mark_line(point=True).encode(order="π:Q"), ends), order),
        folder / "recommend-coverage.svg",
    )
    ranks = [
        {"data": row["data"], "mode": row["mode"], "π": row["π"], "rank": int(rank), "share of updates": share}
        for row in found[found["mode"].isin(["sFPL", "sFPL+"])].to_dict(orient="records")
        for rank, share in row["updates"].items()
        if row["π"] in (0, 0.1, 0.5, 1)
    ]
    lines_of = alt.Chart(pd.DataFrame(ranks)).mark_line(point=True).properties(width=230, height=150)
    sent = lines_of.encode(
        x=alt.X("rank:Q", scale=alt.Scale(type="log"), title="rank of the item by updates"),
        y=alt.Y("share of updates:Q", scale=alt.Scale(type="log")),
        color=alt.Color("π:O", scale=alt.Scale(scheme="redblue")),
        strokeDash="mode:N",
    )
    _save(_facets(sent, order), folder / "recommend-updates.svg")


def _facets(chart: alt.Chart | alt.LayerChart, order: Sequence[str]) -> alt.FacetChart:
    facets = chart.facet(facet=alt.Facet("data:N", title=None, sort=order), columns=2)
    return facets.resolve_scale(x="independent", y="independent")


def _save(chart: alt.FacetChart, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.save(str(path))
