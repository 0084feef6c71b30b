"""One look for every figure: the register, the theme, the lines and cells that they are made of, files made of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

import altair as alt
import pandas as pd
import vl_convert
from altair.utils.schemapi import debug_mode

from steelyard.base import files
from steelyard.base.errors import UserError, told_as
from steelyard.base.files import cache_folder
from steelyard.base.measures import measure_of
from steelyard.report.view import RunView, plain

VegaLite = dict[str, Any]
"""A figure as Vega and Vega-Lite define it: their document, not one of ours."""
Chart = Any
"""An Altair chart of any shape: Altair has no common class for them that type checkers can follow."""
Row = Mapping[str, Any]
"""A row of a figure's data; cells that are lists are unfolded when it is drawn, which keeps documents short."""
Tooltip = Sequence[str | alt.Tooltip]
MakeT = TypeVar("MakeT", bound=Callable[..., Chart | None])


@dataclass(frozen=True)
class Figure:
    """One figure: how it is called, what it is about, and what must be chosen to draw it."""

    name: str
    of: Literal["view", "federation", "client"]
    """view: all rules together; federation: one rule with one seed; client: one client under one rule and seed."""
    title: str
    caption: str
    empty: str
    """What to say, and what to do, where a run has nothing to show for it."""
    make: Callable[..., Chart | None]

    def drawn(self, view: RunView, *of: object) -> Chart | None:
        """Return the chart of what the figure is about: a view, with a federation and a client where it has them.

        The view keeps it, so that a report and its files draw it once; charts of single clients are too many to keep.
        """
        key = (self.name, *of)
        if key in view.charts:
            return view.charts[key]
        # Altair would check every part of a chart against its schema when it is made; the tests do that for the whole.
        with debug_mode(False):
            chart = self.make(view, *of)
        if self.of != "client":
            view.charts[key] = chart
        return chart


KINDS: dict[str, Figure] = {}
"""The figures by name, in the order in which the page shows them."""


def figure(
    of: Literal["view", "federation", "client"], title: str, caption: str, empty: str
) -> Callable[[MakeT], MakeT]:
    """Register the function below as a figure of its name; the report's template says where it stands."""

    def registered(make: MakeT) -> MakeT:
        name = make.__name__.replace("_", "-")
        KINDS[name] = Figure(name, of, title, caption, empty, make)
        return make

    return registered


# The theme, in colours that colour-blind eyes tell apart.


FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# Okabe and Ito's colours, in an order in which neighbours differ in lightness too; darker or lighter where the
# ground asks for it.
_LIGHT = ["#a3660a", "#0072b2", "#00845f", "#b8538b", "#5b6770", "#d55e00", "#3f9fd8", "#8c7a00", "#6b5bd0", "#7a4a2b"]
_DARK = ["#e3a83b", "#56b4e9", "#2fc59b", "#e08fba", "#a9b4bd", "#f2793a", "#3f8fd6", "#d6c64a", "#a79bf2", "#c99a75"]


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


# What figures are made of.


WIDTH, HEIGHT = 640, 300
POINTS = 240
"""Rounds that a curve shows at most; more are sampled evenly."""
MOST_RULES = 12
"""Curves in one figure at most."""
_DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3])


def numbers(values: Iterable[Any]) -> list[float | None]:
    """Return numbers as a figure's data can hold them: what is not finite is None."""
    return [plain(float(value)) for value in values]


def score_format(measure: str) -> str:
    """Return the number format of an axis of scores; accuracies and MAPE are shown in per cent."""
    return "%" if measure_of(measure).percent else ".3~g"


def shown_rules(view: RunView, last: Mapping[str, float]) -> list[str]:
    """Return the rules of `last` that one figure shows: all, or the baseline and those that ended best, in the run's
    order.
    """
    ranked = sorted((label for label in last if label != view.baseline), key=lambda label: -last[label])
    kept = {view.baseline, *ranked[: MOST_RULES - 1]} if len(view.labels) > MOST_RULES else set(last)
    return [label for label in view.labels if label in kept and label in last]


def by_rule(labels: Sequence[str], shown: Sequence[str] | None = None) -> tuple[alt.Color, alt.StrokeDash]:
    """Colour and dash lines by rule, alike in every figure: `labels` are all rules, `shown` those in the legend.

    Dashes show two lines that coincide, and colour is not the only sign.
    """
    legend = alt.Legend(columns=4, symbolType="stroke", symbolOpacity=1, values=list(shown or labels))
    dashes = [_DASHES[index % len(_DASHES)] for index in range(len(labels))]
    return (
        alt.Color("rule:N", scale=alt.Scale(domain=list(labels)), legend=legend),
        alt.StrokeDash("rule:N", scale=alt.Scale(domain=list(labels), range=dashes), legend=legend),
    )


def round_axis(first: float, last: float) -> alt.X:
    """Return an axis of rounds without room at its ends."""
    scale = alt.Scale(domain=[first, max(last, first + 1)], nice=False, zero=False)
    return alt.X("round:Q", title="round", scale=scale, axis=alt.Axis(tickMinStep=1, grid=False))


def unfolded(rows: Sequence[Row]) -> alt.Chart:
    """Return a chart of rows, whose cells may be lists."""
    frame = pd.DataFrame(list(rows))
    # Altair tells layers apart by the name of their data, and without one by what pandas prints: far slower for lists.
    object.__setattr__(frame, "name", hashlib.sha256(repr(rows).encode()).hexdigest())
    return alt.Chart(frame).transform_flatten([name for name, cell in rows[0].items() if isinstance(cell, list)])


def line_chart(
    rows: Sequence[Row],
    x: alt.X,
    y: alt.Y,
    *channels: Any,
    tooltip: Tooltip,
    banded: Sequence[str] = (),
    facet: alt.Facet | None = None,
    points: bool = False,
    width: int = WIDTH,
    height: int = HEIGHT,
) -> Chart:
    """Draw a line for each row, with points where it is short; rules that the legend names stand out when clicked.

    Rows of `banded` rules have a band from `low` to `high`. With a facet each of its values is a small chart.
    """
    base = unfolded(rows)
    short = max(len(cell) for row in rows for cell in row.values() if isinstance(cell, list)) <= 3
    line = base.mark_line(point=alt.OverlayMarkDef(size=36) if points or short else False).encode(
        x, y, *channels, tooltip=list(tooltip)
    )
    if facet is not None:
        return line.properties(width=width, height=height).facet(facet, columns=WIDTH // (width + 24))
    chosen = alt.selection_point(fields=["rule"], bind="legend", name="rules")
    layers = [line.encode(opacity=alt.condition(chosen, alt.value(1), alt.value(0.12)))]
    if banded:
        band = base.transform_filter(alt.FieldOneOfPredicate(field="rule", oneOf=banded)).mark_area(opacity=0.16)
        low = alt.Y("low:Q", title=y["title"], scale=y["scale"])
        opacity = alt.condition(chosen, alt.value(0.16), alt.value(0.0))
        layers.insert(0, band.encode(x, low, alt.Y2("high:Q"), channels[0], opacity=opacity))
    return alt.layer(*layers, width=width, height=height).add_params(chosen)


def cells(rows: Sequence[Row], where: str, *channels: Any, tooltip: Tooltip) -> alt.Chart:
    """Draw a coloured cell for each entry of rows where a condition on `datum` holds."""
    # A description of each of thousands of cells helps nobody and takes seconds.
    return unfolded(rows).transform_filter(where).mark_rect(aria=False).encode(*channels, tooltip=list(tooltip))


def described(chart: Any, description: str, *notes: str) -> Any:
    """Give a figure its description for screen readers, and its notes on what was left out, aggregated or sampled."""
    note = " ".join(filter(None, notes))
    # In its place: Altair's `properties` would copy all layers of a chart that nobody else holds.
    chart.description, chart.usermeta = description, {"note": note} if note else {}
    return chart


def spec(chart: Chart) -> VegaLite:
    """Return a chart as its Vega-Lite document, without a look of its own: give it `theme` as configuration."""
    # Altair checks a chart against its schema, which takes longer than all else; the tests do that once for every kind.
    document: VegaLite = chart.to_dict(validate=False)
    document.pop("config", None)
    return document


# Files for papers and slides, made without a browser or a network.


ENDINGS = (".svg", ".png", ".pdf")
PAPER = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
"""Fonts that are drawn into files; the page takes the reader's own."""


def write_figure(chart: Chart, path: Path) -> None:
    """Write a chart as SVG, PNG (double size) or PDF, by the ending of the file's name."""
    if path.suffix not in ENDINGS:
        raise UserError(f"figure: got '{path}'; allowed: a file name that ends in .svg, .png or .pdf")
    _write({path: _converted(svg(chart), path.suffix)})


def write_figures(charts: Mapping[str, Chart], folder: Path) -> list[Path]:
    """Write every chart as SVG, PNG and PDF into a folder and return the files; all of them, or none."""
    for name in charts:
        for ending in ENDINGS:
            files.is_file(folder / f"{name}{ending}")  # a link is refused before anything is drawn
    made: dict[Path, bytes] = {}
    for name, chart in charts.items():
        drawn = svg(chart)  # what takes long; the others are made from it
        made |= {folder / f"{name}{ending}": _converted(drawn, ending) for ending in ENDINGS}
    _write(made)
    return list(made)


def _write(made: Mapping[Path, bytes]) -> None:
    with told_as(f"{next(iter(made))}: cannot be written", "a writable file"):
        files.write_all(made)


def svg(chart: Chart) -> str:
    """Return a chart as SVG text; a notebook shows it without scripts."""
    return str(vl_convert.vegalite_to_svg(_dressed(spec(chart))))


def _converted(drawn: str, ending: str) -> bytes:
    if ending == ".png":
        return vl_convert.svg_to_png(drawn, scale=2)
    return vl_convert.svg_to_pdf(drawn) if ending == ".pdf" else drawn.encode("utf-8")


def _dressed(document: VegaLite) -> str:
    config: VegaLite = theme() | {"font": PAPER, "background": "white"}
    config["text"] = config["text"] | {"font": PAPER}
    return json.dumps(document | {"config": config})


def bundle() -> str:
    """Return one script that defines `vegaEmbed`, `vega` and `vegaLite`; safe inside a script element.

    Putting it together takes some seconds, so it is kept in the user's cache folder, under vl-convert's version.
    """
    path = cache_folder() / f"vega-{version('vl-convert-python')}.js"
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    made = str(vl_convert.javascript_bundle())  # pyright: ignore[reportCallIssue]
    made = made.replace("</script", r"<\/script").replace("<!--", r"<\!--")
    with suppress(OSError, UserError):  # a cache that cannot be written is no error
        files.write(path, made.encode("utf-8"))
    return made
