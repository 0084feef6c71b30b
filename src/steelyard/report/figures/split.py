"""How the training data are split over the clients: how many samples each has, and of which classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from steelyard.report.figures.shared import WIDTH, described, lists
from steelyard.report.figures.theme import FLAWED, SOUND
from steelyard.report.figures.weights import MARK
from steelyard.report.split import Split
from steelyard.report.view import FederationView, Frame, RunView, sampled

BARS = 60
"""Clients that get a bar and a column of classes of their own."""


def split(view: RunView, federation: FederationView) -> alt.VConcatChart | None:
    """Draw how many training samples each client has, and of which classes; of many clients, how often a size comes."""
    labels = federation.history.labels(federation.seed)
    sizes, asked = _sizes(view, federation, labels)
    if not len(sizes):
        return None
    return _drawn(sizes, labels, view.flaws(federation), asked)


def planned_split(planned: Split) -> alt.VConcatChart:
    """Draw a split before anything is trained, as `split` draws that of a run."""
    sizes: Frame = pd.Series(dict(planned.sizes), dtype="int64").sort_values(ascending=False, kind="stable")
    notes = " ".join(f"{note[:1].upper()}{note[1:]}." for note in planned.notes)
    return _drawn(sizes, {name: list(counts) for name, counts in planned.labels.items()}, planned.flaws, notes)


def _drawn(
    sizes: Frame, labels: dict[str, list[int]], flawed: Mapping[str, Sequence[str]], asked: str
) -> alt.VConcatChart:
    rows = [
        {
            "client": f"{MARK if client in flawed else ''}{client}",
            "samples": int(count),
            "kind": FLAWED if client in flawed else SOUND,
            "flaw": ", ".join(flawed.get(str(client), ())),
        }
        for client, count in sizes.items()
    ]
    chosen = sampled(len(rows), BARS).tolist()
    kept = [rows[index] for index in chosen]
    notes = [f"{len(rows)} clients, so each bar counts those of similar size."] if len(rows) > BARS else []
    panels = [_histogram(rows, flawed) if len(rows) > BARS else _bars(rows, flawed, axis=not labels)]
    if labels:
        panels.append(_classes(kept, [labels[str(sizes.index[index])] for index in chosen]))
        if len(rows) > BARS:
            notes.append(f"Classes of {len(kept)} clients, from the biggest to the smallest, evenly spaced.")
        notes.append("Labels as the client has them, wrong ones included." if flawed else "")
    chart = alt.vconcat(*panels).resolve_scale(color="independent")
    told_of = f"Training samples per client, {len(rows)} clients, from {min(sizes)} to {max(sizes)}."
    return described(chart, told_of, " ".join(note for note in (*notes, asked) if note))


def _sizes(view: RunView, federation: FederationView, labels: dict[str, list[int]]) -> tuple[Frame, str]:
    """Return the samples of each client, most first, and who is missing: without labels only those asked are known."""
    if labels:
        known: Frame = pd.Series({client: sum(counts) for client, counts in labels.items()}, dtype="int64")
        return known.sort_values(ascending=False, kind="stable"), ""
    frame = view.clients(federation)
    frame = frame[frame["samples"].notna()]
    found = frame.groupby("client")["samples"].max().sort_values(ascending=False, kind="stable")
    everyone: Any = view.evaluations(federation)["client"].nunique()
    missing = everyone - len(found)
    return found, f"{missing} clients were never asked, so their size is not recorded." if missing > 0 else ""


def _colour(flawed: object) -> alt.Color:
    kinds = [SOUND, FLAWED] if flawed else [SOUND]
    scale = alt.Scale(domain=kinds, range=["#0f7fc0", "#d9620f"][: len(kinds)])
    return alt.Color("kind:N", scale=scale, legend=alt.Legend() if flawed else None)


def _client_axis(rows: list[dict[str, Any]], *, shown: bool = True) -> alt.X:
    axis = alt.Axis(labelAngle=-60, labels=shown, ticks=shown, labelOverlap=True)
    return alt.X("client:N", sort=[row["client"] for row in rows], title=None, axis=axis)


def _histogram(rows: list[dict[str, Any]], flawed: object) -> alt.Chart:
    chart = alt.Chart(pd.DataFrame(rows)).mark_bar()
    chart = chart.encode(
        alt.X("samples:Q", bin=alt.Bin(maxbins=30), title="training samples of a client"),
        alt.Y("count():Q", title="clients"),
        _colour(flawed),
        tooltip=[alt.Tooltip("count():Q", title="clients"), alt.Tooltip("kind:N")],
    )
    return chart.properties(width=WIDTH, height=180)


def _bars(rows: list[dict[str, Any]], flawed: object, *, axis: bool) -> alt.Chart:
    chart = alt.Chart(pd.DataFrame(rows)).mark_bar()
    chart = chart.encode(
        _client_axis(rows, shown=axis),
        alt.Y("samples:Q", title="training samples"),
        _colour(flawed),
        tooltip=[alt.Tooltip("client:N"), alt.Tooltip("samples:Q"), alt.Tooltip("flaw:N")],
    )
    return chart.properties(width=WIDTH, height=180)


def _classes(rows: list[dict[str, Any]], counts: list[list[int]]) -> alt.Chart:
    """Draw how many samples of each class each client has; no colour: none."""
    classes = [str(label) for label in range(len(counts[0]))]
    cells = [
        {"client": row["client"], "label": classes, "samples": numbers}
        for row, numbers in zip(rows, counts, strict=True)
    ]
    axis = alt.Axis(labelOverlap=len(classes) > 24)
    chart = alt.Chart(lists(cells)).transform_flatten(["label", "samples"]).transform_filter("datum.samples > 0")
    chart = chart.mark_rect(aria=False).encode(
        _client_axis(rows),
        alt.Y("label:N", sort=classes, scale=alt.Scale(domain=classes), title="class", axis=axis),
        alt.Color("samples:Q", scale=alt.Scale(domainMin=0), legend=alt.Legend(title="samples", titleOrient="left")),
        tooltip=[alt.Tooltip("client:N"), alt.Tooltip("label:N", title="class"), alt.Tooltip("samples:Q")],
    )
    return chart.properties(width=WIDTH, height=max(60, min(360, 15 * len(classes))))
