"""A recommender's part of the report: metrics, accuracy against coverage, and how popular what it shows is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import altair as alt
import numpy as np
import pandas as pd

from steelyard.base.errors import UserError
from steelyard.report.figures.look import WIDTH, Chart, VegaLite, by_rule, described, line_chart, spec
from steelyard.report.rendering import Table
from steelyard.report.view import RunView

if TYPE_CHECKING:
    from steelyard.report.recommender import CloudWord


class Titled(NamedTuple):
    """What stands above a figure."""

    title: str
    caption: str


TITLES = {
    "tradeoff": Titled("Accuracy against coverage", "Up: better lists; right: more of the catalogue is ever shown."),
    "popularity": Titled(
        "How popular what is shown is",
        "Share of all that is recommended that goes to the most popular items; the diagonal treats all alike.",
    ),
}

_SHOWN = {
    "ndcg": "nDCG",
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "hit_rate": "hit rate",
    "item_coverage": "items shown",
    "item_coverage_share": "coverage",
    "gini": "Gini",
    "shannon_entropy": "entropy",
    "aclt": "ACLT",
    "pop_reo": "PopREO",
    "pop_rsp": "PopRSP",
}


@dataclass
class Recommended:
    """Tables and figures of the recommenders among the runs; empty where there is none."""

    tables: list[Table] = field(default_factory=list[Table])
    figures: dict[str, VegaLite] = field(default_factory=dict[str, VegaLite])
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, eq=False)
class _System:
    label: str
    cutoff: int
    metrics: dict[str, object]
    times_shown: Any
    popularity: Any


def recommended(view: RunView) -> Recommended:
    """Return what the last models of a recommender's rules recommend, the most popular items beside them."""
    made = Recommended()
    systems: list[_System] = []
    for index, experiment in enumerate(view.experiments):
        if experiment.lists:
            try:
                systems += _systems(view, index)
            except UserError as error:
                made.notes.append(f"Lists cannot be made again: {error}")
    if systems:
        for cutoff in dict.fromkeys(system.cutoff for system in systems):
            made.tables.append(_metrics([system for system in systems if system.cutoff == cutoff], cutoff))
        made.figures = {"tradeoff": spec(_tradeoff(systems)), "popularity": spec(_popularity(systems))}
    return made


def _systems(view: RunView, index: int) -> list[_System]:
    # For speed of start: only the reports of recommenders need what reads their data.
    from steelyard.recommend.baselines import baseline, recommend
    from steelyard.recommend.evaluate import Case, figures
    from steelyard.report.recommender import open_run

    folder = view.histories[index].folder
    found: list[_System] = []
    for rule in dict.fromkeys(one.rule for one in view.federations if one.history.folder == folder):
        run = open_run(folder, rule)
        cutoff = run.experiment.ranking.cutoff
        truth, data = run.run_data.users.truth, run.run_data.data
        made, _ = run.lists(cutoff)
        pairs = [(view.label(index, rule), made)]
        if not found:
            popular, _ = recommend(baseline("popular"), run.run_data.split.train, cutoff)
            pairs.append(
                (f"{view.names[index]} · most popular" if len(view.histories) > 1 else "most popular", popular)
            )
        for label, ranked in pairs:
            case = Case(truth, tuple(data.users), tuple(data.items), ranked, None, ())
            metrics = figures(case, [cutoff])[str(cutoff)]
            found.append(_System(label, cutoff, metrics, truth.view(ranked, cutoff).times_shown, truth.popularity))
    return found


def _metrics(systems: list[_System], cutoff: int) -> Table:
    known = [name for name in _SHOWN if name in systems[0].metrics]
    known += [n for n, v in systems[0].metrics.items() if n not in _SHOWN and isinstance(v, int | float)]
    rows = [(system.label, *(_cell(system.metrics.get(name)) for name in known)) for system in systems]
    headings = ("rule", *(_SHOWN.get(name, name.replace("_", " ")) for name in known))
    note = "Over all unrated items; means over users with a relevant test item. The most popular items stand beside."
    return Table(f"Metrics of the lists of {cutoff}", headings, tuple(rows), note)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else "–"


def _tradeoff(systems: list[_System]) -> Chart:
    labels = [system.label for system in systems]
    rows = [
        {"rule": system.label, "ndcg": system.metrics.get("ndcg"), "coverage": float((system.times_shown > 0).mean())}
        for system in systems
    ]
    base = alt.Chart(pd.DataFrame(rows)).encode(
        alt.X("coverage:Q", title="share of the catalogue shown to anybody", axis=alt.Axis(format="%")),
        alt.Y("ndcg:Q", title="nDCG", scale=alt.Scale(zero=True)),
    )
    tips = ["rule:N", alt.Tooltip("ndcg:Q", format=".4f"), alt.Tooltip("coverage:Q", format=".1%")]
    dots = base.mark_point(filled=True, size=110, opacity=1).encode(
        alt.Color("rule:N", scale=alt.Scale(domain=labels), legend=alt.Legend()), tooltip=tips
    )
    names = base.mark_text(align="left", dx=9, dy=-7).encode(text="rule:N")
    chart = alt.layer(dots, names).properties(width=WIDTH, height=260)
    return described(chart, "nDCG against catalogue coverage, by rule.")


def _popularity(systems: list[_System]) -> Chart:
    # Each against the popularity in its own run's training data: runs may have other catalogues.
    named = [(system.label, system.times_shown, system.popularity) for system in systems]
    named.append(("training data", systems[0].popularity, systems[0].popularity))
    rows = [{"rule": label, **_concentration(shown, popularity)} for label, shown, popularity in named]
    labels = [label for label, _, _ in named]
    chart = line_chart(
        rows,
        alt.X("items:Q", title="most popular items, share of the catalogue", axis=alt.Axis(format="%")),
        alt.Y("share:Q", title="share of what is shown", axis=alt.Axis(format="%")),
        *by_rule(labels),
        tooltip=["rule:N", alt.Tooltip("items:Q", format=".0%"), alt.Tooltip("share:Q", format=".1%")],
        height=280,
    )
    return described(chart, "Share of all recommendations that goes to the most popular items, by rule.")


def _concentration(shown: Any, popularity: Any) -> dict[str, list[float]]:
    """Return the share of what is shown that falls to the most popular items, for shares of the catalogue."""
    counts = shown[np.argsort(-popularity, kind="stable")]
    running = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)])
    marks = np.unique(np.linspace(0, len(counts), 101).round().astype(int))
    return {"items": (marks / len(counts)).tolist(), "share": (running[marks] / (running[-1] or 1.0)).tolist()}


# Feature clouds before and after recommendation (the thesis' Figure 6.4).


SIDES = {"before": "in what users took", "after": "in what they are shown"}


def clouds(rows: Sequence[CloudWord]) -> alt.HConcatChart:
    """Draw the most prominent features of both sides, best on top; those of both sides stand out.

    `rows` are those of `Explained.clouds`: when, rank, feature, weight.
    """
    sides = {when: {str(row["feature"]) for row in rows if row["when"] == when} for when in SIDES}
    both = sides["before"] & sides["after"]
    marked = [{**row, "kept": "on both sides" if row["feature"] in both else "on one side"} for row in rows]
    charts = [_side([row for row in marked if row["when"] == when], title) for when, title in SIDES.items()]
    # Lists are shorter than histories, so their gains are larger: words are sized on each side by themselves.
    return alt.hconcat(*charts).resolve_scale(size="independent")


def _side(rows: Sequence[Mapping[str, object]], title: str) -> alt.LayerChart | alt.FacetChart:
    count = max(len(rows), 1)
    y = alt.Y("rank:O", axis=None)
    x = alt.X("weight:Q", title="information gain, summed over users", axis=alt.Axis(grid=False))
    colour = alt.Color(
        "kept:N", scale=alt.Scale(domain=["on both sides", "on one side"]), legend=alt.Legend(title=None, orient="top")
    )
    chart = alt.Chart(pd.DataFrame(rows))
    bars = chart.mark_bar(opacity=0.35).encode(
        x, y, colour, tooltip=["feature:N", alt.Tooltip("weight:Q", format=".3f")]
    )
    # The most prominent features are the largest words, as in a cloud.
    words = chart.mark_text(align="left", dx=4, limit=330).encode(
        alt.XDatum(0), y, alt.Text("feature:N"), size=alt.Size("weight:Q", scale=alt.Scale(range=[9, 14]), legend=None)
    )
    return alt.layer(bars, words, width=340, height=18 * count, title=title)
