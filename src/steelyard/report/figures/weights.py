"""Who counted how much, when and why: weights by client and round, criteria against weight, who listens to whom."""

from __future__ import annotations

import json
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from steelyard.contributions.document import stored_contributions
from steelyard.report.figures.look import FLAWED, SOUND, WIDTH, described, lists, round_axis
from steelyard.report.view import FederationView, Frame, RunView, plain, sampled

CLIENTS, COLUMNS = 60, 120
"""Rows and columns of the heat map at most: a browser draws so many cells in a moment."""
DOTS = 900
"""Points of criteria against weight at most, for each rule."""
MARK = "⚑ "
"""Stands before the names of flawed clients, so that colour is not the only sign."""


def weights(view: RunView, federation: FederationView) -> alt.LayerChart | None:
    """Draw how much each client weighed in each round of one rule; a cell without colour: it was not asked."""
    clients, rounds, found = federation.history.weights(federation.rule, federation.seed)
    table: Frame = pd.DataFrame(found.T, index=list(clients), columns=list(rounds)).dropna(how="all")
    if not table.size or _alike(table):
        return None
    flawed = view.flaws(federation)
    kept = interesting(table.sum(axis=1), flawed, CLIENTS)
    grid, width = _binned(table.loc[kept])
    gap = _gap(grid.columns) if width == 1 else 1
    names = [f"{MARK if client in flawed else ''}{client}" for client in kept]
    rows = [
        {
            "client": name,
            "flaw": ", ".join(flawed.get(client, ())),
            "round": [int(column) for column in grid.columns],
            "start": [int(column) + 0.5 - gap for column in grid.columns],
            "end": [int(column) + width - 0.5 for column in grid.columns],
            "weight": [plain(float(value)) for value in values],
        }
        for name, client, values in zip(names, kept, grid.to_numpy(np.float64), strict=True)
    ]
    height = max(120, 16 * len(names) if len(names) <= 40 else 13 * len(names))
    chart = alt.layer(_cells(rows, names, width), width=WIDTH, height=height)
    notes = [] if len(kept) == len(table) else [f"{len(kept)} of {len(table)} clients: {_chosen(flawed)}."]
    if width > 1:
        notes.append(f"Each column is the mean of {width} rounds.")
    if gap > 1:
        notes.append(f"Recorded every {gap} rounds: a cell stands for the round at its right edge.")
    if flawed:
        notes.append(f"{MARK.strip()} marks flawed clients.")
    return described(chart, f"Weight of each client in each round under {federation.label}.", " ".join(notes))


def _cells(rows: list[dict[str, Any]], names: list[str], width: int) -> alt.Chart:
    """Return the cells of the heat map; a column is `width` rounds wide."""
    base = alt.Chart(lists(rows)).transform_flatten(["round", "start", "end", "weight"])
    tips = [
        alt.Tooltip("client:N"),
        alt.Tooltip("round:Q", title="round" if width == 1 else "from round"),
        alt.Tooltip("weight:Q", format=".1%"),
        alt.Tooltip("flaw:N"),
    ]
    ends = [rows[0]["start"][0], rows[0]["end"][-1]]
    return (
        base.transform_filter("isValid(datum.weight)")
        .mark_rect(aria=False)  # a description of each of thousands of cells helps nobody and takes seconds
        .encode(
            alt.X(
                "start:Q",
                title="round",
                scale=alt.Scale(domain=ends, nice=False, zero=False),
                axis=alt.Axis(grid=False, tickMinStep=1),
            ),
            alt.X2("end:Q"),
            alt.Y("client:N", sort=names, title=None, axis=alt.Axis(ticks=False, domain=False)),
            alt.Color(
                "weight:Q",
                scale=alt.Scale(domainMin=0),
                legend=alt.Legend(title="weight", format=".2~%", gradientLength=160, titleOrient="left"),
            ),
            tooltip=tips,
        )
    )


def interesting(totals: Frame, flawed: dict[str, list[str]], most: int) -> list[str]:
    """Return the clients that a figure shows: all by weight, or with many the flawed, the heaviest and the lightest."""
    ranked = [str(client) for client in totals.sort_values(ascending=False, kind="stable").index]
    if len(ranked) > most:
        first = [client for client in ranked if client in flawed][: most // 2]
        others = [client for client in ranked if client not in set(first)]
        rest = most - len(first)
        heavy = rest - rest // 4
        chosen = {*first, *others[:heavy], *others[len(others) - rest // 4 :]}
        ranked = [client for client in ranked if client in chosen]
    return sorted(ranked, key=lambda client: client not in flawed)


def _alike(table: Frame) -> bool:
    """Whether every client was asked in every round and weighed the same: one colour, which shows nothing."""
    values = table.to_numpy(np.float64)
    return bool(len(values) > 1 and np.allclose(values, values[:1], rtol=1e-9, atol=0.0))


def _chosen(flawed: dict[str, list[str]]) -> str:
    return "flawed ones, the heaviest and the lightest" if flawed else "the heaviest and the lightest"


def _binned(table: Frame) -> tuple[Frame, int]:
    """Return the table with at most COLUMNS columns, each the mean of so many rounds that follow each other."""
    rounds = np.asarray(table.columns, dtype=np.int64)
    width = max(1, -(-int(rounds[-1] - rounds[0] + 1) // COLUMNS))
    if width == 1:
        return table, 1
    start = rounds[0] + (rounds - rounds[0]) // width * width
    return table.T.groupby(start).mean().T, width


def _gap(rounds: Any) -> int:
    """Return how many rounds lie between two that were recorded; 1 unless the store keeps clients at times only."""
    steps = np.diff(np.asarray(rounds, dtype=np.int64))
    return int(steps.min()) if len(steps) else 1


def criteria(view: RunView, federation: FederationView) -> alt.FacetChart | None:
    """Draw each criterion of a rule against the weight that it led to: which of them decided."""
    frame = view.clients(federation)
    names = [name for name in federation.criteria if f"normalised_{name}" in frame]
    frame = frame[frame["weight"].notna()]
    if not len(frame) or not names:
        return None
    shown = frame.iloc[sampled(len(frame), max(50, DOTS // len(names)))]
    flawed = view.flaws(federation)
    rows = [
        {
            "criterion": name,
            "value": [plain(float(value)) for value in shown[f"normalised_{name}"]],
            "raw": [plain(float(value)) for value in shown[f"raw_{name}"]],
            "weight": [plain(float(value)) for value in shown["weight"]],
            "client": [str(client) for client in shown["client"]],
            "round": [int(number) for number in shown["round"]],
            "kind": [FLAWED if client in flawed else SOUND for client in shown["client"]],
        }
        for name in names
    ]
    kinds = [SOUND, FLAWED] if flawed else [SOUND]
    chart = (
        alt.Chart(lists(rows))
        .transform_flatten(["value", "raw", "weight", "client", "round", "kind"])
        .mark_point(filled=True, size=34, opacity=0.55)
        .encode(
            alt.X("value:Q", title="criterion, as normalised", scale=alt.Scale(zero=True)),
            alt.Y("weight:Q", title="weight", axis=alt.Axis(format="%")),
            alt.Color(
                "kind:N",
                scale=alt.Scale(domain=kinds, range=["#0f7fc0", "#d9620f"][: len(kinds)]),
                legend=alt.Legend() if flawed else None,
            ),
            alt.Shape(
                "kind:N",
                scale=alt.Scale(domain=kinds, range=["circle", "triangle-up"][: len(kinds)]),
                legend=alt.Legend() if flawed else None,
            ),
            tooltip=[
                alt.Tooltip("client:N"),
                alt.Tooltip("round:Q"),
                alt.Tooltip("raw:Q", title="measured", format=".4~g"),
                alt.Tooltip("value:Q", title="normalised", format=".4~g"),
                alt.Tooltip("weight:Q", format=".2%"),
            ],
        )
        .properties(width=WIDTH // 3 - 40, height=180)
        .facet(alt.Facet("criterion:N", sort=names, title=None))
        .properties(columns=3)
        .resolve_scale(x="independent")
    )
    note = "" if len(shown) == len(frame) else f"{len(shown)} of {len(frame)} updates, evenly spaced."
    return described(chart, f"Each criterion of {federation.label} against the weight of the update.", note)


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


# What adapts between rounds: priority orders, class weights beside the F1 of each class.


ROUNDS = 120
"""Columns of the pictures of classes and orders at most."""


def orders(view: RunView, federation: FederationView) -> alt.LayerChart | None:
    """Draw which priority order each round kept, and which others it tested (paper 003's testing rounds)."""
    rows = _rows(view, federation, "round", "priority", "tried", "tests")
    tried = [json.loads(row["tried"]) for row in rows]
    if not any(len(entry) > 1 for entry in tried):
        return None
    kept: list[dict[str, Any]] = []
    tested: list[dict[str, Any]] = []
    for row, entries in zip(rows, tried, strict=True):
        kept.append({"round": int(row["round"]), "order": str(row["priority"]), "tests": int(row["tests"])})
        tested += [
            {"round": int(row["round"]), "order": str(order), "accuracy": plain(float(accuracy)), "what": "tested"}
            for order, accuracy in entries[1:]
            if accuracy is not None
        ]
    seen = [entry["order"] for entry in kept] + [entry["order"] for entry in tested]
    names = sorted(set(seen), key=lambda order: (-sum(entry["order"] == order for entry in kept), order))
    tests = sum(entry["tests"] for entry in kept)
    x = round_axis(kept[0]["round"] - 0.5, kept[-1]["round"] + 0.5)
    y = alt.Y(
        "order:N", sort=names, title=None, scale=alt.Scale(domain=names), axis=alt.Axis(grid=True, labelLimit=180)
    )
    others = alt.Chart(pd.DataFrame([tested[index] for index in sampled(len(tested), 2000)])).mark_point(
        size=26, strokeWidth=1.2, style="soft", filled=False
    )
    others = others.encode(
        x,
        y,
        tooltip=[
            alt.Tooltip("order:N", title="tested"),
            alt.Tooltip("round:Q"),
            alt.Tooltip("accuracy:Q", format=".2%"),
        ],
    )
    path = alt.Chart(pd.DataFrame(kept)).mark_line(interpolate="step-after", strokeWidth=1, opacity=0.5).encode(x, y)
    dots = alt.Chart(pd.DataFrame(kept)).mark_point(size=44, filled=True, opacity=1)
    dots = dots.encode(
        x,
        y,
        tooltip=[
            alt.Tooltip("order:N", title="kept"),
            alt.Tooltip("round:Q"),
            alt.Tooltip("tests:Q", title="testing rounds"),
        ],
    )
    layers = alt.layer(others, path, dots, width=WIDTH, height=max(90, 30 * len(names)))
    note = f"Filled: the order that a round kept; hollow: orders that it tested. {tests} testing rounds"
    note += f" in {len(kept)} rounds."
    return described(layers, f"Priority order of each round under {federation.label}, and the orders tested.", note)


def _rows(view: RunView, federation: FederationView, *columns: str) -> list[dict[str, Any]]:
    """Return some columns of a federation's rounds: of a long run each takes time."""
    frame = view.rounds
    mine = (frame["rule"] == federation.label) & (frame["seed"] == federation.seed) & (frame["round"] > 0)
    return frame.loc[mine, list(columns)].to_dict("records")  # type: ignore[return-value]


def classes(view: RunView, federation: FederationView) -> alt.VConcatChart | None:
    """Draw the F1 of every class over the rounds and the weights κ_c that an adaptive loss gives (paper 001)."""
    rows = _rows(view, federation, "round", "server_metrics", "loss")
    f1: dict[int, list[float]] = {}
    kappa: dict[int, list[float]] = {}
    for row in rows:
        metrics = json.loads(row["server_metrics"]) if isinstance(row["server_metrics"], str) else {}
        if "f1" in metrics:
            f1[int(row["round"])] = metrics["f1"]
        given = json.loads(row["loss"]).get("class_weights")
        if given:
            kappa[int(row["round"])] = given
    if not f1:
        return None
    panels = [_heat(f1, "F1", "F1 of each class on the server's rows", [0, 1], ".2f")]
    if kappa:
        panels.append(_heat(kappa, "κ", "Weight κ of each class in the clients' loss", None, ".2f"))
    note = f"{ROUNDS} rounds, evenly spaced, of {len(f1)}." if len(f1) > ROUNDS else ""
    if kappa:
        note = f"κ = 1/(F1 + ε) of the round before: a class that the model misses counts more. {note}".strip()
    chart = alt.vconcat(*panels).resolve_scale(color="independent")
    return described(chart, f"F1 and loss weight of every class over the rounds under {federation.label}.", note)


def _heat(values: dict[int, list[float]], name: str, title: str, domain: list[float] | None, form: str) -> alt.Chart:
    rounds = sorted(values)
    chosen = [rounds[index] for index in sampled(len(rounds), ROUNDS)]
    step = max(1, -(-(rounds[-1] - rounds[0] + 1) // len(chosen)))
    count = len(values[chosen[0]])
    rows = [
        {
            "class": str(label),
            "round": chosen,
            "start": [number - 0.5 for number in chosen],
            "end": [number + step - 0.5 for number in chosen],
            "value": [plain(float(values[number][label])) for number in chosen],
        }
        for label in range(count)
    ]
    scale = alt.Scale(domain=domain) if domain else alt.Scale(zero=True)
    return (
        alt.Chart(lists(rows), title=title)
        .transform_flatten(["round", "start", "end", "value"])
        .mark_rect()
        .encode(
            alt.X(
                "start:Q",
                title="round",
                scale=alt.Scale(domain=[chosen[0] - 0.5, chosen[-1] + step - 0.5], nice=False, zero=False),
                axis=alt.Axis(grid=False, tickMinStep=1),
            ),
            alt.X2("end:Q"),
            alt.Y("class:N", title="class", sort=[str(label) for label in range(count)]),
            alt.Color("value:Q", scale=scale, legend=alt.Legend(title=name, orient="right")),
            tooltip=[alt.Tooltip("class:N"), alt.Tooltip("round:Q"), alt.Tooltip("value:Q", title=name, format=form)],
        )
        .properties(width=WIDTH - 80, height=max(100, min(420, 16 * count)))
    )
