"""Measures of one rule's last model by site and over all, with ROC, calibration and confusion, from sums of sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt
import numpy as np

from steelyard.base.measures import MEASURES
from steelyard.base.tallies import Floats, Tally, auc_bound, errors_of, figures_of
from steelyard.data.preparation import Preparation
from steelyard.report.figures.look import WIDTH, Chart, Row, described, figure, numbers, unfolded
from steelyard.report.view import FederationView, RunView

SITES = 7
"""So many sites have a line of their own, those with most test rows."""
MOST_COUNTED = 4
"""Of so many classes the rows that are right are written out."""
ALL = "all sites"
SIDE = WIDTH // 2 - 50

Tables = Mapping[str, Floats]
"""By site, or by class."""


@figure(
    "federation",
    "Measures by site",
    "The last model on the test samples, by site and over all, with 95% intervals from these samples.",
    "No further metric was recorded; rounds.measure = 'roc-auc', or another, records what this needs.",
)
def measures(view: RunView, part: FederationView) -> Chart | None:
    """Draw every measure at each site, and of classes ROC curves, calibration and confusion."""
    found = part.history.tallies(part.rule, part.seed)
    if found is None:
        return None
    clients, tally = found
    rows = tally.confusion.sum(axis=(-2, -1)) if tally.classes else tally.cells[:, 0]
    kept = np.argsort(-rows, kind="stable")[:SITES].tolist()
    sites = {ALL: Tally(tally.cells.sum(axis=0))} | {clients[at]: Tally(tally.cells[at]) for at in sorted(kept)}
    classes, several = _classes(part, tally.classes), tally.classes > 2
    panels = [_values(sites, classes)]
    if tally.classes:
        curves, steps = (
            {f"class {called}": table for called, table in zip(classes, of[ALL], strict=True)}
            if several
            else {name: tables[0] for name, tables in of.items()}
            for of in ({n: t.scores for n, t in sites.items()}, {n: t.calibration for n, t in sites.items()})
        )
        panels += [alt.hconcat(_roc(curves), _calibration(steps)), _confusion(sites, classes)]
    return described(
        alt.vconcat(*panels).resolve_scale(color="independent"),
        f"Measures of the last model under {part.label}, by site and over all.",
        f"{len(kept)} of {len(clients)} sites, those with most test samples." if len(kept) < len(clients) else "",
        f"Bins of scores move ROC AUC by {float(auc_bound(sites[ALL])):.2g} at most." if tally.classes else "",
        "Curves are of each class against all others, over all sites." if several else "",
        f"Sensitivity, specificity, F1 and the curves are of the class {classes[1]}." if tally.classes == 2 else "",
    )


def _classes(part: FederationView, count: int) -> list[str]:
    """Return the names of the classes, or their numbers where the run knows no others."""
    text = part.history.facts.preparations.get(str(part.seed))
    names = [] if text is None else Preparation.model_validate_json(text).target.names
    return names if len(names) == count else [str(label) for label in range(count)]


def _values(sites: Mapping[str, Tally], classes: Sequence[str]) -> alt.Chart:
    """Write every measure of every site with its interval."""
    written: list[Row] = []
    for site, tally in sites.items():
        errors = errors_of(tally.cells)
        rows = float(tally.confusion.sum() if tally.classes else tally.cells[0])
        for name, value in figures_of(tally).items():
            measure, score = MEASURES[name], float(value)
            ends = measure.interval(score, rows, errors.get(name)) if np.isfinite(score) else None
            text = measure.show(score) + (f" {measure.show_interval(*ends)}" if ends else "")
            written.append({"site": site, "measure": measure.name, "text": text, "rows": rows})
        for label, called in enumerate(classes if len(classes) <= MOST_COUNTED else ()):
            row = tally.confusion[label]
            text = f"{row[label]:.0f} of {row.sum():.0f}"
            written.append({"site": site, "measure": f"right of class {called}", "text": text, "rows": rows})
    names = list(dict.fromkeys(row["measure"] for row in written))
    axis = alt.Axis(ticks=False, domain=False, grid=False, labelAngle=0)
    return (
        alt.Chart(alt.Data(values=[dict(row) for row in written]))
        .mark_text()
        .encode(
            alt.X("site:N", sort=list(sites), title=None, axis=axis),
            alt.Y("measure:N", sort=names, title=None, axis=axis),
            alt.Text("text:N"),
            tooltip=["site:N", "measure:N", "text:N", "rows:Q"],
        )
        .properties(width=max(WIDTH - 120, 110 * len(sites)), height=22 * len(names))
    )


def _by_name(names: list[str]) -> alt.Color:
    return alt.Color("name:N", scale=alt.Scale(domain=names), legend=alt.Legend(columns=4))


def _roc(tables: Tables) -> Chart:
    rows: list[Row] = []
    for name, table in tables.items():
        others, mine = table[:, ::-1]
        if others.sum() and mine.sum():
            there = np.flatnonzero(others + mine)
            false, true = ((each.cumsum() / each.sum())[there] for each in (others, mine))
            rows.append({"name": name, "false": [0.0, *numbers(false)], "true": [0.0, *numbers(true)]})
    line = unfolded(rows or [{"name": "", "false": [0.0], "true": [0.0]}]).mark_line()
    return line.encode(
        alt.X("false:Q", title="1 − specificity", scale=alt.Scale(domain=[0, 1])),
        alt.Y("true:Q", title="sensitivity", scale=alt.Scale(domain=[0, 1])),
        _by_name(list(tables)),
        alt.Order("true:Q"),
    ).properties(title="ROC", width=SIDE, height=SIDE)


def _calibration(tables: Tables) -> Chart:
    rows: list[Row] = []
    for name, (others, mine, chances) in tables.items():
        count = others + mine
        there = count > 0
        shares = {"said": chances[there] / count[there], "found": mine[there] / count[there], "rows": count[there]}
        rows.append({"name": name, **{key: numbers(values) for key, values in shares.items()}})
    ends = alt.Chart(alt.Data(values=[{"x": 0, "y": 0}, {"x": 1, "y": 1}]))
    even = ends.mark_line(style="soft", strokeDash=[3, 3]).encode(alt.X("x:Q"), alt.Y("y:Q"))
    points = unfolded(rows).mark_line(point=True)
    drawn = points.encode(
        alt.X("said:Q", title="probability, mean of a tenth", scale=alt.Scale(domain=[0, 1])),
        alt.Y("found:Q", title="share of samples", scale=alt.Scale(domain=[0, 1])),
        _by_name(list(tables)),
        tooltip=["name:N", "rows:Q", alt.Tooltip("said:Q", format=".2f"), alt.Tooltip("found:Q", format=".2f")],
    )
    return alt.layer(even, drawn, title="Calibration", width=SIDE, height=SIDE)


def _confusion(sites: Mapping[str, Tally], classes: Sequence[str]) -> Chart:
    values = [
        {
            "site": site,
            "true": classes[true],
            "taken": classes[taken],
            "rows": count,
            "share": count / (sum(row) or 1.0),
        }
        for site, tally in sites.items()
        for true, row in enumerate(tally.confusion.tolist())
        for taken, count in enumerate(row)
    ]
    side = 90 if len(values) <= 4 * (SITES + 1) else 150
    base = alt.Chart(alt.Data(values=values)).encode(
        alt.X("taken:N", title="predicted", axis=alt.Axis(labelAngle=0)),
        alt.Y("true:N", title="true"),
        tooltip=["site:N", "true:N", "taken:N", "rows:Q", alt.Tooltip("share:Q", format=".1%")],
    )
    scale = alt.Scale(domain=[0, 1])
    legend = alt.Legend(title="share of the true class", format="%")
    cell = base.mark_rect().encode(alt.Color("share:Q", scale=scale, legend=legend)).properties(width=side, height=side)
    return cell.facet(alt.Facet("site:N", sort=list(sites), title=None), columns=WIDTH // (side + 50))
