"""Figures of the data and of those who hold them: splits, devices, feature clouds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
import pandas as pd

from steelyard.report.figures.look import (
    FLAWED,
    SOUND,
    WIDTH,
    described,
    lists,
    round_axis,
    score_format,
)
from steelyard.report.figures.weights import MARK
from steelyard.report.split import Split
from steelyard.report.view import FederationView, Frame, RunView, plain, sampled

if TYPE_CHECKING:
    from steelyard.report.recommender import CloudWord


BARS = 60
"""Clients that get a bar and a column of classes of their own."""


def split(view: RunView, federation: FederationView) -> alt.VConcatChart | None:
    """Draw how many training samples each client has, and of which classes; of many clients, how often a size comes."""
    labels = federation.history.labels(federation.seed)
    sizes, asked = _sizes(view, federation, labels)
    if not len(sizes):
        return None
    return _drawn(sizes, labels, view.flaws(federation), asked)


def planned_split(planned: Split) -> alt.VConcatChart:
    """Draw a split before anything is trained, as `split` draws that of a run."""
    sizes: Frame = pd.Series(dict(planned.sizes), dtype="int64").sort_values(ascending=False, kind="stable")
    notes = " ".join(f"{note[:1].upper()}{note[1:]}." for note in planned.notes)
    return _drawn(sizes, {name: list(counts) for name, counts in planned.labels.items()}, planned.flaws, notes)


def _drawn(
    sizes: Frame, labels: dict[str, list[int]], flawed: Mapping[str, Sequence[str]], asked: str
) -> alt.VConcatChart:
    rows = [
        {
            "client": f"{MARK if client in flawed else ''}{client}",
            "samples": int(count),
            "kind": FLAWED if client in flawed else SOUND,
            "flaw": ", ".join(flawed.get(str(client), ())),
        }
        for client, count in sizes.items()
    ]
    chosen = sampled(len(rows), BARS).tolist()
    kept = [rows[index] for index in chosen]
    notes = [f"{len(rows)} clients, so each bar counts those of similar size."] if len(rows) > BARS else []
    panels = [_histogram(rows, flawed) if len(rows) > BARS else _bars(rows, flawed, axis=not labels)]
    if labels:
        panels.append(_classes(kept, [labels[str(sizes.index[index])] for index in chosen]))
        if len(rows) > BARS:
            notes.append(f"Classes of {len(kept)} clients, from the biggest to the smallest, evenly spaced.")
        notes.append("Labels as the client has them, wrong ones included." if flawed else "")
    chart = alt.vconcat(*panels).resolve_scale(color="independent")
    told_of = f"Training samples per client, {len(rows)} clients, from {min(sizes)} to {max(sizes)}."
    return described(chart, told_of, " ".join(note for note in (*notes, asked) if note))


def _sizes(view: RunView, federation: FederationView, labels: dict[str, list[int]]) -> tuple[Frame, str]:
    """Return the samples of each client, most first, and who is missing: without labels only those asked are known."""
    if labels:
        known: Frame = pd.Series({client: sum(counts) for client, counts in labels.items()}, dtype="int64")
        return known.sort_values(ascending=False, kind="stable"), ""
    frame = view.clients(federation)
    frame = frame[frame["samples"].notna()]
    found = frame.groupby("client")["samples"].max().sort_values(ascending=False, kind="stable")
    everyone: Any = view.evaluations(federation)["client"].nunique()
    missing = everyone - len(found)
    return found, f"{missing} clients were never asked, so their size is not recorded." if missing > 0 else ""


def _colour(flawed: object) -> alt.Color:
    kinds = [SOUND, FLAWED] if flawed else [SOUND]
    scale = alt.Scale(domain=kinds, range=["#0f7fc0", "#d9620f"][: len(kinds)])
    return alt.Color("kind:N", scale=scale, legend=alt.Legend() if flawed else None)


def _client_axis(rows: list[dict[str, Any]], *, shown: bool = True) -> alt.X:
    axis = alt.Axis(labelAngle=-60, labels=shown, ticks=shown, labelOverlap=True)
    return alt.X("client:N", sort=[row["client"] for row in rows], title=None, axis=axis)


def _histogram(rows: list[dict[str, Any]], flawed: object) -> alt.Chart:
    chart = alt.Chart(pd.DataFrame(rows)).mark_bar()
    chart = chart.encode(
        alt.X("samples:Q", bin=alt.Bin(maxbins=30), title="training samples of a client"),
        alt.Y("count():Q", title="clients"),
        _colour(flawed),
        tooltip=[alt.Tooltip("count():Q", title="clients"), alt.Tooltip("kind:N")],
    )
    return chart.properties(width=WIDTH, height=180)


def _bars(rows: list[dict[str, Any]], flawed: object, *, axis: bool) -> alt.Chart:
    chart = alt.Chart(pd.DataFrame(rows)).mark_bar()
    chart = chart.encode(
        _client_axis(rows, shown=axis),
        alt.Y("samples:Q", title="training samples"),
        _colour(flawed),
        tooltip=[alt.Tooltip("client:N"), alt.Tooltip("samples:Q"), alt.Tooltip("flaw:N")],
    )
    return chart.properties(width=WIDTH, height=180)


def _classes(rows: list[dict[str, Any]], counts: list[list[int]]) -> alt.Chart:
    """Draw how many samples of each class each client has; no colour: none."""
    classes = [str(label) for label in range(len(counts[0]))]
    cells = [
        {"client": row["client"], "label": classes, "samples": numbers}
        for row, numbers in zip(rows, counts, strict=True)
    ]
    axis = alt.Axis(labelOverlap=len(classes) > 24)
    chart = alt.Chart(lists(cells)).transform_flatten(["label", "samples"]).transform_filter("datum.samples > 0")
    chart = chart.mark_rect(aria=False).encode(
        _client_axis(rows),
        alt.Y("label:N", sort=classes, scale=alt.Scale(domain=classes), title="class", axis=axis),
        alt.Color("samples:Q", scale=alt.Scale(domainMin=0), legend=alt.Legend(title="samples", titleOrient="left")),
        tooltip=[alt.Tooltip("client:N"), alt.Tooltip("label:N", title="class"), alt.Tooltip("samples:Q")],
    )
    return chart.properties(width=WIDTH, height=max(60, min(360, 15 * len(classes))))


# How the model serves the devices.


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


# Feature clouds before and after recommendation (the thesis' Figure 6.4).


SIDES = {"before": "in what users took", "after": "in what they are shown"}


def clouds(rows: Sequence[CloudWord]) -> alt.HConcatChart:
    """Draw the most prominent features of both sides, best on top; those of both sides stand out.

    `rows` are those of `Explained.clouds`: when, rank, feature, weight.
    """
    sides = {when: {str(row["feature"]) for row in rows if row["when"] == when} for when in SIDES}
    both = sides["before"] & sides["after"]
    marked = [{**row, "kept": "on both sides" if row["feature"] in both else "on one side"} for row in rows]
    charts = [_side([row for row in marked if row["when"] == when], title) for when, title in SIDES.items()]
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
