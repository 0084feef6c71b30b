"""What adapts between rounds: priority orders with their testing rounds, class weights beside the F1 of each class."""

from __future__ import annotations

import json
from typing import Any

import altair as alt
import pandas as pd

from steelyard.report.figures.shared import WIDTH, described, lists, round_axis
from steelyard.report.view import FederationView, RunView, plain, sampled

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
