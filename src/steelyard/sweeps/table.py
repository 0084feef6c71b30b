"""The table of a sweep for people: every point, the best first and marked, and what to do with it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from steelyard.base.errors import printable
from steelyard.base.measures import EstimateJson, show_estimate
from steelyard.report.documents.sweep import SweepDocument, SweepRow
from steelyard.report.rendering import Style, Table, render
from steelyard.sweeps.plan import show
from steelyard.sweeps.result import BEST, PICTURE

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
    if "accuracy" in measured:
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
