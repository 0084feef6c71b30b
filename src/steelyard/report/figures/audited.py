"""The figures of an audit: images that a server finds, how much noise or how large a sum hides them, canaries, FPL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from steelyard.experiment.canary_runs import CanaryResult
from steelyard.experiment.privacy_sweeps import InversionSweep, Picture
from steelyard.experiment.recommend_audit import AuditedProtection
from steelyard.report.figures.catalogue import Chart
from steelyard.report.figures.shared import HEIGHT, WIDTH, dashes, described

_LEGEND = alt.Legend(columns=3, symbolType="stroke")
_SIDE = 62
"""Size of one picture."""
_ROW_HEADER = alt.Header(labelAngle=0, labelAnchor="middle", labelAlign="left")


def pictures(entries: Sequence[Picture]) -> Chart:
    """Draw samples, and beside each what was found in its place under each protection; entries of `show_inversion`."""
    columns = list(dict.fromkeys(str(entry["title"]) for entry in entries))
    cases = list(dict.fromkeys(str(entry["case"]) for entry in entries))
    rows = [
        {"case": entry["case"], "title": entry["title"], "x": x, "y": y, "ink": ink}
        for entry in entries
        for y, line in enumerate(entry["pixels"])
        for x, ink in enumerate(line)
    ]
    chart = (
        alt.Chart(pd.DataFrame(rows))
        .mark_rect()
        .encode(
            alt.X("x:O", axis=None),
            alt.Y("y:O", axis=None),
            alt.Color("ink:Q", scale=alt.Scale(domain=[0, 1]), legend=None),
        )
        .properties(width=_SIDE, height=_SIDE)
        .facet(
            column=alt.Column("title:N", sort=columns, title=None),
            row=alt.Row("case:N", sort=cases, title=None, header=_ROW_HEADER),
            spacing=6,
        )
    )
    return described(chart, "Digits that clients hold, and what a curious server finds in their place.")


def inversion(document: InversionSweep) -> Chart:
    """Draw how alike what is found is to the sample, over the noise's ε and over the clients in a sum.

    `document` is that of `sweep_inversion`.
    """
    rows = document["rows"]
    names = list(dict.fromkeys(row["attack"] for row in rows))
    low = min(0.0, *(row["likeness"] for row in rows))
    y = alt.Y("likeness:Q", title="correlation with the sample", scale=alt.Scale(domain=[low, 1.0]))
    colour = alt.Color("attack:N", scale=alt.Scale(domain=names), legend=_LEGEND)
    panels: list[Any] = []
    for name, title in (("noise", "ε of the round, noise on the device"), ("sum", "clients in the sum")):
        mine = [row for row in rows if row["protection"] == name]
        x = alt.X("value:Q", title=title, scale=alt.Scale(type="log", nice=False), axis=_axis())
        lines = alt.Chart(pd.DataFrame(mine)).mark_line(point=alt.OverlayMarkDef(size=36)).encode(x, y, colour)
        # The words stand where no line is: noise begins low, sums end low.
        left = name == "noise"
        place = (min if left else max)(row["value"] for row in mine)
        words = [{"likeness": document["guess"], "value": place, "text": "mean image of the class"}]
        level = alt.Chart(pd.DataFrame(words))
        rule = level.mark_rule(strokeDash=[4, 3]).encode(alt.Y("likeness:Q"))
        text = level.mark_text(align="left" if left else "right", dx=4 if left else -4, dy=-6, fontSize=10)
        text = text.encode(x, alt.Y("likeness:Q"), alt.Text("text:N"))
        panels.append(alt.layer(lines, rule, text, width=WIDTH // 2 - 40, height=HEIGHT - 40))
    return described(
        alt.hconcat(*panels),
        "Correlation of what gradient inversion finds with the sample, by the noise and by the size of a sum.",
        "Dashed: the mean image of the sample's class, for which nothing need be sent.",
    )


def canaries(results: Sequence[CanaryResult]) -> Chart:
    """Draw the bound that canaries give beside the ε that the runs state, over the noise; rows of `CanaryResult`."""
    lower, upper = "canaries: at least", "ledger: at most"
    rows = [
        {"noise": row.noise, "bound": name, "epsilon": value}
        for row in results
        for name, value in ((upper, row.accounted), (lower, row.lower))
    ]
    first = results[0]
    x = alt.X("noise:Q", title="noise multiplier z", scale=alt.Scale(type="log", nice=False), axis=_axis("~g"))
    y = alt.Y("epsilon:Q", title=f"ε at δ = {first.delta:g}", scale=alt.Scale(type="symlog", constant=0.5, nice=False))
    chart = (
        alt.Chart(pd.DataFrame(rows))
        .mark_line(point=alt.OverlayMarkDef(size=40))
        .encode(x, y, alt.Color("bound:N", scale=alt.Scale(domain=[upper, lower]), legend=_LEGEND))
        .properties(width=WIDTH, height=HEIGHT)
    )
    planted = f"{first.canaries:,} canaries in {first.runs:,} whole runs each, {first.confidence:.0%} confidence."
    return described(chart, "Epsilon of whole runs: what canaries show at least, and what the ledger states.", planted)


def reconstruction(entries: Sequence[AuditedProtection], chance: float) -> Chart:
    """Draw how many claimed items are truly the user's, over the rounds, for each protection of a recommender.

    `entries` are those of `recommend_audit.audit`; `chance` is what claims at random would find.
    """
    rows = [
        {"protection": entry["protection"], "round": row["round"], "precision": row["sum"]["precision"]}
        for entry in entries
        for row in entry["rounds"]
        if row["sum"]["precision"] is not None
    ]
    names = list(dict.fromkeys(row["protection"] for row in rows))
    legend = alt.Legend(columns=2, labelLimit=320, symbolType="stroke")
    colour = alt.Color("protection:N", scale=alt.Scale(domain=names), legend=legend)
    x = alt.X("round:Q", title="round", axis=alt.Axis(tickMinStep=1, grid=False))
    y = alt.Y("precision:Q", title="claimed items that are the user's", axis=alt.Axis(format="%"))
    # Several protections hide nothing and lie on one line: dashes show all of them.
    dash = alt.StrokeDash("protection:N", scale=alt.Scale(domain=names, range=dashes(len(names))), legend=legend)
    lines = alt.Chart(pd.DataFrame(rows)).mark_line(point=alt.OverlayMarkDef(size=40))
    level = alt.Chart(pd.DataFrame([{"precision": chance, "round": rows[-1]["round"], "text": "claimed at random"}]))
    rule = level.mark_rule().encode(alt.Y("precision:Q"))
    text = level.mark_text(align="right", dy=10, fontSize=10).encode(x, alt.Y("precision:Q"), alt.Text("text:N"))
    return described(
        alt.layer(lines.encode(x, y.scale(domain=[0, 1]), colour, dash), rule, text, width=WIDTH, height=HEIGHT),
        "Share of the items that a curious server claims which are truly the user's, by protection and round.",
        "Thin: items claimed at random.",
    )


def _axis(form: str = "~s") -> alt.Axis:
    return alt.Axis(format=form, tickCount=5, grid=False)
