"""The thesis' Figures 3.2 and 3.3: what the Laplace mechanism releases of two counts that one user tells apart.

    python -m benchmarks.laplace_figure docs/results/laplace.svg

Lines are densities, dots shares of 50,000 releases by `steelyard.privacy.mechanisms.laplace` in bins of one. Prints the
largest ratio of the two densities in each panel, which ε-differential privacy bounds by exp(ε) = 1.6487.
"""

from __future__ import annotations

import argparse

import altair as alt
import numpy as np
import pandas as pd

from steelyard.privacy.mechanisms import laplace
from steelyard.privacy.source import SystemSource

EPSILON, RELEASES = 0.5, 50_000
PANELS = (
    ("Figure 3.2: counts 100 and 101, noise for a change of 1", 101, 1.0),
    ("Figure 3.3: counts 100 and 105, noise for a change of 1", 105, 1.0),
    ("Figure 3.3: counts 100 and 105, noise for a change of 5", 105, 5.0),
)


def density(at: np.ndarray, count: int, sensitivity: float) -> np.ndarray:
    """Return Laplace's density around a count, of scale Δ/ε."""
    scale = sensitivity / EPSILON
    return np.exp(-np.abs(at - count) / scale) / (2 * scale)


def panel(title: str, other: int, sensitivity: float) -> tuple[pd.DataFrame, float]:
    """Return the curves and the shares of releases of one panel, and the largest ratio of the two densities."""
    at = np.linspace(80, 125, 451).round(1)
    bins = np.arange(80, 126)
    frames: list[pd.DataFrame] = []
    for count in (100, other):
        released = laplace(np.full(RELEASES, float(count)), sensitivity, EPSILON, SystemSource())
        shares = np.histogram(released, bins - 0.5)[0] / RELEASES
        known = {"panel": title, "true count": f"{count}"}
        frames.append(pd.DataFrame({"released": at, "density": density(at, count, sensitivity), **known}))
        frames.append(pd.DataFrame({"released": bins[:-1], "share": shares, **known}))
    ratio = density(at, 100, sensitivity) / density(at, other, sensitivity)
    return pd.concat(frames, ignore_index=True), float(max(ratio.max(), 1 / ratio.min()))


def main() -> None:
    """Draw the panels and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", nargs="?", default="laplace.svg", help="the file to draw to")
    picture = parser.parse_args().picture
    made = [panel(*each) for each in PANELS]
    base = alt.Chart(pd.concat([frame for frame, _ in made], ignore_index=True)).properties(width=260, height=160)
    colour = alt.Color(
        "true count:N", scale=alt.Scale(domain=["100", "101", "105"], range=["#c62828", "#1565c0", "#0d47a1"])
    )
    x = alt.X("released:Q", title="released value", scale=alt.Scale(domain=[80, 125]))
    lines = (
        base.transform_filter("isValid(datum.density)")
        .mark_line()
        .encode(x=x, y=alt.Y("density:Q", title="density"), color=colour)
    )
    dots = base.transform_filter("isValid(datum.share)").mark_circle(size=14).encode(x=x, y="share:Q", color=colour)
    chart = alt.layer(lines, dots).facet(facet=alt.Facet("panel:N", title=None), columns=2)
    chart.save(picture)
    for (title, *_), (_, ratio) in zip(PANELS, made, strict=True):
        print(f"{title}: densities differ by a factor of at most {ratio:.4f}; exp(ε) = {np.exp(EPSILON):.4f}")


if __name__ == "__main__":
    main()
