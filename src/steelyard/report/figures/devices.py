"""How the model serves the devices: the spread of their own scores, and the course of one client."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from steelyard.report.figures.shared import WIDTH, described, lists, round_axis, score_format
from steelyard.report.view import FederationView, Frame, RunView, plain, sampled

DOTS = 120
"""Devices drawn one by one for each rule at most."""


def devices(view: RunView) -> alt.LayerChart | None:
    """Draw the scores of the devices after the last round: dots, a bar for the middle half, a median."""
    bars, dots, all_drawn = _after_last_round(view)
    if not bars:
        return None
    labels = [bar["rule"] for bar in bars]
    form = score_format(view.measure)
    digits = f".1{form}" if form == "%" else ".4f"
    y = alt.Y("rule:N", sort=labels, title=None, axis=alt.Axis(labelLimit=150, grid=False))
    axis = alt.Axis(format=form)
    colour = alt.Color("rule:N", scale=alt.Scale(domain=view.labels), legend=None)
    frame = pd.DataFrame(bars)
    title = f"{view.measure} of a device"
    tips = [alt.Tooltip("rule:N")] + [
        alt.Tooltip(f"{name}:Q", title=words, format=digits)
        for name, words in (("p10", "10th percentile"), ("p50", "median"), ("p90", "90th percentile"))
    ]
    whisker = (
        alt.Chart(frame)
        .mark_rule(strokeWidth=1.5)
        .encode(alt.X("p10:Q", title=title, axis=axis, scale=alt.Scale(zero=False)), alt.X2("p90:Q"), y, colour)
    )
    box = alt.Chart(frame).mark_bar(height=16, opacity=0.3)
    box = box.encode(alt.X("p25:Q", title=title), alt.X2("p75:Q"), y, colour, tooltip=tips)
    middle = (
        alt.Chart(frame).mark_tick(thickness=3, size=22).encode(alt.X("p50:Q", title=title), y, colour, tooltip=tips)
    )
    points = alt.Chart(pd.DataFrame(dots)).transform_calculate(shift="(random() - 0.5) * 0.8")
    points = points.mark_point(filled=True, size=16, opacity=0.45).encode(
        alt.X("score:Q", title=title),
        y,
        alt.YOffset("shift:Q", scale=alt.Scale(domain=[-0.5, 0.5])),
        colour,
        tooltip=[
            alt.Tooltip("client:N"),
            alt.Tooltip("score:Q", title=view.measure, format=digits),
            alt.Tooltip("rule:N"),
        ],
    )
    note = "Line: 10th to 90th percentile; bar: middle half; tick: median; dots: devices"
    note += "." if all_drawn else f", {DOTS} for each rule, evenly spaced."
    chart = alt.layer(whisker, box, middle, points, width=WIDTH, height=max(90, 44 * len(labels)))
    return described(chart, "Distribution of the devices' own scores after the last round, by rule.", note)


def _after_last_round(view: RunView) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
    """Return the percentiles of each rule, some of its devices one by one, and whether these are all of them."""
    bars: list[dict[str, Any]] = []
    dots: list[dict[str, Any]] = []
    all_drawn = True
    for label in view.labels:
        found = [_last(view, one) for one in view.federations if one.label == label]
        frames = [frame for frame in found if len(frame)]
        if not frames:
            continue
        scores = pd.concat(frames, ignore_index=True).sort_values("score", kind="stable")
        marks = np.percentile(scores["score"].to_numpy(np.float64), [10, 25, 50, 75, 90])
        names = ("p10", "p25", "p50", "p75", "p90")
        bars.append({"rule": label, **{name: float(mark) for name, mark in zip(names, marks, strict=True)}})
        chosen = scores.iloc[sampled(len(scores), DOTS)]
        all_drawn = all_drawn and len(chosen) == len(scores)
        dots += [
            {"rule": label, "score": float(score), "client": str(client)}
            for score, client in zip(chosen["score"], chosen["client"], strict=True)
        ]
    return bars, dots, all_drawn


def _last(view: RunView, federation: FederationView) -> Frame:
    frame = view.evaluations(federation)
    return frame[frame["round"] == frame["round"].to_numpy().max()] if len(frame) else frame


def client(view: RunView, federation: FederationView, name: str) -> alt.VConcatChart | None:
    """Draw the course of one client under one rule: its weight, its criteria as normalised, and its own score."""
    frame = view.clients(federation)
    mine = frame[(frame["client"] == name) & frame["weight"].notna()]
    scores = view.evaluations(federation)
    scores = scores[scores["client"] == name]
    if not len(mine) and not len(scores):
        return None
    mine = mine.iloc[sampled(len(mine), DOTS)]
    scores = scores.iloc[sampled(len(scores), DOTS)]
    rows = [_course("weight", mine, "weight")]
    rows += [_course(criterion, mine, f"normalised_{criterion}") for criterion in federation.criteria]
    form = score_format(view.measure)
    x = round_axis(1, max([*mine["round"], *scores["round"], 1]))
    tips = [alt.Tooltip("what:N", title=" "), alt.Tooltip("round:Q"), alt.Tooltip("value:Q", format=".3~g")]
    weighed = alt.Chart(lists(rows)).transform_flatten(["round", "value"]).mark_line(point=alt.OverlayMarkDef(size=24))
    weighed = weighed.encode(
        x,
        alt.Y("value:Q", title="weight, criteria"),
        alt.Color("what:N", scale=alt.Scale(domain=["weight", *federation.criteria]), legend=alt.Legend()),
        tooltip=tips,
    ).properties(width=WIDTH, height=150)
    served = alt.Chart(lists([_course(view.measure, scores, "score")])).transform_flatten(["round", "value"])
    served = (
        served.mark_line(style="soft")
        .encode(x, alt.Y("value:Q", title=f"its own {view.measure}", axis=alt.Axis(format=form)), tooltip=tips)
        .properties(width=WIDTH, height=90)
    )
    return described(
        alt.vconcat(weighed, served), f"Weight, criteria and score of {name} over the rounds under {federation.label}."
    )


def _course(what: str, frame: Frame, column: str) -> dict[str, Any]:
    return {
        "what": what,
        "round": [int(number) for number in frame["round"]],
        "value": [plain(float(value)) for value in frame[column]],
    }
