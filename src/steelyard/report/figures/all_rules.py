"""Figures of all rules together: scores over rounds, time and bytes, targets, devices, flawed clients, classes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from steelyard.base.errors import listed
from steelyard.base.measures import TASKS, estimate, measure_of
from steelyard.report.curves import OF_A_STEP
from steelyard.report.figures.look import (
    POINTS,
    WIDTH,
    Chart,
    Row,
    by_rule,
    cells,
    described,
    figure,
    line_chart,
    numbers,
    round_axis,
    score_format,
    shown_rules,
    unfolded,
)
from steelyard.report.view import Frame, RunView, sampled

BANDS = 3
"""Rules whose intervals one figure shows at most."""
DRIFTING = 40
"""Columns that the drift between sites is drawn of."""
_NO_F1 = "The server of this run reports no F1 of each class."


@figure(
    "view",
    "Score, round by round",
    "Over the test samples of all clients.",
    "No round has been tested on clients.",
)
def accuracy(view: RunView) -> Chart | None:
    """Draw the score over all clients' test samples, round by round, with its 95 % interval over seeds."""
    return _scores(view, view.rounds, "accuracy", view.measure, _everybody(view))


@figure(
    "view",
    "Score against simulated time",
    "Over the test samples of all clients, by simulated time.",
    "This run simulates no time; a [clock] section does.",
)
def time(view: RunView) -> Chart | None:
    """Draw the score over all clients' test samples against simulated time."""
    return _against(view, ["simulated"], "simulated seconds")


@figure(
    "view",
    "Score against what was sent",
    "Over the test samples of all clients; models and vectors to and from those that trained, without tests.",
    "This run did not record how much was sent.",
)
def bytes(view: RunView) -> Chart | None:
    """Draw the score over all clients' test samples against what was sent both ways."""
    return _against(view, ["up", "down"], "bytes sent to and from clients")


@figure(
    "view",
    "On the server's test set",
    "The score on samples that only the server holds.",
    "The server of this run has no test set; partition.server_report = 'apart' gives it one.",
)
def server(view: RunView) -> Chart | None:
    """Draw the score of the run's task on the server's reporting rows, which no client holds; more is better."""
    frame = view.rounds
    if frame["server_accuracy"].notna().any():
        return _scores(view, frame, "server_accuracy", "accuracy", "accuracy on the server's test set")
    tested = [_metrics(text) for text in frame["server_metrics"]]
    task = next((task for task in TASKS.values() if any(task.figure in found for found in tested)), None)
    if task is None:
        return None
    sign = -1.0 if measure_of(task.figure).less_is_better else 1.0
    frame = frame.assign(server_score=[sign * found.get(task.figure, math.nan) for found in tested])
    return _scores(view, frame, "server_score", task.score, f"{task.score} on the server's test set")


@figure("view", "Macro F1 on the server's test set", "The mean over the classes, rare ones included.", _NO_F1)
def macro_f1(view: RunView) -> Chart | None:
    """Draw the macro F1 on the server's reporting rows."""
    return _scores(view, view.rounds, "server_macro_f1", "macro F1", "macro F1 on the server's test set")


def _everybody(view: RunView) -> str:
    return f"{view.measure} over all clients' test samples"


def _metrics(text: object) -> dict[str, Any]:
    return json.loads(text) if isinstance(text, str) else {}


def _scores(view: RunView, frame: Frame, column: str, measure: str, title: str, taken: str = "") -> Chart | None:
    """Draw a column of `rounds`, the mean of the seeds of each rule, with its interval.

    It is drawn by round, or where that has a title against the column `taken`, the mean of the seeds as well.
    """
    frame = frame[frame[column].notna() & (frame["round"] > 0)]
    if not len(frame):
        return None
    tables = {
        str(rule): rows.pivot_table(index="round", columns="seed", values=column, aggfunc="last")
        for rule, rows in frame.groupby("rule", sort=False)
    }
    places = frame.groupby(["rule", "round"])["taken"].mean() if taken else None
    last = {rule: float(np.nanmean(table.to_numpy()[-1])) for rule, table in tables.items()}
    labels = shown_rules(view, last)
    rows = [_score_row(label, tables[label], places) for label in labels]
    seeds, longest = [table.shape[1] for table in tables.values()], max(map(len, tables.values()))
    banded = _banded(view, labels, last) if max(seeds) > 1 else []
    notes = [f"{len(labels)} of {len(tables)} rules: the baseline and the best."] if len(labels) < len(tables) else []
    if longest > POINTS:
        notes.append(f"{POINTS} rounds, evenly spaced, of {longest}.")
    if banded:
        count = f"{max(seeds)}" if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)}"
        notes.append(f"Line: mean of {count} seeds; band: its 95% interval.")
        if len(banded) < len(labels):
            notes.append(f"Bands of {listed(banded)} alone, the baseline and the best; the tables have all intervals.")
    form = score_format(measure)
    # An interval of few seeds may reach beyond what a score can be; the figure ends where scores do.
    limits = alt.Scale(zero=False, domain=_limits(rows, measure), clamp=True, nice=True)
    chart = line_chart(
        rows,
        alt.X("taken:Q", title=taken, axis=alt.Axis(format="~s")) if taken else _rounds(rows),
        alt.Y("score:Q", title=title, scale=limits, axis=alt.Axis(format=form)),
        *by_rule(view.labels, labels),
        tooltip=[
            "rule:N",
            "round:Q",
            *([alt.Tooltip("taken:Q", title=taken, format=".4~s")] if taken else []),
            alt.Tooltip("score:Q", title=measure, format=f".2{form}" if form == "%" else ".4f"),
        ],
        banded=banded,
    )
    finals = ", ".join(f"{label} {last[label]:.3g}" for label in labels)
    return described(chart, f"{title}, by {taken or 'round'}. Last: {finals}.", *notes)


def _rounds(rows: Sequence[Row]) -> alt.X:
    return round_axis(min(row["round"][0] for row in rows), max(row["round"][-1] for row in rows))


def _banded(view: RunView, labels: list[str], last: Mapping[str, float]) -> list[str]:
    """Return the rules whose intervals are drawn: bands of many rules over each other can be read by nobody."""
    if len(labels) <= BANDS:
        return labels
    others = sorted((label for label in labels if label != view.baseline), key=lambda label: -last[label])
    kept = {view.baseline, *others[: BANDS - 1]}
    return [label for label in labels if label in kept]


def _limits(rows: Sequence[Row], measure: str) -> list[float]:
    """Return the least and the greatest value shown; within what the measure can be."""
    values = [value for row in rows for name in ("score", "low", "high") for value in row[name] if value is not None]
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.05, high + 0.05
    known = measure_of(measure)
    return [max(known.low, low), min(known.high, high)]


def _score_row(label: str, table: Frame, places: Frame | None) -> Row:
    chosen = table.iloc[sampled(len(table), POINTS)]
    points = [estimate([float(v) for v in row if np.isfinite(v)]) for row in chosen.to_numpy(np.float64)]
    return {
        "rule": label,
        "round": [int(index) for index in chosen.index],
        **({} if places is None else {"taken": numbers(places[label].loc[chosen.index])}),
        "score": numbers(point.mean for point in points),
        "low": numbers(point.low for point in points),
        "high": numbers(point.high for point in points),
    }


def _against(view: RunView, columns: list[str], axis: str) -> Chart | None:
    """Draw the score against what rounds took, added up: the sum of columns of `rounds`, known in each."""
    frame = view.rounds
    frame = frame[frame[columns].notna().all(axis=1)]
    taken = frame[columns].astype(float).sum(axis=1).groupby([frame["rule"], frame["seed"]], sort=False).cumsum()
    return _scores(view, frame.assign(taken=taken), "accuracy", view.measure, _everybody(view), axis)


@figure(
    "view",
    "F1 of each class, rule by rule",
    "On the server's test set; a class that a rule misses stays low.",
    _NO_F1,
)
def class_f1(view: RunView) -> Chart | None:
    """Draw F1 of each class on the server's test set, round by round, the mean of the seeds of each rule."""
    most, longest = 12, 60  # more classes are too small to read, and a small chart needs no more rounds
    seeds: dict[str, dict[int, list[list[float]]]] = {}
    frame = view.rounds[view.rounds["round"] > 0]
    for rule, number, text in zip(frame["rule"], frame["round"], frame["server_metrics"], strict=True):
        if "f1" in (found := _metrics(text)):
            seeds.setdefault(str(rule), {}).setdefault(int(number), []).append(found["f1"])
    if not seeds:
        return None
    rounds = sorted({number for found in seeds.values() for number in found})
    shown = {rounds[index] for index in sampled(len(rounds), longest)}
    rows: list[Row] = []
    for rule, found in seeds.items():
        means = {number: np.mean(f1, axis=0)[:most] for number, f1 in found.items() if number in shown}
        for label, f1 in enumerate(np.transpose([*means.values()])):
            rows.append({"rule": rule, "class": f"class {label}", "round": [*means], "f1": numbers(f1)})
    classes = max(len(f1[0]) for found in seeds.values() for f1 in found.values())
    chart = line_chart(
        rows,
        alt.X("round:Q", title="round", axis=alt.Axis(tickMinStep=1, grid=False)),
        alt.Y("f1:Q", title="F1", scale=alt.Scale(domain=[0, 1])),
        *by_rule(view.labels, [label for label in view.labels if label in seeds]),
        tooltip=["rule:N", "round:Q", "class:N", alt.Tooltip("f1:Q", title="F1", format=".3f")],
        facet=alt.Facet("class:N", title=None, sort=[f"class {label}" for label in range(min(classes, most))]),
        width=(WIDTH - 120) // 5,
        height=90,
    )
    note = f"The first {most} of {classes} classes." if classes > most else ""
    return described(chart, "F1 of each class on the server's test set over the rounds, by rule.", note)


@figure(
    "view",
    "What combining the adapters lost",
    "Of the weighted sum of their products, less is better.",
    "No rule of this run combines low-rank adapters as products; algorithm.name = 'flexlora' does.",
)
def adapters(view: RunView) -> Chart | None:
    """Draw what was lost of Σ wᵢBᵢAᵢ by cutting it to its rank, and what averaged factors would have lost."""
    rows: list[Row] = []
    for (rule, seed), mine in view.rounds.groupby(["rule", "seed"], sort=False):
        tested = zip(mine["round"], map(_metrics, mine["server_metrics"]), strict=True)
        steps = [(int(number), found) for number, found in tested if OF_A_STEP[0] in found]
        chosen = [steps[place] for place in sampled(len(steps), POINTS)]
        for name, words in zip(OF_A_STEP, ("weighing products (done)", "averaging A and B (not done)"), strict=True):
            if chosen:
                lost = [found[name] for _, found in chosen]
                whose = {"rule": str(rule), "seed": int(seed), "lost by": words}
                rows.append({**whose, "round": [number for number, _ in chosen], "lost": lost})
    if not rows:
        return None
    chart = line_chart(
        rows,
        _rounds(rows),
        alt.Y("lost:Q", title="lost of the adapters' weighted sum", axis=alt.Axis(format="%")),
        alt.Color("lost by:N"),
        alt.StrokeDash("rule:N"),
        alt.Detail("seed:N"),
        tooltip=["rule:N", "round:Q", alt.Tooltip("lost:Q", format=".2%")],
    )
    ends = ", ".join(f"{row['rule']}, {row['lost by']}: {row['lost'][-1]:.2%}" for row in rows)
    return described(chart, f"What was lost of the weighted sum of the adapters, less is better. Last: {ends}.")


@figure(
    "view",
    "Weight of faulty clients",
    "The share of each round's weight that they got.",
    "No client of this run is faulty; a [[flaws]] section simulates faults.",
)
def flawed(view: RunView) -> Chart | None:
    """Draw the share of the weight that flawed clients got in each round, and the share that they had of the cohort."""
    shares: dict[str, list[Frame]] = {}
    cohort: list[Frame] = []
    for federation in view.federations:
        found = view.flaws(federation)
        frame = view.clients(federation) if found else None
        if frame is None or not frame["weight"].notna().any():
            continue
        frame = frame[frame["weight"].notna()]
        theirs = frame["client"].isin(list(found))
        total = frame.groupby("round")["weight"].sum()
        got = frame["weight"].where(theirs, 0.0).groupby(frame["round"]).sum()
        shares.setdefault(federation.label, []).append(got / total.where(total > 0))
        cohort.append(theirs.groupby(frame["round"]).mean())
    if not shares:
        return None
    labels = [label for label in view.labels if label in shares]
    rows = [_share_row(label, shares[label]) for label in labels]
    x = _rounds(rows)
    y = alt.Y("share:Q", title="weight of faulty clients", axis=alt.Axis(format="%"), scale=alt.Scale(domainMin=0))
    tips = ["rule:N", "round:Q", alt.Tooltip("share:Q", format=".1%")]
    even = unfolded([_share_row("their number", cohort)]).mark_line(strokeDash=[3, 3], style="soft")
    even = even.encode(x, y, strokeWidth=alt.value(1.4))
    chart = alt.layer(even, line_chart(rows, x, y, *by_rule(view.labels, labels), tooltip=tips, height=240))
    note = "Dotted: their share of the selected clients, which equal weights would give them."
    longest = max(len(some) for found in shares.values() for some in found)
    binned = f"Each point is the mean of {-(-longest // POINTS)} rounds." if longest > POINTS else ""
    return described(chart, "Share of the weight that faulty clients got, by round.", note, binned)


def _share_row(label: str, seeds: Sequence[Frame]) -> Row:
    """Return the mean of the seeds round by round, or of as many rounds as one point stands for."""
    values: Frame = pd.concat(seeds, axis=1).mean(axis=1)
    width = -(-len(values) // POINTS) or 1
    means = values.groupby(np.arange(len(values)) // width).mean()
    return {"rule": label, "round": [int(number) for number in values.index[::width]], "share": numbers(means)}


@figure(
    "view",
    "Columns that drift between sites",
    "How differently a column is spread at a site than at all others; from 0.25 on it drifts.",
    "The data are not a table of several sites, or their columns were not compared.",
)
def drift(view: RunView) -> Chart | None:
    """Draw the population stability index of each column at each site, the columns that drift most first."""
    found = next((history.facts.drift for history in view.histories if history.facts.drift), None)
    if found is None:
        return None
    most: dict[str, float] = {}
    for columns in found.values():
        for name, index in columns.items():
            most[name] = max(index, most.get(name, 0.0))
    order = sorted(most, key=lambda name: -most[name])[:DRIFTING]
    rows: list[Row] = [
        {"site": site, "column": order, "index": numbers(columns.get(name, math.nan) for name in order)}
        for site, columns in found.items()
    ]
    drawn = cells(
        rows,
        "datum.index != null",
        alt.X("site:N", title=None),
        alt.Y("column:N", title=None, sort=order),
        alt.Color("index:Q", title="drift", scale=alt.Scale(domain=[0, 1], clamp=True)),
        tooltip=["site:N", "column:N", alt.Tooltip("index:Q", format=".2f")],
    ).properties(width=WIDTH, height=max(60, 18 * len(order)))
    more = f"{DRIFTING} of {len(most)} columns, those that drift most." if len(most) > DRIFTING else ""
    return described(drawn, f"Drift of columns at {len(found)} sites; most: {order[0]} {most[order[0]]:.2f}.", more)


@figure(
    "view",
    "Rounds to target",
    "Further left is faster, further up reaches more clients.",
    "No rule reached a target; rounds.targets names others.",
)
def targets(view: RunView) -> Chart | None:
    """Draw how many rounds each rule needs until a share of the devices reach a target: steep and left is good."""
    rows = _target_rows(view)
    if not rows:
        return None
    known = {row["rule"] for row in rows}
    order = [_goal(target) for target in sorted({row["goal"] for row in rows})]
    chart = line_chart(
        rows,
        alt.X("rounds:Q", title="rounds needed", axis=alt.Axis(tickMinStep=1)),
        alt.Y("share:Q", title="share of clients", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
        *by_rule(view.labels, [label for label in view.labels if label in known]),
        alt.Order("share:Q"),
        tooltip=[
            "rule:N",
            alt.Tooltip("share:Q", format=".0%", title="share of clients"),
            alt.Tooltip("rounds:Q", format=".1f", title="rounds needed"),
            alt.Tooltip("unreached:Q", title="seeds that did not reach it"),
        ],
        facet=alt.Facet("target:N", sort=order, title=None),
        points=True,
        width=WIDTH // 2 - 50,
        height=190,
    )
    note = (
        "A rule that reaches a target in no seed has no point there; where some seeds do not, they count as the limit."
    )
    return described(chart, "Rounds needed until a share of the clients reach each target, by rule.", note)


def _goal(target: float) -> str:
    return f"until they reach {target:.0%}"


def _target_rows(view: RunView) -> list[Row]:
    """Return the rounds that each rule needs for each target and share; what no seed reached is left out."""
    rows: list[Row] = []
    for index, document in enumerate(view.documents):
        for section in document.rounds_to_target:
            for row in section.rows:
                reached = [cell for cell in row.cells if cell.unreached < len(cell.values)]
                counted = [[document.limit if at is None else at for at in cell.rounds] for cell in reached]
                if reached:
                    rows.append(
                        {
                            "rule": view.label(index, row.rule),
                            "target": _goal(section.target),
                            "goal": section.target,
                            "share": [cell.share for cell in reached],
                            "rounds": numbers(float(np.mean(rounds)) for rounds in counted),
                            "unreached": [cell.unreached for cell in reached],
                        }
                    )
    return rows


@figure(
    "view",
    "Score of each client",
    "On its own test samples, after the last round.",
    "No client has tested a model yet.",
)
def devices(view: RunView) -> Chart | None:
    """Draw the scores of the devices after the last round: dots, a bar for the middle half, a median."""
    most = 120  # devices drawn one by one for each rule
    bars: list[Row] = []
    dots: list[Row] = []
    all_drawn = True
    for label in view.labels:
        frames = [view.evaluations(one) for one in view.federations if one.label == label]
        frames = [frame[frame["round"] == frame["round"].to_numpy().max()] for frame in frames if len(frame)]
        if not frames:
            continue
        scores = pd.concat(frames, ignore_index=True).sort_values("score", kind="stable")
        marks = np.percentile(scores["score"].to_numpy(np.float64), [10, 25, 50, 75, 90])
        bars.append({"rule": label, **dict(zip(("p10", "p25", "p50", "p75", "p90"), marks.tolist(), strict=True))})
        chosen = scores.iloc[sampled(len(scores), most)]
        all_drawn = all_drawn and len(chosen) == len(scores)
        names = [str(client) for client in chosen["client"]]
        dots.append({"rule": label, "score": chosen["score"].tolist(), "client": names})
    if not bars:
        return None
    labels = [bar["rule"] for bar in bars]
    form = score_format(view.measure)
    digits = f".1{form}" if form == "%" else ".4f"
    title = f"{view.measure} of a client"
    y = alt.Y("rule:N", sort=labels, title=None, axis=alt.Axis(labelLimit=150, grid=False))
    colour = alt.Color("rule:N", scale=alt.Scale(domain=view.labels), legend=None)
    marked = {"p10": "10th percentile", "p50": "median", "p90": "90th percentile"}
    tips = [
        "rule:N",
        *(alt.Tooltip(f"{at}:Q", title=words, format=digits) for at, words in marked.items()),
    ]
    base = alt.Chart(pd.DataFrame(bars)).encode(y, colour)
    scale = alt.Scale(zero=False)
    whisker = base.mark_rule(strokeWidth=1.5).encode(
        alt.X("p10:Q", title=title, axis=alt.Axis(format=form), scale=scale), alt.X2("p90:Q")
    )
    box = base.mark_bar(height=16, opacity=0.3).encode(alt.X("p25:Q", title=title), alt.X2("p75:Q"), tooltip=tips)
    middle = base.mark_tick(thickness=3, size=22).encode(alt.X("p50:Q", title=title), tooltip=tips)
    points = unfolded(dots).transform_calculate(shift="(random() - 0.5) * 0.8")
    points = points.mark_point(filled=True, size=16, opacity=0.45).encode(
        alt.X("score:Q", title=title),
        y,
        alt.YOffset("shift:Q", scale=alt.Scale(domain=[-0.5, 0.5])),
        colour,
        tooltip=[
            "client:N",
            alt.Tooltip("score:Q", title=view.measure, format=digits),
            "rule:N",
        ],
    )
    note = "Line: 10th to 90th percentile; bar: middle half; tick: median; dots: clients"
    note += "." if all_drawn else f", {most} for each rule, evenly spaced."
    chart = alt.layer(whisker, box, middle, points, width=WIDTH, height=max(90, 44 * len(labels)))
    return described(chart, "Distribution of the clients' own scores after the last round, by rule.", note)
