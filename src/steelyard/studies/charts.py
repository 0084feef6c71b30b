"""Figures of studies: a sweep over a field, an arena's gains and mean ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import altair as alt
import pandas as pd

from steelyard.report.figures.look import HEIGHT, WIDTH, described, score_format
from steelyard.studies.paper_table import Entry, Value
from steelyard.studies.study import Scalar
from steelyard.studies.sweep_table import SweepDocument, SweepRow, show
from steelyard.studies.verdict import ArenaDocument

ROW = 26
"""Height of a rule's line, in pixels."""
LETTER = 6.5
"""Room for a letter of a rule's name, in pixels: where a wider font stands in, a picture would cut long names off."""
MOST_LINES = 12
"""Lines in one figure at most: those of the best points."""


def sweep_chart(document: SweepDocument) -> alt.LayerChart | None:
    """Draw a sweep: means over seeds as lines, single seeds as small points, a ring around the best point.

    A cross at the edge is a point whose model exploded. The first field with several numbers is the axis; None where
    no point has a figure.
    """
    if not any(math.isfinite(row.value.mean) for row in document.rows):
        return None
    settings: list[dict[str, Scalar]] = [{**row.values, "rule": row.rule} for row in document.rows]
    several = [field for field in settings[0] if len({show(each[field]) for each in settings}) > 1]
    numbers = [field for field in several if all(_is_number(each[field]) for each in settings)]
    across = [*numbers, *several, *settings[0]][0]
    others = [field for field in several if field != across]
    entries = [_entry(row, each, across, others) for row, each in zip(document.rows, settings, strict=True)]
    every = list(dict.fromkeys(entry["line"] for entry in entries))
    found = dict.fromkeys(entry["line"] for entry in entries if math.isfinite(entry["mean"]))
    lines = list(found)[:MOST_LINES]  # rows come best first
    shown = [entry for entry in entries if entry["line"] in lines]
    x = _x_axis(across, [entry["x"] for entry in shown])
    data = pd.DataFrame([entry for entry in shown if math.isfinite(entry["mean"])])
    measured = document.measured
    scale = alt.Scale(domain=_limits(data), nice=True, zero=False)
    y = alt.Y("mean:Q", title=measured, axis=alt.Axis(format=score_format(measured)), scale=scale)
    base = alt.Chart(data)
    legend = alt.Legend(columns=4, symbolType="stroke") if len(lines) > 1 else None
    colour = [alt.Color("line:N", scale=alt.Scale(domain=lines), legend=legend)]
    tips = [alt.Tooltip("setting:N"), alt.Tooltip("mean:Q", title=measured, format=".4f")]
    layers: list[Any] = [base.mark_line(point=alt.OverlayMarkDef(size=40)).encode(x, y, *colour, tooltip=tips)]
    notes = [f"Ring: the best point, {'less' if document.less_is_better else 'more'} is better."]
    if len(document.seeds) > 1:
        single = base.transform_flatten(["values"]).mark_point(size=14, filled=True, opacity=0.45)
        layers.append(single.encode(x, alt.Y("values:Q", title=measured, scale=scale), *colour))
        notes.append(f"Line: mean of {len(document.seeds)} seeds; small points: each of them.")
    if exploded := [entry for entry in shown if entry["diverged"]]:
        crosses = alt.Chart(pd.DataFrame(exploded)).mark_point(
            shape="cross", angle=45, size=70, filled=True, style="ink"
        )
        worst = alt.value(0 if document.less_is_better else HEIGHT)
        layers.append(crosses.encode(x, y=worst, tooltip=alt.Tooltip("setting:N", title="diverged")))
        notes.append("Cross: training diverged in one seed or more.")
    if document.best is not None:
        best = base.transform_filter(alt.datum.point == document.best.point)
        layers.append(best.mark_point(size=260, style="ink", filled=False, strokeWidth=1.6).encode(x, y))
    if any(row.unreached for row in document.rows):
        notes.append("A target that was not reached counts as the last round.")
    if len(every) > len(lines):
        notes.append(f"{len(lines)} of {len(every)} lines: those of the best points.")
    chart = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)
    return described(chart, f"{measured} on a validation split, by {across}.", " ".join(notes))


def _limits(data: pd.DataFrame) -> list[float]:
    """Return the least and the greatest figure of any seed, with some room where they are alike."""
    values = [float(value) for values in data["values"] for value in values]
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return [low - room, high + room]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _entry(row: SweepRow, settings: Mapping[str, Scalar], across: str, others: Sequence[str]) -> dict[str, Any]:
    found = settings[across]
    words = [row.rule if name == "rule" else f"{name.rpartition('.')[2]} {show(settings[name])}" for name in others]
    return {
        "point": row.point,
        "x": float(found) if _is_number(found) else show(found),
        "line": ", ".join(words) or "all",
        "setting": ", ".join([f"{across} {show(found)}", *words]),
        "mean": row.value.mean,
        "diverged": row.diverged,
        "values": [number for number in row.value.values if math.isfinite(number)],
    }


def _x_axis(across: str, shown: Sequence[Any]) -> alt.X:
    if not all(_is_number(value) for value in shown):
        return alt.X("x:N", title=across, sort=None, axis=alt.Axis(labelAngle=0))
    values = sorted(set(shown))
    scale = alt.Scale(type="log" if _by_factors(values) else "linear", zero=False, padding=12, nice=False)
    # Six digits are asked for: without a number of digits a linear scale shows as many as its own steps would need.
    return alt.X("x:Q", title=across, scale=scale, axis=alt.Axis(values=values, format=".6~g"))


def _by_factors(values: Sequence[float]) -> bool:
    """Whether the values grow by factors, as learning rates do, rather than by steps."""
    if values[0] <= 0:
        return False
    steps = [after - before for before, after in pairwise(values)]
    factors = [after / before for before, after in pairwise(values)]
    return values[-1] / values[0] >= 10 or (len(steps) > 1 and max(steps) / min(steps) > max(factors) / min(factors))


def rank_chart(document: ArenaDocument) -> alt.LayerChart | None:
    """Draw mean ranks as points, the best on top; a line through each spans what does not differ significantly from it.

    Two rules whose ranks lie further apart than the critical difference differ: neither point is on the other's line.
    None with fewer than three rules, and where no scene has figures of every rule.
    """
    ranks = document.ranks
    if len(ranks) < 3:
        return None
    critical = document.critical_difference
    last = float(len(ranks))
    rows = [
        {
            "rule": row.rule,
            "rank": row.rank,
            "low": max(1.0, row.rank - (critical or 0.0)),
            "high": min(last, row.rank + (critical or 0.0)),
            "role": "candidate" if row.rule == document.candidate else "rival",
        }
        for row in ranks
    ]
    base = alt.Chart(pd.DataFrame(rows))
    names = [row.rule for row in ranks]
    axis = alt.Axis(labelLimit=220, minExtent=min(220.0, LETTER * max(map(len, names))))
    rule = alt.Y("rule:N", title=None, sort=names, axis=axis)
    scale = alt.Scale(domain=[1, max(last, 2.0)], nice=False, zero=False, padding=10)
    rank = alt.X("rank:Q", title="mean rank (1 is the best)", scale=scale, axis=alt.Axis(tickMinStep=1))
    colour = alt.Color("role:N", scale=alt.Scale(domain=["candidate", "rival"]), legend=alt.Legend(title=None))
    tips = [alt.Tooltip("rule:N"), alt.Tooltip("rank:Q", format=".2f")]
    layers: list[Any] = [base.mark_point(filled=True, size=90, opacity=1).encode(rank, rule, colour, tooltip=tips)]
    if critical is not None:
        layers.insert(0, base.mark_rule(opacity=0.45).encode(alt.X("low:Q", scale=scale), rule, colour, x2="high:Q"))
    chart = alt.layer(*layers).properties(width=WIDTH, height=ROW * len(ranks))
    note = "" if critical is None else f"Line: ranks less than {critical:.2f} apart do not differ significantly (5%)."
    return described(chart, f"Mean rank of each rule over the tasks of the suite {document.suite}.", note)


def gain_chart(document: ArenaDocument) -> alt.LayerChart | None:
    """Draw the candidate's gain over the baseline in each scene, with its interval; None before one is done."""
    rows: list[dict[str, Any]] = [
        {"scene": scene.scene, "verdict": scene.verdict}
        | {end: 100 * getattr(gain, end) for end in ("mean", "low", "high")}
        for scene in document.scenes
        if (gain := scene.gain) is not None
    ]
    if not rows:
        return None
    base = alt.Chart(pd.DataFrame(rows))
    scene = alt.Y("scene:N", title=None, sort=[row["scene"] for row in rows], axis=alt.Axis(labelLimit=220))
    title = f"points over {document.baseline}"
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
    return described(chart, f"Gain of {document.candidate} over {document.baseline} in each task.", "")


def paper_chart(entry: Entry, values: Sequence[Value]) -> alt.FacetChart | None:
    """Draw a figure of the papers: means over seeds, a line or points for each system, a panel for each data."""
    drawing = entry.figure
    frame: Any = pd.DataFrame(values, columns=list(Value._fields))
    means: Any = frame.pivot_table("value", ["data", "system", "x"], "measure", sort=False).reset_index()
    if drawing is None or not {drawing.x, drawing.y} <= {*means}:
        return None
    rows: Any = means.assign(name=means["system"], y=means[drawing.y], x=means[drawing.x]).dropna(subset=["x", "y"])
    # Systems with values one by one are points of one line; of a series each is a line.
    if drawing.lines and not rows["name"].duplicated().any():
        rows["system"] = rows["name"].str.partition(",")[0]
    across = alt.X("x:Q", title="" if drawing.x == "x" else drawing.x, scale=alt.Scale(zero=False))
    up = alt.Y("y:Q", title=drawing.name or drawing.y, scale=alt.Scale(zero=False))
    base = alt.Chart(alt.InlineData(values=rows.to_dict("records"))).encode(
        across, up, alt.Color("system:N", title=None), tooltip=["name:N", "x:Q", "y:Q"]
    )
    marked = base.mark_line(point=len(rows) < 200) if drawing.lines else base.mark_point(filled=True, size=60)
    panel = marked.properties(width=WIDTH // 2, height=HEIGHT)
    return described(panel.facet(alt.Facet("data:N", title=None), columns=2), entry.title, "")
