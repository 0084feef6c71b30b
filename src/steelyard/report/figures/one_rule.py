"""Figures of one rule: who counted, when and why, what adapts between rounds, the split; and of one of its clients."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence, Sized
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from steelyard.contributions.document import stored_contributions
from steelyard.report.figures.look import (
    WIDTH,
    Chart,
    Row,
    cells,
    described,
    figure,
    numbers,
    round_axis,
    score_format,
    unfolded,
)
from steelyard.report.rendering import Split
from steelyard.report.view import FederationView, Frame, RunView, sampled

CLIENTS, COLUMNS = 60, 120
"""Rows and columns of cells at most: a browser draws so many in a moment."""
DOTS = 900
"""Points of criteria against weight at most, for each rule."""
MARK = "⚑ "
"""Stands before the names of flawed clients, so that colour is not the only sign."""
FLAWED, SOUND = "faulty", "not faulty"
_NAMES = alt.Axis(ticks=False, domain=False)


def _marked(clients: Sequence[str], flawed: Collection[str]) -> list[str]:
    return [f"{MARK if client in flawed else ''}{client}" for client in clients]


def _mark_note(flawed: object) -> str:
    return f"{MARK.strip()} marks faulty clients." if flawed else ""


def _left_out(kept: Sized, every: Sized, which: str = "") -> str:
    return f"{len(kept)} of {len(every)} clients{which}." if len(kept) < len(every) else ""


@figure(
    "federation",
    "Weight of each client",
    "In each round; no colour: the client was not selected.",
    "No client was weighted under this rule, or all had equal weights in every round.",
)
def weights(view: RunView, part: FederationView) -> Chart | None:
    """Draw how much each client weighed in each round of one rule; a cell without colour: it was not asked."""
    clients, rounds, found = part.history.weights(part.rule, part.seed)
    table: Frame = pd.DataFrame(found.T, index=list(clients), columns=list(rounds)).dropna(how="all")
    if not table.size or _alike(table):
        return None
    flawed = view.flaws(part)
    kept = interesting(table.sum(axis=1), flawed, CLIENTS)
    grid, width = _binned(table.loc[kept])
    # Rounds between two that were recorded: 1 unless the store keeps clients at times only.
    steps = np.diff(np.asarray(grid.columns, dtype=np.int64))
    gap = int(steps.min()) if len(steps) and width == 1 else 1
    names = _marked(kept, flawed)
    ends = _ends([int(column) for column in grid.columns], gap - 0.5, width - 0.5)
    rows = [
        {"client": name, "flaw": ", ".join(flawed.get(client, ())), **ends, "weight": numbers(values)}
        for name, client, values in zip(names, kept, grid.to_numpy(np.float64), strict=True)
    ]
    drawn = cells(
        rows,
        "isValid(datum.weight)",
        *_span(ends),
        alt.Y("client:N", sort=names, title=None, axis=_NAMES),
        alt.Color(
            "weight:Q",
            scale=alt.Scale(domainMin=0),
            legend=alt.Legend(title="weight", format=".2~%", gradientLength=160, titleOrient="left"),
        ),
        tooltip=[
            "client:N",
            alt.Tooltip("round:Q", title="round" if width == 1 else "from round"),
            alt.Tooltip("weight:Q", format=".1%"),
            "flaw:N",
        ],
    )
    which = f": {'faulty ones, ' if flawed else ''}the heaviest and the lightest"
    return described(
        alt.layer(drawn, width=WIDTH, height=max(120, (16 if len(names) <= 40 else 13) * len(names))),
        f"Weight of each client in each round under {part.label}.",
        _left_out(kept, table, which),
        f"Each column is the mean of {width} rounds." if width > 1 else "",
        f"Recorded every {gap} rounds: a cell stands for the round at its right edge." if gap > 1 else "",
        _mark_note(flawed),
    )


def interesting(totals: Frame, flawed: Collection[str], most: int) -> list[str]:
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


def _binned(table: Frame) -> tuple[Frame, int]:
    """Return the table with at most COLUMNS columns, each the mean of so many rounds that follow each other."""
    rounds = np.asarray(table.columns, dtype=np.int64)
    width = max(1, -(-int(rounds[-1] - rounds[0] + 1) // COLUMNS))
    if width == 1:
        return table, 1
    start = rounds[0] + (rounds - rounds[0]) // width * width
    return table.T.groupby(start).mean().T, width


def _ends(rounds: list[int], before: float, after: float) -> dict[str, list[Any]]:
    """Return where the cell of each round begins and ends."""
    starts, ends = [number - before for number in rounds], [number + after for number in rounds]
    return {"round": rounds, "start": starts, "end": ends}


def _span(ends: Mapping[str, list[Any]]) -> tuple[alt.X, alt.X2]:
    scale = alt.Scale(domain=[ends["start"][0], ends["end"][-1]], nice=False, zero=False)
    return alt.X("start:Q", title="round", scale=scale, axis=alt.Axis(grid=False, tickMinStep=1)), alt.X2("end:Q")


@figure(
    "federation",
    "What each client added",
    "By how much it made the model better, with a 95% interval; left of the line it made it worse.",
    "It was not measured; [contributions], or `steelyard contributions` afterwards, finds it out.",
)
def contributions(view: RunView, part: FederationView) -> Chart | None:
    """Draw what each client added over all rounds, with its 95 % interval."""
    document = stored_contributions(part.history.folder, part.rule)
    if isinstance(document, str):
        return None
    flawed = view.flaws(part)
    clients = document["clients"]
    kept = clients if len(clients) <= CLIENTS else [*clients[: CLIENTS // 2], *clients[-CLIENTS // 2 :]]
    names = _marked([row["client"] for row in kept], flawed)
    rows = [
        {"client": name, "added": row["value"], "low": row["low"], "high": row["high"], "verdict": row["verdict"]}
        for name, row in zip(names, kept, strict=True)
    ]
    verdicts = ["harms", "not clear", "helps"]
    scale = alt.Scale(domain=[*verdicts, *sorted({row["verdict"] for row in kept} - set(verdicts))])
    tips = ["client:N", *(alt.Tooltip(f"{name}:Q", format=".4~g") for name in ("added", "low", "high"))]
    title = f"added: {document['unit']}"
    base = alt.Chart(pd.DataFrame(rows)).encode(
        alt.Y("client:N", sort=names, title="client", axis=_NAMES),
        alt.Color("verdict:N", scale=scale, legend=alt.Legend(title=None)),
        tooltip=tips,
    )
    ends = base.mark_rule(strokeWidth=2).encode(alt.X("low:Q", title=title), alt.X2("high:Q"))
    points = base.mark_point(filled=True, size=60, opacity=1).encode(
        alt.X("added:Q", title=title), alt.Shape("verdict:N", scale=scale, legend=None)
    )
    zero = alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(strokeDash=[4, 3]).encode(alt.X("zero:Q", title=title))
    return described(
        alt.layer(zero, ends, points, width=WIDTH - 160, height=max(80, 18 * len(names))),
        f"What each client added under {part.label}, {document['source']}.",
        _left_out(kept, clients),
        _mark_note(flawed),
        *document["notes"],
    )


@figure(
    "federation",
    "Criteria and weights",
    "Each criterion, as normalised over the cohort, against the weight of the update.",
    "No criterion was measured under this rule.",
)
def criteria(view: RunView, part: FederationView) -> Chart | None:
    """Draw each criterion of a rule against the weight that it led to: which of them decided."""
    frame = view.clients(part)
    names = [name for name in part.criteria if f"normalised_{name}" in frame]
    frame = frame[frame["weight"].notna()]
    if not len(frame) or not names:
        return None
    shown = frame.iloc[sampled(len(frame), max(50, DOTS // len(names)))]
    flawed = view.flaws(part)
    common = {
        "weight": numbers(shown["weight"]),
        "client": [str(client) for client in shown["client"]],
        "round": [int(number) for number in shown["round"]],
        "kind": [FLAWED if client in flawed else SOUND for client in shown["client"]],
    }
    rows = [
        {
            "criterion": name,
            "value": numbers(shown[f"normalised_{name}"]),
            "raw": numbers(shown[f"raw_{name}"]),
            **common,
        }
        for name in names
    ]
    shape = alt.Scale(domain=[SOUND, FLAWED], range=["circle", "triangle-up"]) if flawed else alt.Scale(domain=[SOUND])
    chart = (
        unfolded(rows)
        .mark_point(filled=True, size=34, opacity=0.55)
        .encode(
            alt.X("value:Q", title="criterion, as normalised", scale=alt.Scale(zero=True)),
            alt.Y("weight:Q", title="weight", axis=alt.Axis(format="%")),
            _soundness(flawed),
            alt.Shape("kind:N", scale=shape, legend=alt.Legend() if flawed else None),
            tooltip=[
                "client:N",
                "round:Q",
                alt.Tooltip("raw:Q", title="measured", format=".4~g"),
                alt.Tooltip("value:Q", title="normalised", format=".4~g"),
                alt.Tooltip("weight:Q", format=".2%"),
            ],
        )
        .properties(width=WIDTH // 3 - 40, height=180)
        .facet(alt.Facet("criterion:N", sort=names, title=None), columns=3)
        .resolve_scale(x="independent")
    )
    note = "" if len(shown) == len(frame) else f"{len(shown)} of {len(frame)} updates, evenly spaced."
    return described(chart, f"Each criterion of {part.label} against the weight of the update.", note)


def _soundness(flawed: object) -> alt.Color:
    """Colour flawed clients, where there are any."""
    kinds = {SOUND: "#0f7fc0", FLAWED: "#d9620f"} if flawed else {SOUND: "#0f7fc0"}
    scale = alt.Scale(domain=list(kinds), range=list(kinds.values()))
    return alt.Color("kind:N", scale=scale, legend=alt.Legend() if flawed else None)


@figure(
    "federation",
    "Weights between clients",
    "How much of each other's models each client combines into its own; the mean over all rounds.",
    "Under this rule clients do not weight each other; under fedfomo they do.",
)
def listening(view: RunView, part: FederationView) -> Chart | None:
    """Draw the mean weight over all rounds that each client (row) gave each client (column) of its cohorts."""
    frame = part.history.listening
    frame = frame[(frame["rule"] == part.rule) & (frame["seed"] == part.seed)]
    if not len(frame):
        return None
    table = frame.pivot_table(index="client", columns="hears", values="weight", aggfunc="mean")
    flawed = view.flaws(part)
    kept = interesting(table.sum(axis=0), flawed, CLIENTS)
    names = _marked(kept, flawed)
    grid = table.reindex(index=kept, columns=kept).to_numpy(np.float64)
    drawn = cells(
        [{"client": name, "hears": names, "weight": numbers(row)} for name, row in zip(names, grid, strict=True)],
        "isValid(datum.weight)",
        alt.X("hears:N", sort=names, title="combines the model of", axis=_NAMES),
        alt.Y("client:N", sort=names, title="client", axis=_NAMES),
        alt.Color("weight:Q", scale=alt.Scale(domainMin=0), legend=alt.Legend(title="weight", format=".2~%")),
        tooltip=[
            "client:N",
            alt.Tooltip("hears:N", title="combines the model of"),
            alt.Tooltip("weight:Q", format=".1%"),
        ],
    )
    side = max(160, min(WIDTH - 160, 16 * len(names)))
    return described(
        drawn.properties(width=side, height=side),
        f"How much weight each client gave each other under {part.label}.",
        _left_out(kept, table),
        _mark_note(flawed),
    )


# What adapts between rounds: priority orders, class weights beside the F1 of each class.


@figure(
    "federation",
    "Priority orders",
    "Which order each round kept, and which it tested.",
    "This rule keeps its order; choose one that adjusts it, or run steelyard compare with --rules online.",
)
def orders(view: RunView, part: FederationView) -> Chart | None:
    """Draw which priority order each round kept, and which others it tested (paper 003's testing rounds)."""
    rows = _rounds(view, part, "round", "priority", "tried", "tests")
    tried = [json.loads(row["tried"]) for row in rows]
    if not any(len(entry) > 1 for entry in tried):
        return None
    kept = [{"round": int(row["round"]), "order": str(row["priority"]), "tests": int(row["tests"])} for row in rows]
    tested = [
        {"round": row["round"], "order": str(order), "accuracy": float(accuracy), "what": "tested"}
        for row, entries in zip(kept, tried, strict=True)
        for order, accuracy in entries[1:]
        if accuracy is not None
    ]
    seen, rounds = [str(row["priority"]) for row in rows], [int(row["round"]) for row in rows]
    names = sorted({*seen, *(str(entry["order"]) for entry in tested)}, key=lambda order: (-seen.count(order), order))
    x = round_axis(rounds[0] - 0.5, rounds[-1] + 0.5)
    axis = alt.Axis(grid=True, labelLimit=180)
    y = alt.Y("order:N", sort=names, title=None, scale=alt.Scale(domain=names), axis=axis)
    shown = pd.DataFrame([tested[index] for index in sampled(len(tested), 2000)])
    others = alt.Chart(shown).mark_point(size=26, strokeWidth=1.2, style="soft", filled=False)
    tips = [alt.Tooltip("order:N", title="tested"), "round:Q", alt.Tooltip("accuracy:Q", format=".2%")]
    base = alt.Chart(pd.DataFrame(kept)).encode(x, y)
    path = base.mark_line(interpolate="step-after", strokeWidth=1, opacity=0.5)
    dots = base.mark_point(size=44, filled=True, opacity=1).encode(
        tooltip=[
            alt.Tooltip("order:N", title="kept"),
            "round:Q",
            alt.Tooltip("tests:Q", title="testing rounds"),
        ]
    )
    tests = sum(int(row["tests"]) for row in rows)
    return described(
        alt.layer(others.encode(x, y, tooltip=tips), path, dots, width=WIDTH, height=max(90, 30 * len(names))),
        f"Priority order of each round under {part.label}, and the orders tested.",
        "Filled: the order that a round kept; hollow: orders that it tested.",
        f"{tests} testing rounds in {len(kept)} rounds.",
    )


def _rounds(view: RunView, part: FederationView, *columns: str) -> list[dict[str, Any]]:
    """Return some columns of a federation's rounds: of a long run each takes time."""
    frame = view.rounds
    mine = (frame["rule"] == part.label) & (frame["seed"] == part.seed) & (frame["round"] > 0)
    return frame.loc[mine, list(columns)].to_dict("records")  # type: ignore[return-value]


@figure(
    "federation",
    "Class weights of the loss",
    "Weight κ of each class in the clients' loss: a class that the last model missed counts more.",
    "The loss of this rule does not adapt; under adafed it does.",
)
def classes(view: RunView, part: FederationView) -> Chart | None:
    """Draw the weights κ_c that an adaptive loss gives each class over the rounds (paper 001)."""
    kappa: dict[int, list[float]] = {}
    for row in _rounds(view, part, "round", "loss_settings"):
        if given := json.loads(row["loss_settings"]).get("class_weights"):
            kappa[int(row["round"])] = given
    if not kappa:
        return None
    rounds = sorted(kappa)
    chosen = [rounds[index] for index in sampled(len(rounds), COLUMNS)]
    ends = _ends(chosen, 0.5, max(1, -(-(rounds[-1] - rounds[0] + 1) // len(chosen))) - 0.5)
    labels = [str(label) for label in range(len(kappa[chosen[0]]))]
    drawn = cells(
        [
            {"class": label, **ends, "value": numbers(kappa[number][int(label)] for number in chosen)}
            for label in labels
        ],
        "isValid(datum.value)",
        *_span(ends),
        alt.Y("class:N", title="class", sort=labels),
        alt.Color("value:Q", scale=alt.Scale(zero=True), legend=alt.Legend(title="κ", orient="right")),
        tooltip=["class:N", "round:Q", alt.Tooltip("value:Q", title="κ", format=".2f")],
    )
    return described(
        drawn.properties(width=WIDTH - 80, height=max(100, min(420, 16 * len(labels)))),
        f"Weight of every class in the loss over the rounds under {part.label}.",
        "κ = 1/(F1 + ε) of the round before.",
        f"{COLUMNS} rounds, evenly spaced, of {len(rounds)}." if len(rounds) > COLUMNS else "",
    )


# The split: who holds how much of what.


@figure(
    "federation",
    "Samples and classes",
    "Training samples of each client, and their classes where the run knows them.",
    "No client has sent its number of samples yet.",
)
def split(view: RunView, part: FederationView) -> Chart | None:
    """Draw how many training samples each client has, and of which classes; of many clients, how often a size comes."""
    labels = part.history.labels(part.seed)
    note = ""
    if labels:
        sizes = pd.Series({client: sum(counts) for client, counts in labels.items()}, dtype="int64")
    else:  # the samples of those asked alone are known
        frame = view.clients(part)
        sizes = frame[frame["samples"].notna()].groupby("client")["samples"].max()
        missing = view.evaluations(part)["client"].nunique() - len(sizes)
        note = f"{missing} clients were never selected, so their size is not recorded." if missing > 0 else ""
    return _split(sizes, labels, view.flaws(part), note) if len(sizes) else None


def planned_split(planned: Split) -> Chart:
    """Draw a split before anything is trained, as `split` draws that of a run."""
    notes = [f"{note[:1].upper()}{note[1:]}." for note in planned.notes]
    labels = {name: list(counts) for name, counts in planned.labels.items()}
    return _split(pd.Series(dict(planned.sizes), dtype="int64"), labels, planned.flaws, *notes)


def _split(sizes: Frame, labels: Mapping[str, list[int]], flawed: Mapping[str, Sequence[str]], *notes: str) -> Chart:
    most = 60  # clients that get a bar and a column of classes of their own
    sizes = sizes.sort_values(ascending=False, kind="stable")
    clients = [str(client) for client in sizes.index]
    rows = [
        {
            "client": name,
            "samples": int(count),
            "kind": FLAWED if client in flawed else SOUND,
            "flaw": ", ".join(flawed.get(client, ())),
        }
        for client, name, count in zip(clients, _marked(clients, flawed), sizes, strict=True)
    ]
    many = len(rows) > most
    kept = sampled(len(rows), most).tolist()
    names = [rows[index]["client"] for index in kept]
    bars = alt.Chart(pd.DataFrame(rows)).mark_bar().encode(_soundness(flawed)).properties(width=WIDTH, height=180)
    if many:
        bars = bars.encode(
            alt.X("samples:Q", bin=alt.Bin(maxbins=30), title="training samples of a client"),
            alt.Y("count():Q", title="clients"),
            tooltip=[alt.Tooltip("count():Q", title="clients"), "kind:N"],
        )
    else:
        bars = bars.encode(
            _client_axis(names, shown=not labels),
            alt.Y("samples:Q", title="training samples"),
            tooltip=["client:N", "samples:Q", "flaw:N"],
        )
    held = [_held(names, [labels[clients[index]] for index in kept])] if labels else []
    sorted_ones = f"Classes of {len(kept)} clients, from the biggest to the smallest, evenly spaced."
    return described(
        alt.vconcat(bars, *held).resolve_scale(color="independent"),
        f"Training samples per client, {len(rows)} clients, from {min(sizes)} to {max(sizes)}.",
        f"{len(rows)} clients, so each bar counts those of similar size." if many else "",
        sorted_ones if many and labels else "",
        "Labels as the client has them, wrong ones included." if flawed and labels else "",
        *notes,
    )


def _client_axis(names: list[str], *, shown: bool = True) -> alt.X:
    axis = alt.Axis(labelAngle=-60, labels=shown, ticks=shown, labelOverlap=True)
    return alt.X("client:N", sort=names, title=None, axis=axis)


def _held(names: list[str], counts: list[list[int]]) -> alt.Chart:
    """Draw how many samples of each class each client has; no colour: none."""
    labels = [str(label) for label in range(len(counts[0]))]
    axis = alt.Axis(labelOverlap=len(labels) > 24)
    drawn = cells(
        [{"client": name, "label": labels, "samples": row} for name, row in zip(names, counts, strict=True)],
        "datum.samples > 0",
        _client_axis(names),
        alt.Y("label:N", sort=labels, scale=alt.Scale(domain=labels), title="class", axis=axis),
        alt.Color("samples:Q", scale=alt.Scale(domainMin=0), legend=alt.Legend(title="samples", titleOrient="left")),
        tooltip=["client:N", alt.Tooltip("label:N", title="class"), "samples:Q"],
    )
    return drawn.properties(width=WIDTH, height=max(60, min(360, 15 * len(labels))))


# One client.


@figure(
    "client",
    "One client",
    "Its weight, its criteria and its own score.",
    "This client was neither selected nor tested under this rule.",
)
def client(view: RunView, part: FederationView, name: str) -> Chart | None:
    """Draw the course of one client under one rule: its weight, its criteria as normalised, and its own score."""
    frame = view.clients(part)
    mine = frame[(frame["client"] == name) & frame["weight"].notna()]
    scores = view.evaluations(part)
    scores = scores[scores["client"] == name]
    if not len(mine) and not len(scores):
        return None
    most = 120  # points of a line
    mine, scores = mine.iloc[sampled(len(mine), most)], scores.iloc[sampled(len(scores), most)]
    columns = {"weight": "weight"} | {criterion: f"normalised_{criterion}" for criterion in part.criteria}
    x = round_axis(1, max([*mine["round"], *scores["round"], 1]))
    tips = [alt.Tooltip("what:N", title=" "), "round:Q", alt.Tooltip("value:Q", format=".3~g")]
    weighed = unfolded([_course(what, mine, column) for what, column in columns.items()])
    weighed = weighed.mark_line(point=alt.OverlayMarkDef(size=24)).encode(
        x,
        alt.Y("value:Q", title="weight, criteria"),
        alt.Color("what:N", scale=alt.Scale(domain=list(columns)), legend=alt.Legend()),
        tooltip=tips,
    )
    axis = alt.Axis(format=score_format(view.measure))
    served = unfolded([_course(view.measure, scores, "score")]).mark_line(style="soft")
    served = served.encode(x, alt.Y("value:Q", title=f"its own {view.measure}", axis=axis), tooltip=tips)
    return described(
        alt.vconcat(weighed.properties(width=WIDTH, height=150), served.properties(width=WIDTH, height=90)),
        f"Weight, criteria and score of {name} over the rounds under {part.label}.",
    )


def _course(what: str, frame: Frame, column: str) -> Row:
    return {"what": what, "round": [int(number) for number in frame["round"]], "value": numbers(frame[column])}
