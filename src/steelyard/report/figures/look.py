"""One look for every figure, in colours that colour-blind eyes tell apart; what several figures need; their scripts."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from steelyard.base.files import cache_folder
from steelyard.base.measures import measure_of
from steelyard.report.result import VegaLite
from steelyard.report.view import RunView

Chart = Any
"""An Altair chart of any shape: Altair has no common class for them that type checkers can follow."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

# Okabe and Ito's colours, in an order in which neighbours differ in lightness too; darker or lighter where the
# ground asks for it.
_LIGHT = ["#a3660a", "#0072b2", "#00845f", "#b8538b", "#5b6770", "#d55e00", "#3f9fd8", "#8c7a00", "#6b5bd0", "#7a4a2b"]
_DARK = ["#e3a83b", "#56b4e9", "#2fc59b", "#e08fba", "#a9b4bd", "#f2793a", "#3f8fd6", "#d6c64a", "#a79bf2", "#c99a75"]

FLAWED, SOUND = "flawed", "not flawed"


def theme(dark: bool = False) -> VegaLite:
    """Return the look as a Vega-Lite configuration; given as `config`, one figure serves light and dark."""
    ink, soft, grid, ground = (
        ("#e9e4d8", "#a8a294", "#333a42", "#171b20") if dark else ("#20262d", "#6a6557", "#e4dccb", "#fffdf8")
    )
    ramp = ["#2b2416", "#5f4820", "#ab7c26", "#f6cd72"] if dark else ["#f6eedc", "#d9ae5b", "#96610f", "#452a02"]
    text = {
        "labelColor": soft,
        "titleColor": ink,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    }
    return {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "padding": 4,
        "title": {"color": ink, "fontSize": 13, "fontWeight": 600, "anchor": "start"},
        "axis": {
            **text,
            "gridColor": grid,
            "domainColor": soft,
            "tickColor": soft,
            "labelLimit": 150,
            "labelSeparation": 5,
            "titlePadding": 8,
        },
        "header": {**text, "labelColor": ink, "labelFontSize": 12, "labelAnchor": "start"},
        "legend": {
            **text,
            "labelColor": ink,
            "orient": "top",
            "symbolStrokeWidth": 3,
            "symbolSize": 220,
            "labelLimit": 220,
            "title": None,
        },
        "range": {"category": _DARK if dark else _LIGHT, "heatmap": ramp, "ramp": ramp},
        "rule": {"color": soft},
        "text": {"color": ink, "font": FONT, "fontSize": 11},
        "mark": {"color": (_DARK if dark else _LIGHT)[0]},
        "line": {"strokeWidth": 2},
        "style": {"ground": {"fill": ground}, "ink": {"color": ink, "fill": ink}, "soft": {"stroke": soft}},
    }


# What several figures need.


WIDTH, HEIGHT = 640, 300
POINTS = 240
"""Rounds that a curve shows at most; more are sampled evenly."""
MOST_RULES = 12
"""Curves in one figure at most."""
_DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3])


def score_format(measure: str) -> str:
    """Return the number format of an axis of scores; accuracies and MAPE are shown in per cent."""
    return "%" if measure_of(measure).percent else ".3~g"


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


def bundle() -> str:
    """Return one script that defines `vegaEmbed`, `vega` and `vegaLite`; safe inside a script element.

    Putting it together takes some seconds, so it is kept in the user's cache folder, under vl-convert's version.
    """
    path = cache_folder() / f"vega-{version('vl-convert-python')}.js"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    # For speed of start: only a report or a page needs it.
    import vl_convert

    made = str(vl_convert.javascript_bundle())  # pyright: ignore[reportCallIssue]
    made = made.replace("</script", r"<\/script").replace("<!--", r"<\!--")
    _keep(path, made)
    return made


def _keep(path: Path, text: str) -> None:
    """Write whole or not at all; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError:
        return
