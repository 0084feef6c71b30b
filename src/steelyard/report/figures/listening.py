"""Who listens to whom: the weight that each client gives to the model of each other, where clients weigh themselves."""

from __future__ import annotations

import altair as alt
import numpy as np

from steelyard.report.figures.shared import WIDTH, described, lists
from steelyard.report.figures.weights import CLIENTS, MARK, interesting
from steelyard.report.view import FederationView, RunView, plain


def listening(view: RunView, part: FederationView) -> alt.Chart | None:
    """Draw the mean weight over all rounds that each client (row) gave each client (column) of its cohorts."""
    frame = part.history.listening
    frame = frame[(frame["rule"] == part.rule) & (frame["seed"] == part.seed)]
    if not len(frame):
        return None
    table = frame.pivot_table(index="client", columns="hears", values="weight", aggfunc="mean")
    flawed = view.flaws(part)
    kept = interesting(table.sum(axis=0), flawed, CLIENTS)
    grid = table.reindex(index=kept, columns=kept)
    names = [f"{MARK if client in flawed else ''}{client}" for client in kept]
    rows = [
        {"client": name, "hears": names, "weight": [plain(float(value)) for value in values]}
        for name, values in zip(names, grid.to_numpy(np.float64), strict=True)
    ]
    side = max(160, min(WIDTH - 160, 16 * len(names)))
    chart = (
        alt.Chart(lists(rows))
        .transform_flatten(["hears", "weight"])
        .transform_filter("isValid(datum.weight)")
        .mark_rect(aria=False)
        .encode(
            alt.X("hears:N", sort=names, title="listens to", axis=alt.Axis(ticks=False, domain=False)),
            alt.Y("client:N", sort=names, title="client", axis=alt.Axis(ticks=False, domain=False)),
            alt.Color("weight:Q", scale=alt.Scale(domainMin=0), legend=alt.Legend(title="weight", format=".2~%")),
            tooltip=[
                alt.Tooltip("client:N"),
                alt.Tooltip("hears:N", title="listens to"),
                alt.Tooltip("weight:Q", format=".1%"),
            ],
        )
        .properties(width=side, height=side)
    )
    notes = [] if len(kept) == len(table) else [f"{len(kept)} of {len(table)} clients."]
    notes += [f"{MARK.strip()} marks flawed clients."] if flawed else []
    return described(chart, f"How much each client listened to each other under {part.label}.", " ".join(notes))
