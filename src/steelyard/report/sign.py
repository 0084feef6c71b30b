"""The sign: a steelyard whose beam tips with what flawed clients weigh against what their number would give them."""

from __future__ import annotations

from html import escape
from string import Template

from steelyard.report.assets import text
from steelyard.report.view import RunView, flawed_means

STEEPEST = 14.0
"""Degrees."""
LEVEL = 0.005
"""Shares that differ by no more are shown as equal."""


def sign(view: RunView) -> tuple[str, str]:
    """Return the sign as SVG, and one sentence that says what its tilt shows."""
    federation = view.federation()
    shares = flawed_means(view, federation.label)
    if shares is None:
        return drawn(0.0, 150.0, "A steelyard, level.").replace('class="sign"', 'class="sign plain"'), ""
    weight, number = shares["weight"], shares["updates"]
    shown = (
        f"Under {federation.label} flawed clients were {number:.0%} of those asked and got {weight:.0%} of the weight"
    )
    less = number - weight
    caption = shown + (
        "." if abs(less) <= LEVEL else ": the beam tips them up." if less > 0 else ": they tip the beam."
    )
    return drawn(tilt(number, weight), 96.0 + 96.0 * (1.0 - weight), caption), caption


def tilt(number: float, weight: float) -> float:
    """Return the beam's angle in degrees; above 0 the load goes up: flawed clients weigh less than their number."""
    return max(-STEEPEST, min(STEEPEST, 40.0 * (number - weight)))


def drawn(angle: float, poise: float, title: str) -> str:
    """Return the sign with its beam at an angle and its sliding weight at a position."""
    return Template(text("sign.svg")).substitute(
        angle=f"{angle:.1f}", back=f"{-angle:.1f}", poise=f"{poise:.1f}", title=escape(title)
    )
