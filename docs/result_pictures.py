"""Draw the pictures of results that are their tables: `python docs/result_pictures.py` reads the pages, writes SVG.

Other pictures there are figures of runs, written by `steelyard report --figures` or the command that the page names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, str]
WIDTH = 460
STEP = 34
ROOM = {"left": 60, "right": 20, "top": 5, "bottom": 5}
"""Readers' fonts are wider than the one by which the picture is laid out."""


def rows(page: str, number: int = 0) -> list[Row]:
    """Return a table of a page, counted from 0, a row for each line by the heads of its columns."""
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"^\|.*\|\n\|[-| :]+\|\n(?:\|.*\|\n)+", text, re.MULTILINE)[number]
    head, _, *lines = ([cell.strip(" `*") for cell in line.strip("|").split("|")] for line in found.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


def number(cell: str) -> float:
    """Return the first number of a cell."""
    return float(re.findall(r"-?\d*\.?\d+", cell.replace("−", "-"))[0])


def half(cell: str) -> float:
    """Return the half of the interval that a cell names after ±; 0 where it names none."""
    return number(cell.partition("±")[2]) if "±" in cell else 0.0


def hospitals() -> alt.Chart:
    """Points over FedAvg of each rule, with plain and corrected intervals."""
    plain, corrected, *_ = rows("hospitals")
    rules = list(plain)[1:]
    found = [
        {"rule": rule, "interval": name, "value": number(plain[rule]), "half": half(line[rule])}
        for rule in rules
        for name, line in (("over the 40 splits", plain), ("corrected for shared patients", corrected))
    ]
    return _dots(found, "rule", "interval", "points over FedAvg, the server's patients")


def worth() -> alt.Chart:
    """In how many of the 45 cases each rule is better or worse than FedAvg."""
    found = [
        {"rule": line["rule"], "verdict": verdict, "value": sign * number(line[verdict])}
        for line in rows("worth")
        for verdict, sign in (("better", 1), ("worse", -1))
    ]
    names = [line["rule"] for line in rows("worth")]
    return (
        alt.Chart(pd.DataFrame(found))
        .mark_bar()
        .encode(
            alt.X("value:Q", title="of 45 cases: worse than FedAvg (left), better (right)"),
            alt.Y("rule:N", sort=names, title=None, axis=alt.Axis(labelLimit=200)),
            alt.Color("verdict:N", scale=alt.Scale(domain=["better", "worse"]), legend=_legend()),
        )
        .properties(width=WIDTH, height=alt.Step(STEP // 2))
    )


def privacy_costs() -> alt.FacetChart:
    """Accuracy after one round under each protection, among ten clients and among a hundred."""
    networks = {"papers' network": "papers' network (1,663,370)", "MLP": "MLP (25,450)"}
    found = [
        {
            "protection": line[""],
            "clients": f"{line['clients']} clients",
            "network": name,
            "value": number(line[column]),
        }
        for line in rows("privacy-costs")
        for name, column in networks.items()
    ]
    chart = _dots(found, "protection", "network", "accuracy (%)", apart=False)
    kinds = ["10 clients", "100 clients"]
    return chart.facet(row=alt.Row("clients:N", sort=kinds, title=None, header=_above())).resolve_scale(y="independent")


def kgflex_cold_start() -> alt.FacetChart:
    """nDCG@10 of new items by system, on the three data sets."""
    names = ("Facebook Books", "Yahoo! Movies", "MovieLens 1M")
    data = {name: rows("kgflex-cold-start", place) for place, name in enumerate(names)}
    found = [
        {"system": line[""], "data": name, "value": number(line["nDCG@10"]), "half": half(line["nDCG@10"])}
        for name, lines in data.items()
        for line in lines
    ]
    chart = _dots(found, "system", "data", "nDCG@10, with the standard deviation over five draws", apart=False)
    return chart.facet(row=alt.Row("data:N", sort=list(names), title=None, header=_above()))


def _legend() -> alt.Legend:
    return alt.Legend(orient="top", title=None, labelLimit=300, columnPadding=50, columns=2, symbolSize=60)


def _above() -> alt.Header:
    return alt.Header(orient="top", labelAnchor="start", labelAngle=0)


def _dots(found: list[dict[str, Any]], line: str, colour: str, title: str, apart: bool = True) -> Any:
    """Draw a dot for each value, a line of the picture for each name, with its interval where it has one."""
    frame = pd.DataFrame(found)
    if "half" not in frame:
        frame["half"] = 0.0
    frame["low"], frame["high"] = frame["value"] - frame["half"], frame["value"] + frame["half"]
    names, kinds = list(dict.fromkeys(frame[line])), list(dict.fromkeys(frame[colour]))
    y = alt.Y(f"{line}:N", sort=names, title=None, axis=alt.Axis(labelLimit=330, grid=True))
    shift = alt.YOffset(f"{colour}:N", sort=kinds) if apart else alt.YOffset()
    shade = alt.Color(f"{colour}:N", scale=alt.Scale(domain=kinds), legend=_legend())
    base = alt.Chart(frame)
    spread = base.mark_rule(strokeWidth=2).encode(alt.X("low:Q", title=title), alt.X2("high:Q"), y, shift, shade)
    dots = base.mark_point(filled=True, size=55, opacity=1).encode(alt.X("value:Q", title=title), y, shift, shade)
    return alt.layer(spread, dots).properties(width=WIDTH, height=alt.Step(STEP, **{"for": "position"}))


PICTURES: Mapping[str, Callable[[], Any]] = {
    "hospitals": hospitals,
    "worth": worth,
    "privacy-costs": privacy_costs,
    "kgflex-cold-start": kgflex_cold_start,
}


def main() -> None:
    """Draw all of them anew."""
    from steelyard.report.figures import write_figure

    for name, draw in PICTURES.items():
        write_figure(draw().properties(padding=ROOM), RESULTS / f"{name}.svg")


if __name__ == "__main__":
    main()
