"""The figure of a sweep: the measure over the values of a field, a line for each of the others' settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import altair as alt
import pandas as pd

from steelyard.report.figures.look import HEIGHT, WIDTH, described, score_format
from steelyard.report.result import SweepDocument, SweepRow
from steelyard.sweeps.plan import show

MOST_LINES = 12
"""Lines in one figure at most: those of the best points."""


def sweep_chart(document: SweepDocument) -> alt.LayerChart | None:
    """Draw a sweep: means over seeds as lines, single seeds as small points, a ring around the best point.

    A cross at the edge is a point whose model exploded. The first field with several numbers is the axis; None where
    no point has a figure.
    """
    every = document["rows"]
    rows = [row for row in every if math.isfinite(row["value"]["mean"])]
    if not rows:
        return None
    across = _across(every, document["fields"])
    others = _others(every, [*document["fields"], "rule"], across)
    lines = list(dict.fromkeys(_line(row, others) for row in rows))[:MOST_LINES]  # rows come best first
    shown = [_entry(row, across, others) for row in every if _line(row, others) in lines]
    x = _x_axis(across, [entry["x"] for entry in shown])
    data = pd.DataFrame([entry for entry in shown if math.isfinite(entry["mean"])])
    measured = document["measured"]
    form = score_format(measured)
    scale = alt.Scale(domain=_limits(data), nice=True, zero=False)
    y = alt.Y("mean:Q", title=measured, axis=alt.Axis(format=form), scale=scale)
    base = alt.Chart(data)
    legend = alt.Legend(columns=4, symbolType="stroke") if len(lines) > 1 else None
    colour = [alt.Color("line:N", scale=alt.Scale(domain=lines), legend=legend)]
    tips = [alt.Tooltip("setting:N"), alt.Tooltip("mean:Q", title=measured, format=".4f")]
    layers: list[Any] = [base.mark_line(point=alt.OverlayMarkDef(size=40)).encode(x, y, *colour, tooltip=tips)]
    if len(document["seeds"]) > 1:
        single = base.transform_flatten(["values"]).mark_point(size=14, filled=True, opacity=0.45)
        layers.append(single.encode(x, alt.Y("values:Q", title=measured, scale=scale), *colour))
    exploded = pd.DataFrame([entry for entry in shown if entry["diverged"]])
    if len(exploded):
        crosses = alt.Chart(exploded).mark_point(shape="cross", angle=45, size=70, filled=True, style="ink")
        worst = alt.value(0 if document["less_is_better"] else HEIGHT)
        layers.append(crosses.encode(x, y=worst, tooltip=alt.Tooltip("setting:N", title="diverged")))
    if document["best"] is not None:
        best = base.transform_filter(alt.datum.point == document["best"]["point"])
        layers.append(best.mark_point(size=260, style="ink", filled=False, strokeWidth=1.6).encode(x, y))
    description = f"{measured} on a validation split, by {across}."
    return described(
        alt.layer(*layers).properties(width=WIDTH, height=HEIGHT), description, _note(document, lines, others)
    )


def _note(document: SweepDocument, lines: Sequence[str], others: Sequence[str]) -> str:
    notes = [f"Ring: the best point, {'less' if document['less_is_better'] else 'more'} is better."]
    if len(document["seeds"]) > 1:
        notes.append(f"Line: mean of {len(document['seeds'])} seeds; small points: each of them.")
    if any(row["diverged"] for row in document["rows"]):
        notes.append("Cross: the model exploded in one seed or more.")
    if any(row["unreached"] for row in document["rows"]):
        notes.append("A target that was not reached counts as the last round.")
    every = {_line(row, others) for row in document["rows"]}
    if len(every) > len(lines):
        notes.append(f"{len(lines)} of {len(every)} lines: those of the best points.")
    return " ".join(notes)


def _limits(data: pd.DataFrame) -> list[float]:
    """Return the least and the greatest figure of any seed, with some room where they are alike."""
    values = [float(value) for values in data["values"] for value in values]
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return [low - room, high + room]


def _value(row: SweepRow, field: str) -> Any:
    return row["rule"] if field == "rule" else row["values"][field]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _several(rows: Sequence[SweepRow], field: str) -> bool:
    return len({show(_value(row, field)) for row in rows}) > 1


def _across(rows: Sequence[SweepRow], fields: Sequence[str]) -> str:
    """Return the field that the axis shows: the first of several numbers, else the first of several values."""
    several = [field for field in (*fields, "rule") if _several(rows, field)]
    numbers = [field for field in several if all(_is_number(_value(row, field)) for row in rows)]
    return (numbers or several or [*fields, "rule"])[0]


def _others(rows: Sequence[SweepRow], fields: Sequence[str], across: str) -> list[str]:
    return [field for field in fields if field != across and _several(rows, field)]


def _line(row: SweepRow, others: Sequence[str]) -> str:
    words = [
        str(row["rule"]) if field == "rule" else f"{field.rpartition('.')[2]} {show(_value(row, field))}"
        for field in others
    ]
    return ", ".join(words) or "all"


def _entry(row: SweepRow, across: str, others: Sequence[str]) -> dict[str, Any]:
    value, found = row["value"], _value(row, across)
    return {
        "point": row["point"],
        "x": float(found) if _is_number(found) else show(found),
        "line": _line(row, others),
        "setting": ", ".join(part for part in (f"{across} {show(found)}", _line(row, others)) if part != "all"),
        "mean": value["mean"],
        "diverged": row["diverged"],
        "values": [number for number in value["values"] if math.isfinite(number)],
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
