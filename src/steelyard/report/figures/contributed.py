"""What each client added to the model: its value with its interval, helpful clients first."""

from __future__ import annotations

import altair as alt
import pandas as pd

from steelyard.contributions.document import stored_contributions
from steelyard.report.figures.shared import WIDTH, described
from steelyard.report.figures.weights import CLIENTS, MARK
from steelyard.report.view import FederationView, RunView


def contributed(view: RunView, part: FederationView) -> alt.LayerChart | None:
    """Draw what each client added over all rounds, with its 95 % interval."""
    document = stored_contributions(part.history.folder, part.rule)
    if isinstance(document, str):
        return None
    flawed = view.flaws(part)
    clients = document["clients"]
    kept = clients if len(clients) <= CLIENTS else [*clients[: CLIENTS // 2], *clients[-CLIENTS // 2 :]]
    names = [f"{MARK if row['client'] in flawed else ''}{row['client']}" for row in kept]
    rows = [
        {"client": name, "added": row["value"], "low": row["low"], "high": row["high"], "verdict": row["verdict"]}
        for name, row in zip(names, kept, strict=True)
    ]
    base = alt.Chart(pd.DataFrame(rows)).encode(
        alt.Y("client:N", sort=names, title="client", axis=alt.Axis(ticks=False, domain=False))
    )
    verdicts = ["harms", "not clear", "helps"]
    scale = alt.Scale(domain=[*verdicts, *sorted({row["verdict"] for row in kept} - set(verdicts))])
    colour = alt.Color("verdict:N", scale=scale, legend=alt.Legend(title=None))
    tips = [alt.Tooltip("client:N"), *(alt.Tooltip(f"{name}:Q", format=".4~g") for name in ("added", "low", "high"))]
    title = f"added: {document['unit']}"
    ends = base.mark_rule(strokeWidth=2).encode(alt.X("low:Q", title=title), alt.X2("high:Q"), colour, tooltip=tips)
    points = base.mark_point(filled=True, size=60, opacity=1).encode(
        alt.X("added:Q", title=title), colour, alt.Shape("verdict:N", scale=scale, legend=None), tooltip=tips
    )
    zero = alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(strokeDash=[4, 3]).encode(alt.X("zero:Q", title=title))
    chart = alt.layer(zero, ends, points, width=WIDTH - 160, height=max(80, 18 * len(names)))
    notes = [f"{len(kept)} of {len(clients)} clients."] if len(kept) < len(clients) else []
    notes += [f"{MARK.strip()} marks flawed clients."] if flawed else []
    words = f"What each client added under {part.label}, {document['source']}."
    return described(chart, words, " ".join([*notes, *document["notes"]]))
