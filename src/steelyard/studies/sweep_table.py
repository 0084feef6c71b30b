"""A sweep as one document: the measure at every point of its grid over the seeds, the best first; and its files."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import altair as alt
import numpy as np
import pandas as pd
from typing_extensions import TypedDict  # typing's own is one that pydantic reads from Python 3.12 on only

from steelyard.base import files
from steelyard.base.errors import printable, told_as
from steelyard.base.measures import EstimateJson, estimate, measure_of, show_estimate
from steelyard.experiment.description import Description
from steelyard.experiment.loading import read_experiment, to_toml
from steelyard.report.curves import rounds_to_target, worst_tenth
from steelyard.report.figures.look import HEIGHT, WIDTH, described, score_format
from steelyard.report.notices import chain_line, chain_of
from steelyard.report.rendering import Style, Table, as_csv, render
from steelyard.runs.history import History
from steelyard.studies.study import TEST, diverged, done, finished
from steelyard.studies.sweep import LOWER, Scalar, Sweep, read_runs, read_sweep, show


class SweepRow(TypedDict):
    """One point of a sweep: the values of its fields, its rule, and the measure over its seeds."""

    point: int
    run: str
    values: dict[str, Scalar]
    rule: str
    seeds: list[int]
    value: EstimateJson
    unreached: int
    diverged: bool


class SweepTest(TypedDict):
    """What the best point did on the test set."""

    run: str
    rule: str
    value: EstimateJson
    unreached: int


class SweepDocument(TypedDict):
    """A sweep: every point that is done, the best first."""

    folder: str
    measure: str
    measured: str
    less_is_better: bool
    validation: float
    seeds: list[int]
    fields: list[str]
    rows: list[SweepRow]
    best: SweepRow | None
    left: list[str]
    diverged: list[str]
    test: SweepTest | None
    problems: list[str]


RESULTS, BEST, PICTURE = "results.csv", "best.toml", "sweep.svg"
"""Files of a sweep's folder: the table, the best point as an experiment, the figure."""

Figures = dict[int, tuple[float, bool]]
"""By seed: the measure, and whether it was reached (a target may not be)."""


def sweep_document(folder: Path | str) -> SweepDocument:
    """Return a sweep as one JSON-ready document: every point that is done, the best first; for tables and figures.

    Nothing is run, also none of the code that the sweep's experiment names.
    """
    folder = Path(folder)
    found = read_sweep(folder)
    points: dict[tuple[tuple[Any, ...], str], tuple[str, Figures]] = {}
    left: list[str] = []
    problems: list[str] = []
    exploded: set[tuple[tuple[Any, ...], str]] = set()
    for run in read_runs(folder):
        if not done(folder, run.folder):
            left.append(run.folder)
            continue
        if diverged(folder, run.folder):
            exploded |= {(run.values, rule) for rule in run.rules}
            by_rule: dict[str, Figures] = {rule: dict.fromkeys(run.seeds, (math.nan, True)) for rule in run.rules}
        else:
            history = History(folder / run.folder)
            by_rule = _figures(history, found.measure)
            exploded |= {(run.values, rule) for rule, _ in history.ended}
            if (chain := chain_of(history)).problem:
                problems.append(f"{run.folder}: {chain_line(chain)}")
        for rule, figures in by_rule.items():
            first = points.setdefault((run.values, rule), (run.folder, {}))
            first[1].update(figures)
    rows = [
        _row(number, found, point, run, figures, diverged=point in exploded)
        for number, (point, (run, figures)) in enumerate(points.items(), 1)
    ]
    # Sorting is stable: of points that are alike, the one that comes first in the grid is the best.
    rows.sort(key=lambda row: _rank(row, found.measure))
    return {
        "folder": str(folder),
        "measure": found.measure,
        "measured": measured_name(found.experiment, found.measure),
        "less_is_better": found.measure in LOWER,
        "validation": found.validation,
        "seeds": list(found.seeds),
        "fields": [axis.field for axis in found.axes],
        "rows": rows,
        "best": rows[0] if rows and math.isfinite(rows[0]["value"]["mean"]) else None,
        "left": left,
        "diverged": [run.folder for run in read_runs(folder) if diverged(folder, run.folder)],
        "test": _test(folder, found),
        "problems": problems,
    }


def measured_name(experiment: Description, measure: str) -> str:
    """Return what a measure is called in headings: "score" is what the experiment scores by."""
    if measure == "worst10":
        return f"worst tenth, {experiment.score_name}"
    return experiment.score_name if measure == "score" else experiment.measures.get(measure, measure)


def _row(
    number: int, sweep: Sweep, point: tuple[tuple[Any, ...], str], run: str, figures: Figures, *, diverged: bool
) -> SweepRow:
    values, rule = point
    done = [seed for seed in sweep.seeds if seed in figures]
    kept = [figures[seed] for seed in done]
    return {
        "point": number,
        "run": run,
        "values": dict(zip((axis.field for axis in sweep.axes), values, strict=True)),
        "rule": rule,
        "seeds": done,
        "value": estimate([value for value, _ in kept]).as_json(),
        "unreached": sum(not reached for _, reached in kept),
        "diverged": diverged,
    }


def _rank(row: SweepRow, measure: str) -> tuple[float, ...]:
    mean = row["value"]["mean"]
    if not math.isfinite(mean):
        return (math.inf, 0.0)
    # A target that was not reached counts as the last round, and comes after one that was reached then.
    return (mean, row["unreached"]) if measure in LOWER else (-mean, row["unreached"])


def _figures(history: History, measure: str) -> dict[str, Figures]:
    """Return the measure of every rule and seed of a run."""
    experiment = read_experiment(history.folder)
    found: dict[str, Figures] = {}
    for federation in history.federations.to_dict("records"):
        rule, seed = str(federation["rule"]), int(federation["seed"])
        ended = (rule, seed) in history.ended
        figure = (math.nan, True) if ended else _figure(history, experiment, rule, seed, measure)
        found.setdefault(rule, {})[seed] = figure
    return found


def _figure(history: History, experiment: Description, rule: str, seed: int, measure: str) -> tuple[float, bool]:
    """Return a measure of the last model that was tested, and whether it was reached."""
    if measure in ("score", "accuracy") or measure.startswith("server-"):
        rows = cast("list[dict[str, Any]]", history.rounds.to_dict("records"))
        mine = [row for row in rows if row["rule"] == rule and row["seed"] == seed and row["round"] > 0]
        return (_server(mine, measure) if measure.startswith("server-") else _last(mine, "accuracy")), True
    if measure in ("worst10", "rounds-to-target"):
        rounds, scores = history.scores(rule, seed)
        if measure == "worst10":
            return worst_tenth(scores[-1]) if len(scores) else math.nan, True
        settings = experiment.rounds
        reached = rounds_to_target(rounds, scores, settings.target, settings.share, above=settings.above)
        return float(reached or settings.count or rounds.max(initial=0)), reached is not None
    tested = history.tested(rule, seed, 0)
    last = tested.round == tested.round.max(initial=0)
    values = tested.loss if measure == "loss" else tested.metrics.get(experiment.measures.get(measure, measure))
    if values is None or not last.any():
        return math.nan, True
    return float(np.average(values[last], weights=tested.samples[last])), True


def _last(rows: Sequence[Mapping[str, Any]], column: str) -> float:
    values = [float(row[column]) for row in rows if row[column] is not None and not math.isnan(row[column])]
    return values[-1] if values else math.nan


def _server(rows: Sequence[Mapping[str, Any]], measure: str) -> float:
    name = measure.removeprefix("server-").replace("-", "_")
    texts = [row["server_metrics"] for row in rows if isinstance(row["server_metrics"], str)]
    known: dict[str, float] = json.loads(texts[-1]) if texts else {}
    # Accuracy and macro F1 of classes have columns of their own.
    if name in known:
        return float(known[name])
    return _last(rows, f"server_{name}") if rows and f"server_{name}" in rows[0] else math.nan


def _test(folder: Path, sweep: Sweep) -> SweepTest | None:
    """Return what the best point did on the test set, where it was run there."""
    if not finished(folder / TEST):
        return None
    ((rule, figures),) = _figures(History(folder / TEST), sweep.measure).items()
    return {
        "run": TEST,
        "rule": rule,
        "value": estimate([value for value, _ in figures.values()]).as_json(),
        "unreached": sum(not reached for _, reached in figures.values()),
    }


def write_sweep_files(folder: Path) -> SweepDocument:
    """Write the table, the figure and, where all runs are done, the best point as an experiment; return the document.

    Use it after a sweep, and again after it went on.
    """
    # For speed of start: only a sweep that has ended is drawn.
    from steelyard.report.figures import write_figure

    document = sweep_document(folder)
    with told_as(f"{folder}: cannot be written", "a writable folder"):
        files.write(folder / RESULTS, sweep_csv(document).encode())
        if document["best"] is not None and not document["left"]:
            files.write(folder / BEST, best_toml(folder, document, document["best"]).encode())
    chart = sweep_chart(document)
    if chart is not None:
        write_figure(chart, folder / PICTURE)
    return document


def sweep_csv(document: SweepDocument) -> str:
    """Return the points of a sweep as CSV, the best first, with a column for each field and for each seed."""
    seeds = [f"seed {seed}" for seed in document["seeds"]]
    headings = ["point", *document["fields"], "rule", document["measured"], "low", "high", "unreached", *seeds, "run"]
    rows: list[list[str | float]] = []
    for row in document["rows"]:
        value = row["value"]
        # A sweep of one run for each seed that was stopped may lack any of them.
        by_seed = dict(zip(row["seeds"], value["values"], strict=True))
        each = [by_seed.get(seed, math.nan) for seed in document["seeds"]]
        values = [one if isinstance(one, int | float) else show(one) for one in row["values"].values()]
        numbers = (value["mean"], value["low"], value["high"], row["unreached"])
        rows.append([row["point"], *values, row["rule"], *numbers, *each, row["run"]])
    return as_csv(headings, rows)


def best_toml(folder: Path, document: SweepDocument, best: SweepRow) -> str:
    """Return the best point of a sweep as an experiment file, on the test set and with its rule alone."""
    experiment = read_experiment(folder / best["run"])
    fields = {experiment.validation_field: None, "seed": document["seeds"][0]}
    found = to_toml(experiment.changed(fields, rules={best["rule"]: experiment.rules()[best["rule"]]}))
    chosen = ", ".join(f"{field} = {show(value)}" for field, value in best["values"].items())
    result = f"{document['measured']} {best['value']['mean']:.6g} on a validation split"
    return f"# Chosen by `steelyard sweep`: {' '.join(f'{chosen} {result}'.split())}.\n{found}"


# The table for people.


MOST_ROWS = 50
"""Points that are shown; the file with the results has all."""


def sweep_table(document: SweepDocument, style: Style = "text", width: int | None = None) -> str:
    """Write a sweep as plain text, Markdown or LaTeX, no wider than `width` where one is given."""
    names = short_names(document["fields"])
    rules = {row["rule"] for row in document["rows"]}
    several = len(document["seeds"]) > 1
    head = "better: less" if document["less_is_better"] else "better: more"
    columns = [*names.values(), *(["rule"] if len(rules) > 1 or not names else []), document["measured"]]
    unreached = any(row["unreached"] for row in document["rows"])
    table = Table(
        f"{document['measured']} on a validation split ({document['validation']:.0%} of the training data), {head}",
        ("point", *columns, *(["unreached"] if unreached else [])),
        tuple(_cells(document, row, names, with_rule="rule" in columns) for row in document["rows"][:MOST_ROWS]),
        _note(document, several),
    )
    return render([table], document["problems"], style, width)


def _cells(document: SweepDocument, row: SweepRow, names: Mapping[str, str], *, with_rule: bool) -> tuple[str, ...]:
    best = document["best"] is not None and row["point"] == document["best"]["point"]
    values = [printable(show(row["values"][field])) for field in names]
    rule = [printable(row["rule"])] if with_rule else []
    unreached = any(other["unreached"] for other in document["rows"])
    shown = "diverged" if row["diverged"] else show_value(row["value"], document["measure"], document["measured"])
    if not row["diverged"] and len(row["seeds"]) < len(document["seeds"]):
        shown += f" ({len(row['seeds'])} of {len(document['seeds'])} seeds)"
    return (
        f"{row['point']}{' *' if best else ''}",
        *values,
        *rule,
        shown,
        *([f"{row['unreached']} of {len(row['value']['values'])}"] if unreached else []),
    )


def short_names(fields: Sequence[str]) -> dict[str, str]:
    """Return fields by their last word, or whole where two of them would be alike."""
    last = [field.rpartition(".")[2] for field in fields]
    return {field: name if last.count(name) == 1 else field for field, name in zip(fields, last, strict=True)}


def show_value(value: EstimateJson, measure: str, measured: str) -> str:
    """Write a mean over seeds with half its 95 % interval, where there are several."""
    if measure_of(measured).percent:
        return show_estimate(value, 2, 100.0, unit=" %", between=" ±")
    if measure == "rounds-to-target":
        whole = len(value["values"]) == 1 and value["mean"].is_integer()
        return show_estimate(value, 0 if whole else 1, between=" ±")
    return show_estimate(value, 5, between=" ±")


def _note(document: SweepDocument, several: bool) -> str:
    notes = ["the best is marked *"] if document["best"] is not None else ["no point has a figure"]
    if several:
        notes.append(f"mean of {len(document['seeds'])} seeds ± half the 95 % interval")
    if any(row["unreached"] for row in document["rows"]):
        notes.append("a target that is not reached counts as the last round")
    if len(document["rows"]) > MOST_ROWS:
        notes.append(f"{MOST_ROWS} of {len(document['rows'])} points")
    if any(row["diverged"] for row in document["rows"]):
        notes.append("diverged: the model exploded in one seed or more")
    if document["left"]:
        notes.append(f"not done: {len(document['left'])} runs")
    return "; ".join(notes)


def next_lines(document: SweepDocument) -> list[str]:
    """Say where the sweep lies, and how to run the best point on the test set, or what it did there."""
    folder = document["folder"]
    quoted = printable(shlex.quote(folder))
    stored = f"sweep stored in {printable(folder)}"
    if document["left"]:
        # The picture is drawn when all runs are done, and where a point has a figure.
        return [stored, f"go on with: steelyard resume {quoted}"]
    lines = [f"{stored}; its picture: {PICTURE}" if document["best"] is not None else stored]
    if document["test"] is not None:
        shown = show_value(document["test"]["value"], document["measure"], document["measured"])
        return [*lines, f"the best on the test set: {document['measured']} {shown}"]
    if document["best"] is not None:
        best = printable(shlex.quote(f"{folder}/{BEST}"))
        lines.append(f"the best on the test set: steelyard run {best}")
    return lines


# The figure of a sweep: the measure over the values of a field, a line for each of the others' settings.


MOST_LINES = 12
"""Lines in one figure at most: those of the best points."""


def sweep_chart(document: SweepDocument) -> alt.LayerChart | None:
    """Draw a sweep: means over seeds as lines, single seeds as small points, a ring around the best point.

    A cross at the edge is a point whose model exploded. The first field with several numbers is the axis; None where
    no point has a figure.
    """
    every = document["rows"]
    rows = [row for row in every if math.isfinite(row["value"]["mean"])]
    if not rows:
        return None
    across = _across(every, document["fields"])
    others = _others(every, [*document["fields"], "rule"], across)
    lines = list(dict.fromkeys(_line(row, others) for row in rows))[:MOST_LINES]  # rows come best first
    shown = [_entry(row, across, others) for row in every if _line(row, others) in lines]
    x = _x_axis(across, [entry["x"] for entry in shown])
    data = pd.DataFrame([entry for entry in shown if math.isfinite(entry["mean"])])
    measured = document["measured"]
    form = score_format(measured)
    scale = alt.Scale(domain=_limits(data), nice=True, zero=False)
    y = alt.Y("mean:Q", title=measured, axis=alt.Axis(format=form), scale=scale)
    base = alt.Chart(data)
    legend = alt.Legend(columns=4, symbolType="stroke") if len(lines) > 1 else None
    colour = [alt.Color("line:N", scale=alt.Scale(domain=lines), legend=legend)]
    tips = [alt.Tooltip("setting:N"), alt.Tooltip("mean:Q", title=measured, format=".4f")]
    layers: list[Any] = [base.mark_line(point=alt.OverlayMarkDef(size=40)).encode(x, y, *colour, tooltip=tips)]
    if len(document["seeds"]) > 1:
        single = base.transform_flatten(["values"]).mark_point(size=14, filled=True, opacity=0.45)
        layers.append(single.encode(x, alt.Y("values:Q", title=measured, scale=scale), *colour))
    exploded = pd.DataFrame([entry for entry in shown if entry["diverged"]])
    if len(exploded):
        crosses = alt.Chart(exploded).mark_point(shape="cross", angle=45, size=70, filled=True, style="ink")
        worst = alt.value(0 if document["less_is_better"] else HEIGHT)
        layers.append(crosses.encode(x, y=worst, tooltip=alt.Tooltip("setting:N", title="diverged")))
    if document["best"] is not None:
        best = base.transform_filter(alt.datum.point == document["best"]["point"])
        layers.append(best.mark_point(size=260, style="ink", filled=False, strokeWidth=1.6).encode(x, y))
    description = f"{measured} on a validation split, by {across}."
    return described(
        alt.layer(*layers).properties(width=WIDTH, height=HEIGHT), description, _chart_note(document, lines, others)
    )


def _chart_note(document: SweepDocument, lines: Sequence[str], others: Sequence[str]) -> str:
    notes = [f"Ring: the best point, {'less' if document['less_is_better'] else 'more'} is better."]
    if len(document["seeds"]) > 1:
        notes.append(f"Line: mean of {len(document['seeds'])} seeds; small points: each of them.")
    if any(row["diverged"] for row in document["rows"]):
        notes.append("Cross: the model exploded in one seed or more.")
    if any(row["unreached"] for row in document["rows"]):
        notes.append("A target that was not reached counts as the last round.")
    every = {_line(row, others) for row in document["rows"]}
    if len(every) > len(lines):
        notes.append(f"{len(lines)} of {len(every)} lines: those of the best points.")
    return " ".join(notes)


def _limits(data: pd.DataFrame) -> list[float]:
    """Return the least and the greatest figure of any seed, with some room where they are alike."""
    values = [float(value) for values in data["values"] for value in values]
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return [low - room, high + room]


def _value(row: SweepRow, field: str) -> Any:
    return row["rule"] if field == "rule" else row["values"][field]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _several(rows: Sequence[SweepRow], field: str) -> bool:
    return len({show(_value(row, field)) for row in rows}) > 1


def _across(rows: Sequence[SweepRow], fields: Sequence[str]) -> str:
    """Return the field that the axis shows: the first of several numbers, else the first of several values."""
    several = [field for field in (*fields, "rule") if _several(rows, field)]
    numbers = [field for field in several if all(_is_number(_value(row, field)) for row in rows)]
    return (numbers or several or [*fields, "rule"])[0]


def _others(rows: Sequence[SweepRow], fields: Sequence[str], across: str) -> list[str]:
    return [field for field in fields if field != across and _several(rows, field)]


def _line(row: SweepRow, others: Sequence[str]) -> str:
    words = [
        str(row["rule"]) if field == "rule" else f"{field.rpartition('.')[2]} {show(_value(row, field))}"
        for field in others
    ]
    return ", ".join(words) or "all"


def _entry(row: SweepRow, across: str, others: Sequence[str]) -> dict[str, Any]:
    value, found = row["value"], _value(row, across)
    return {
        "point": row["point"],
        "x": float(found) if _is_number(found) else show(found),
        "line": _line(row, others),
        "setting": ", ".join(part for part in (f"{across} {show(found)}", _line(row, others)) if part != "all"),
        "mean": value["mean"],
        "diverged": row["diverged"],
        "values": [number for number in value["values"] if math.isfinite(number)],
    }


def _x_axis(across: str, shown: Sequence[Any]) -> alt.X:
    if not all(_is_number(value) for value in shown):
        return alt.X("x:N", title=across, sort=None, axis=alt.Axis(labelAngle=0))
    values = sorted(set(shown))
    scale = alt.Scale(type="log" if _by_factors(values) else "linear", zero=False, padding=12, nice=False)
    # Six digits are asked for: without a number of digits a linear scale shows as many as its own steps would need.
    return alt.X("x:Q", title=across, scale=scale, axis=alt.Axis(values=values, format=".6~g"))


def _by_factors(values: Sequence[float]) -> bool:
    """Whether the values grow by factors, as learning rates do, rather than by steps."""
    if values[0] <= 0:
        return False
    steps = [after - before for before, after in pairwise(values)]
    factors = [after / before for before, after in pairwise(values)]
    return values[-1] / values[0] >= 10 or (len(steps) > 1 and max(steps) / min(steps) > max(factors) / min(factors))
