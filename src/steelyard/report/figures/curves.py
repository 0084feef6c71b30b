"""Figures over the rounds: scores, rounds to target, the weight of flawed clients, what adapters lost, F1 by class."""

from __future__ import annotations

import json
import math
from typing import Any, cast

import altair as alt
import numpy as np
import pandas as pd

from steelyard.base.errors import listed
from steelyard.base.measures import TASKS, estimate, measure_of
from steelyard.report.curves import OF_A_STEP
from steelyard.report.figures.look import (
    HEIGHT,
    POINTS,
    WIDTH,
    described,
    lists,
    round_axis,
    rule_colour,
    rule_dash,
    score_format,
    shown_rules,
)
from steelyard.report.view import Frame, RunView, plain, sampled

BANDS = 3
"""Rules whose intervals one figure shows at most."""


def accuracy(view: RunView) -> alt.LayerChart | None:
    """Draw the score over all clients' test samples, round by round, with its 95 % interval over seeds."""
    return _curves(view, view.rounds, "accuracy", view.measure, f"{view.measure} over all clients' test samples")


def server_score(view: RunView) -> alt.LayerChart | None:
    """Draw the score of the run's task on the server's reporting rows, which no client holds; more is better."""
    frame = view.rounds
    if frame["server_accuracy"].notna().any():
        return _curves(view, frame, "server_accuracy", "accuracy", "accuracy on the server's rows")
    tested = [json.loads(text) if isinstance(text, str) else {} for text in frame["server_metrics"]]
    task = next((task for task in TASKS.values() if any(task.figure in found for found in tested)), None)
    if task is None:
        return None
    sign = -1.0 if measure_of(task.figure).less_is_better else 1.0
    frame = frame.assign(server_score=[sign * found.get(task.figure, math.nan) for found in tested])
    return _curves(view, frame, "server_score", task.score, f"{task.score} on the server's rows")


def macro_f1(view: RunView) -> alt.LayerChart | None:
    """Draw the macro F1 on the server's reporting rows."""
    return _curves(view, view.rounds, "server_macro_f1", "macro F1", "macro F1 on the server's rows")


def over_time(view: RunView) -> alt.LayerChart | None:
    """Draw the score over all clients' test samples against the devices' clock, a line for each seed."""
    return _against(view, ["simulated"], "simulated seconds", "by the devices' clock", "s")


def over_bytes(view: RunView) -> alt.LayerChart | None:
    """Draw the score over all clients' test samples against what was sent both ways, a line for each seed."""
    return _against(view, ["up", "down"], "bytes sent to and from clients", "by what was sent to and from clients", "B")


def _against(view: RunView, columns: list[str], axis: str, by: str, unit: str) -> alt.LayerChart | None:
    """Draw the score against what rounds took, added up: the sum of columns of `rounds`, known in each."""
    frame = view.rounds
    frame = frame[frame[columns].notna().all(axis=1)]
    rows: list[dict[str, Any]] = []
    last: dict[str, float] = {}
    for (rule, seed), mine in frame.groupby(["rule", "seed"], sort=False):
        ends, tested = mine[columns].astype(float).sum(axis=1).cumsum(), mine["accuracy"].notna()
        chosen = sampled(int(tested.sum()), POINTS)
        scores = [float(value) for value in mine["accuracy"][tested].iloc[chosen]]
        if scores:
            taken = [float(value) for value in ends[tested].iloc[chosen]]
            rows.append({"rule": str(rule), "seed": int(seed), "taken": taken, "score": scores})
            last.setdefault(str(rule), scores[-1])
    if not rows:
        return None
    labels = [label for label in shown_rules(view, last) if label in last]
    form = score_format(view.measure)
    title = f"{view.measure} over all clients' test samples"
    line = (
        alt.Chart(lists([row for row in rows if row["rule"] in labels]))
        .transform_flatten(["taken", "score"])
        .mark_line(point=max(len(row["score"]) for row in rows) <= 3)
        .encode(
            alt.X("taken:Q", title=axis, axis=alt.Axis(format="~s")),
            alt.Y("score:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(format=form)),
            rule_colour(view.labels, labels),
            rule_dash(view.labels, labels),
            detail="seed:N",
            tooltip=[alt.Tooltip("rule:N"), alt.Tooltip("seed:N"), alt.Tooltip("taken:Q", title=axis, format=".4~s")],
        )
    )
    ends = ", ".join(f"{row['rule']} {row['taken'][-1]:.4g} {unit}" for row in rows if row["rule"] in labels)
    note = "A line for each seed." if len({row["seed"] for row in rows}) > 1 else ""
    return described(alt.layer(line, width=WIDTH, height=HEIGHT), f"{title}, {by}. Ends: {ends}.", note)


def _curves(view: RunView, frame: Frame, column: str, measure: str, title: str) -> alt.LayerChart | None:
    frame = frame[frame[column].notna() & (frame["round"] > 0)]
    if not len(frame):
        return None
    tables = {
        str(rule): rows.pivot_table(index="round", columns="seed", values=column, aggfunc="last")
        for rule, rows in frame.groupby("rule", sort=False)
    }
    last = {rule: float(np.nanmean(table.to_numpy()[-1])) for rule, table in tables.items()}
    labels = [label for label in shown_rules(view, last) if label in tables]
    seeds = max(table.shape[1] for table in tables.values())
    rows = [_curve_row(label, tables[label]) for label in labels]
    notes = [] if len(labels) == len(tables) else [f"{len(labels)} of {len(tables)} rules: the baseline and the best."]
    if any(len(table) > POINTS for table in tables.values()):
        notes.append(f"{POINTS} rounds, evenly spaced, of {max(map(len, tables.values()))}.")
    if seeds > 1:
        fewest = min(table.shape[1] for table in tables.values())
        count = f"{seeds}" if fewest == seeds else f"{fewest} to {seeds}"
        notes.append(f"Line: mean of {count} seeds; band: its 95 % interval.")
    banded = _banded(view, labels, last)
    if seeds > 1 and len(banded) < len(labels):
        notes.append(f"Bands of {listed(banded)} alone, the baseline and the best; the tables have all intervals.")
    form = score_format(measure)
    base = alt.Chart(lists(rows)).transform_flatten(["round", "score", "low", "high"])
    x = round_axis(min(row["round"][0] for row in rows), max(row["round"][-1] for row in rows))
    # An interval of few seeds may reach beyond what a score can be; the figure ends where scores do.
    limits = alt.Scale(zero=False, domain=_limits(rows, measure), clamp=True, nice=True)
    y = alt.Y("score:Q", title=title, scale=limits, axis=alt.Axis(format=form))
    hover = alt.selection_point(fields=["rule"], bind="legend", name="rules")
    line = base.mark_line(point=max(map(len, tables.values())) <= 3).encode(
        x,
        y,
        rule_colour(view.labels, labels),
        rule_dash(view.labels, labels),
        opacity=alt.condition(hover, alt.value(1), alt.value(0.12)),
        tooltip=[
            alt.Tooltip("rule:N"),
            alt.Tooltip("round:Q"),
            alt.Tooltip("score:Q", title=measure, format=f".2{form}" if form == "%" else ".4f"),
        ],
    )
    band = base.transform_filter(alt.FieldOneOfPredicate(field="rule", oneOf=banded)).mark_area(opacity=0.16)
    band = band.encode(
        x,
        alt.Y("low:Q", title=title, scale=limits),
        alt.Y2("high:Q"),
        rule_colour(view.labels, labels),
        opacity=alt.condition(hover, alt.value(0.16), alt.value(0.0)),
    )
    layers = alt.layer(*([band, line] if seeds > 1 else [line]), width=WIDTH, height=HEIGHT).add_params(hover)
    finals = ", ".join(f"{label} {last[label]:.3g}" for label in labels)
    return described(layers, f"{title}, by round. Last: {finals}.", " ".join(notes))


def _banded(view: RunView, labels: list[str], last: dict[str, float]) -> list[str]:
    """Return the rules whose intervals are drawn: bands of many rules over each other can be read by nobody."""
    if len(labels) <= BANDS:
        return labels
    others = sorted((label for label in labels if label != view.baseline), key=lambda label: -last[label])
    kept = {view.baseline, *others[: BANDS - 1]}
    return [label for label in labels if label in kept]


def _limits(rows: list[dict[str, Any]], measure: str) -> list[float]:
    """Return the least and the greatest value shown; within what the measure can be."""
    values = [value for row in rows for name in ("score", "low", "high") for value in row[name] if value is not None]
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.05, high + 0.05
    known = measure_of(measure)
    return [max(known.low, low), min(known.high, high)]


def _curve_row(label: str, table: Frame) -> dict[str, Any]:
    chosen = table.iloc[sampled(len(table), POINTS)]
    points = [estimate([float(v) for v in row if np.isfinite(v)]) for row in chosen.to_numpy(np.float64)]
    return {
        "rule": label,
        "round": [int(index) for index in chosen.index],
        "score": [plain(point.mean) for point in points],
        "low": [plain(point.low) for point in points],
        "high": [plain(point.high) for point in points],
    }


def flawed_weight(view: RunView) -> alt.LayerChart | None:
    """Draw the share of the weight that flawed clients got in each round, and the share that they had of the cohort."""
    rows: dict[str, list[Frame]] = {}
    cohort: list[Frame] = []
    for federation in view.federations:
        flawed = view.flaws(federation)
        frame = view.clients(federation) if flawed else None
        if frame is None or not len(frame):
            continue
        frame = frame[frame["weight"].notna()]
        if not len(frame):
            continue
        theirs = frame["client"].isin(list(flawed))
        total = frame.groupby("round")["weight"].sum()
        got = frame["weight"].where(theirs, 0.0).groupby(frame["round"]).sum()
        rows.setdefault(federation.label, []).append(got / total.where(total > 0))
        cohort.append(theirs.groupby(frame["round"]).mean())
    if not rows:
        return None
    labels = [label for label in view.labels if label in rows]
    curves = [_share_row(label, pd.concat(rows[label], axis=1).mean(axis=1)) for label in labels]
    alike = _share_row("their number", pd.concat(cohort, axis=1).mean(axis=1))
    x = round_axis(min(row["round"][0] for row in curves), max(row["round"][-1] for row in curves))
    y = alt.Y("share:Q", title="weight of flawed clients", axis=alt.Axis(format="%"), scale=alt.Scale(domainMin=0))
    hover = alt.selection_point(fields=["rule"], bind="legend", name="rules")
    tips = [alt.Tooltip("rule:N"), alt.Tooltip("round:Q"), alt.Tooltip("share:Q", format=".1%")]
    line = alt.Chart(lists(curves)).transform_flatten(["round", "share"]).mark_line()
    line = line.encode(
        x,
        y,
        rule_colour(view.labels, labels),
        rule_dash(view.labels, labels),
        opacity=alt.condition(hover, alt.value(1), alt.value(0.12)),
        tooltip=tips,
    )
    even = alt.Chart(lists([alike])).transform_flatten(["round", "share"]).mark_line(strokeDash=[3, 3], style="soft")
    even = even.encode(x, y, strokeWidth=alt.value(1.4))
    layers = alt.layer(even, line.add_params(hover), width=WIDTH, height=240)
    note = "Dotted: their share of the clients asked, which is what equal weights would give them."
    longest = max(len(some) for found in rows.values() for some in found)
    if longest > POINTS:
        note += f" Each point is the mean of {-(-longest // POINTS)} rounds."
    return described(layers, "Share of the weight that flawed clients got, by round.", note)


def _share_row(label: str, values: Frame) -> dict[str, Any]:
    width = -(-len(values) // POINTS) or 1
    groups = np.arange(len(values)) // width
    means = values.groupby(groups).mean()
    rounds = np.asarray(values.index)[::width]
    return {
        "rule": label,
        "round": [int(number) for number in rounds],
        "share": [plain(float(value)) for value in means],
    }


def targets(view: RunView) -> alt.FacetChart | None:
    """Draw how many rounds each rule needs until a share of the devices reach a target: steep and left is good."""
    rows = _target_rows(view)
    if not rows:
        return None
    known = [label for label in view.labels if any(row["rule"] == label for row in rows)]
    order = [_goal(target) for target in sorted({float(row["goal"]) for row in rows})]
    chart = (
        alt.Chart(pd.DataFrame(rows))
        .mark_line(point=alt.OverlayMarkDef(size=36))
        .encode(
            alt.X("rounds:Q", title="rounds needed", axis=alt.Axis(tickMinStep=1)),
            alt.Y("share:Q", title="share of devices", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
            rule_colour(view.labels, known),
            rule_dash(view.labels, known),
            order=alt.Order("share:Q"),
            tooltip=[
                alt.Tooltip("rule:N"),
                alt.Tooltip("share:Q", format=".0%", title="share of devices"),
                alt.Tooltip("rounds:Q", format=".1f", title="rounds needed"),
                alt.Tooltip("unreached:Q", title="seeds that did not reach it"),
            ],
        )
        .properties(width=WIDTH // 2 - 50, height=190)
        .facet(alt.Facet("target:N", sort=order, title=None))
        .properties(columns=2)
    )
    note = (
        "A rule that reaches a target in no seed has no point there; where some seeds do not, they count as the limit."
    )
    return described(chart, "Rounds needed until a share of the devices reach each target, by rule.", note)


def _goal(target: float) -> str:
    return f"until they reach {target:.0%}"


def _target_rows(view: RunView) -> list[dict[str, Any]]:
    """Return the rounds that each rule needs for each target and share; what no seed reached is left out."""
    rows: list[dict[str, Any]] = []
    for index, document in enumerate(view.documents):
        for section in document["rounds_to_target"] if document else ():
            base = section["rows"][0]
            for row in section["rows"]:
                for cell, first in zip(row["cells"], base["cells"], strict=True):
                    rounds = cell["mean"] if row is base else first["mean"] - cell["mean"]
                    if cell["unreached"] < len(cell["values"]):
                        rows.append(
                            {
                                "rule": view.label(index, row["rule"]),
                                "target": _goal(section["target"]),
                                "goal": section["target"],
                                "share": cell["share"],
                                "rounds": plain(float(rounds)),
                                "unreached": cell["unreached"],
                            }
                        )
    return rows


_WORDS = dict(zip(OF_A_STEP, ("weighing products (done)", "averaging A and B (not done)"), strict=True))


def lost(view: RunView) -> alt.LayerChart | None:
    """Draw what was lost of Σ wᵢBᵢAᵢ by cutting it to its rank, and what averaged factors would have lost."""
    found: dict[tuple[str, int], list[tuple[int, dict[str, float]]]] = {}
    for row in cast("list[dict[str, Any]]", view.rounds.to_dict("records")):
        text = row["server_metrics"]
        known: dict[str, Any] = json.loads(text) if isinstance(text, str) else {}
        if OF_A_STEP[0] in known:
            found.setdefault((str(row["rule"]), int(row["seed"])), []).append((int(row["round"]), known))
    rows: list[dict[str, Any]] = []
    for (rule, seed), mine in found.items():
        chosen = [mine[place] for place in sampled(len(mine), POINTS)]
        for figure, words in _WORDS.items():
            values = [known[figure] for _, known in chosen]
            given = {"rule": rule, "seed": seed, "lost by": words}
            rows.append({**given, "round": [round for round, _ in chosen], "lost": values})
    if not rows:
        return None
    line = (
        alt.Chart(lists(rows))
        .transform_flatten(["round", "lost"])
        .mark_line(point=max(len(row["round"]) for row in rows) <= 3)
        .encode(
            round_axis(min(row["round"][0] for row in rows), max(row["round"][-1] for row in rows)),
            alt.Y("lost:Q", title="lost of the adapters' weighted sum", axis=alt.Axis(format="%")),
            alt.Color("lost by:N"),
            alt.StrokeDash("rule:N"),
            detail="seed:N",
            tooltip=[alt.Tooltip("rule:N"), alt.Tooltip("round:Q"), alt.Tooltip("lost:Q", format=".2%")],
        )
    )
    ends = ", ".join(f"{row['rule']}, {row['lost by']}: {row['lost'][-1]:.2%}" for row in rows)
    chart = alt.layer(line, width=WIDTH, height=HEIGHT)
    return described(chart, f"What was lost of the weighted sum of the adapters, less is better. Last: {ends}.")


ROUNDS = 60
"""Rounds that a small figure shows at most."""
MOST = 12
"""Classes that are drawn; more are too small to read."""


def class_f1(view: RunView) -> alt.FacetChart | None:
    """Draw F1 of each class on the server's reporting rows, round by round, the mean of the seeds of each rule."""
    frame = view.rounds
    frame = frame[frame["server_metrics"].notna() & (frame["round"] > 0)]
    values: dict[tuple[str, int], list[list[float]]] = {}
    for rule, number, text in zip(frame["rule"], frame["round"], frame["server_metrics"], strict=True):
        metrics = json.loads(text)
        if "f1" in metrics:
            values.setdefault((str(rule), int(number)), []).append(metrics["f1"])
    if not values:
        return None
    known = [label for label in view.labels if any(rule == label for rule, _ in values)]
    rounds = sorted({number for _, number in values})
    shown = {rounds[index] for index in sampled(len(rounds), ROUNDS)}
    rows: list[dict[str, Any]] = []
    for (rule, number), seeds in values.items():
        if number in shown:
            means = np.mean(seeds, axis=0)[:MOST]
            rows += [
                {"rule": rule, "round": number, "class": f"class {label}", "f1": plain(float(mean))}
                for label, mean in enumerate(means)
            ]
    classes = len(next(iter(values.values()))[0])
    chart = (
        alt.Chart(pd.DataFrame(rows))
        .mark_line()
        .encode(
            alt.X("round:Q", title="round", axis=alt.Axis(tickMinStep=1, grid=False)),
            alt.Y("f1:Q", title="F1", scale=alt.Scale(domain=[0, 1])),
            rule_colour(view.labels, known),
            rule_dash(view.labels, known),
            tooltip=["rule:N", "round:Q", "class:N", alt.Tooltip("f1:Q", title="F1", format=".3f")],
        )
        .properties(width=(WIDTH - 120) // 5, height=90)
        .facet(
            alt.Facet("class:N", title=None, sort=[f"class {label}" for label in range(min(classes, MOST))]), columns=5
        )
    )
    note = f"The first {MOST} of {classes} classes." if classes > MOST else ""
    return described(chart, "F1 of each class on the server's rows over the rounds, by rule.", note)
