"""Pictures of the thesis' Figures 6.2 and 6.3 from the cells of kgflex_tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import altair as alt
import pandas as pd

from benchmarks.kgflex_pages import DATA, KGFLEX, WORDS, tested
from benchmarks.kgflex_plan import Cell

HOPS = {"1": "one hop", "2": "two hops", "1+2": "both"}
COLOURS = ["#1f4e79", "#e69f00", "#2e7d32"]
_OURS = {name: words.replace("*", "") for name, words in KGFLEX.items() if name in ("chosen", "thesis")}
ORDER = [*_OURS.values(), *WORDS.values()]


def spread(cells: Sequence[Cell]) -> pd.DataFrame:
    """Return Figure 6.2: each system's hit rate and Shannon entropy at 10 on each data set, means over its seeds."""
    rows = [
        {
            "data": title,
            "system": words,
            "HR@10": statistics.mean(each["10"]["hit_rate"] for each in figures),
            "Shannon entropy@10": statistics.mean(each["10"]["shannon_entropy"] for each in figures),
        }
        for data, title in DATA.items()
        for name, words in {**WORDS, **_OURS}.items()
        for figures in tested([cell for cell in cells if cell["data"] == data], name).values()
    ]
    return pd.DataFrame(rows)


def ablated(cells: Sequence[Cell], data: str) -> pd.DataFrame:
    """Return Figure 6.3: nDCG@10 and items shown by hops and length of vectors."""
    rows = [
        {
            "hops": HOPS[cell["hops"]],
            "factors": cell["factors"],
            "nDCG@10": cell["found"][epoch]["10"]["ndcg"],
            "items shown": cell["found"][epoch]["10"]["item_coverage"],
        }
        for cell in cells
        for epoch in [str(max(cell.get("epochs") or [0]))]
        if (cell["stage"], cell["data"]) == ("ablation", data) and epoch in cell["found"]
    ]
    return pd.DataFrame(rows)


def draw(cells: Sequence[Cell], folder: Path) -> None:
    """Write kgflex-spread.svg (Figure 6.2) and kgflex-hops.svg (6.3, MovieLens 1M) as far as there are cells."""
    folder.mkdir(parents=True, exist_ok=True)
    found = spread(cells)
    if not found.empty:
        order = [name for name in ORDER if name in set(found["system"])]
        chart = alt.Chart(found).mark_point(size=70, filled=True, opacity=0.9).properties(width=190, height=190)
        chart.encode(
            x=alt.X("HR@10:Q", axis=alt.Axis(tickCount=5)),
            y=alt.Y("Shannon entropy@10:Q", scale=alt.Scale(zero=False)),
            color=alt.Color("system:N", title=None, scale=alt.Scale(domain=order, scheme="dark2")),
            shape=alt.Shape("system:N", title=None, scale=alt.Scale(domain=order)),
            facet=alt.Facet("data:N", title=None, sort=list(DATA.values()), columns=3),
        ).resolve_scale(x="independent", y="independent").save(str(folder / "kgflex-spread.svg"))
    hops = ablated(cells, "ml1m")
    if not hops.empty:
        chart = alt.Chart(hops).mark_point(filled=False, strokeWidth=2).properties(width=420, height=220)
        chart.encode(
            x=alt.X("items shown:Q", scale=alt.Scale(zero=False, padding=25)),
            y=alt.Y("nDCG@10:Q", scale=alt.Scale(padding=15)),
            color=alt.Color("hops:N", sort=list(HOPS.values()), scale=alt.Scale(range=COLOURS)),
            size=alt.Size("factors:O", title="length of vectors", scale=alt.Scale(range=[30, 500])),
        ).save(str(folder / "kgflex-hops.svg"))
