"""Accuracy curves as an SVG file: lines and axes only, so that no plotting library is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from steelyard.errors import UserError
from steelyard.report.tables import curves_csv

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 60, 210, 20, 45
_COLOURS = [
    "#1b1b1b",
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
]


def curves_svg(document: Mapping[str, Any]) -> str:
    """Return the mean score of every rule over the rounds as a picture; `steelyard table --curves x.svg` writes it."""
    curves: Sequence[Mapping[str, Any]] = document["curves"]
    last = max(max(curve["rounds"]) for curve in curves)
    values = [value for curve in curves for value in curve["mean"] if math.isfinite(value)]
    low, high = _nice(min(values), max(values))

    def across(round: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * round / last

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for step in range(6):
        value, round = low + (high - low) * step / 5, last * step / 5
        parts.append(_line(LEFT, up(value), WIDTH - RIGHT, up(value), "#e4e4e4"))
        parts.append(f'<text x="{LEFT - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        parts.append(f'<text x="{across(round):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{round:g}</text>')
    parts.append(_line(LEFT, TOP, LEFT, HEIGHT - BOTTOM, "#444"))
    parts.append(_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "#444"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">round</text>')
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        dash = "" if number < len(_COLOURS) else ' stroke-dasharray="5 3"'
        points = " ".join(
            f"{across(round):.1f},{up(value):.1f}"
            for round, value in zip(curve["rounds"], curve["mean"], strict=True)
            if math.isfinite(value)
        )
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.4"{dash} points="{points}"/>')
        height = TOP + 14 + 18 * number
        parts.append(_line(WIDTH - RIGHT + 12, height - 4, WIDTH - RIGHT + 36, height - 4, colour))
        parts.append(f'<text x="{WIDTH - RIGHT + 42}" y="{height}">{escape(curve["rule"])}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def write_curves(document: Mapping[str, Any], path: Path) -> None:
    """Write the curves as a picture (.svg) or as numbers (.csv), by the ending of the file's name."""
    writers = {".svg": curves_svg, ".csv": curves_csv}
    if path.suffix not in writers:
        raise UserError(f"--curves: got '{path}'; allowed: a file name that ends in .svg or .csv")
    try:
        path.write_text(writers[path.suffix](document), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--curves: {path} cannot be written: {error.strerror}; allowed: a writable file") from error


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _nice(low: float, high: float) -> tuple[float, float]:
    """Widen a range to round numbers."""
    span = (high - low) or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span)) / 2
    bottom, top = math.floor(low / step) * step, math.ceil(high / step) * step
    return (bottom, top) if top > bottom else (bottom, bottom + step)
