"""One look for every figure: ink and brass on paper, light and dark, in colours that colour-blind eyes tell apart."""

from __future__ import annotations

from steelyard.report.documents.shared import VegaLite

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
