"""The card of a model: what it is for, what it takes and gives, and what its run shows of it, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.base.errors import printable
from steelyard.base.measures import measure_of
from steelyard.data.preparation import Column, Preparation
from steelyard.models.document import ModelDocument, Test
from steelyard.report.rendering import Block, Table, render
from steelyard.report.verification import Record

MOST_COLUMNS = 200
_TASKS = {
    "classes": "the class of a row",
    "regression": "a number",
    "survival": "a risk: the higher, the earlier the event",
    "segmentation": "the class of each pixel",
    "multi-label": "which of several labels a row has",
}


def card(document: ModelDocument, found: Record, left_out: str) -> str:
    """Return the card, from what the run's record says, and which tests are left out; use it when a model is taken."""
    origin, prepared = document.origin, document.preparation
    parts: list[Block] = [
        f"# Model of {origin.run}",
        f"Intended use, as the experiment says: {origin.purpose or 'not said'}",
        "## Where it is from",
        (
            f"Rule: {origin.rule} ({origin.algorithm}), seed {origin.seed}; {origin.chosen}.",
            *found["why"],
            f"Digest of the model in the run's chain: {origin.digest}.",
            f"Final hash of the run: {origin.closing}; verified: {found['verified']['verdict']}.",
            f"Not covered by it: {found['not_covered']}.",
        ),
        "## What it takes and gives",
        (*_input(prepared), f"It gives {_TASKS[prepared.target.task]}{_names(prepared.target.names)}."),
    ]
    if prepared.columns:
        rows = tuple(_column(column) for column in prepared.columns[:MOST_COLUMNS])
        parts.append(
            Table("Columns, in their order", ("column", "type", "seen in training", "if empty"), rows, names=4)
        )
    parts += ["## Tests in its run", *_tests(origin.tests), *filter(None, [left_out])]
    sites = tuple((site["client"], _text(site["rows"]), _share(site["weight"])) for site in found["sites"])
    parts += ["## Data by site", Table("Sites", ("site", "training rows", "mean weight"), sites)]
    parts += ["## Privacy", tuple(found["privacy"])]
    if prepared.sites:
        parts.append(f"model.json holds means and deviations of {len(prepared.sites)} single sites.")
    return render(parts, "markdown")


def _input(prepared: Preparation) -> Sequence[str]:
    shape = "×".join(map(str, prepared.shape))
    lines = {
        "table": f"It takes a table with {len(prepared.columns)} columns, which become {shape} numbers.",
        "images": f"It takes images; they are cut to the middle square, and become {shape} (channels, height, width).",
        "characters": f"It takes the last {shape} characters of a text.",
        "words": f"It takes the first {shape} words of a text, hashed to {prepared.vocabulary} tokens.",
        "array": f"It takes arrays of {shape} numbers.",
    }
    found = [lines[prepared.form]]
    if prepared.normalise == "client":
        found.append(
            "Each site scales numbers by its own training rows: a site that trained by those (`--site NAME`), a new "
            "site by its new rows, so give it many rows at once."
        )
    return found


def _names(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > MOST_COLUMNS else ""
    return f": {', '.join(names[:MOST_COLUMNS])}{more}" if names else ""


def _column(column: Column) -> tuple[str, ...]:
    if column.kind == "category":
        return column.name, "category", ", ".join(column.levels), "no category"
    seen = "not told" if column.low is None or column.high is None else f"{column.low:g} to {column.high:g}"
    return column.name, "number", seen, "filled"


def _tests(tests: Sequence[Test]) -> list[Block]:
    if not tests:
        return ["No test of this model was recorded."]
    rows = tuple((test.where, str(test.rows), test.measure, _score(test)) for test in tests)
    return [Table("Scores with 95 % intervals", ("where", "rows", "measure", "score"), rows)]


def _score(test: Test) -> str:
    measure = measure_of(test.measure)
    interval = "" if test.low is None or test.high is None else f" {measure.show_interval(test.low, test.high)}"
    return f"{measure.show(test.value)}{interval}"


def _text(value: int | None) -> str:
    return "not known" if value is None else f"{value:,}"


def _share(value: float | None) -> str:
    return "-" if value is None else printable(f"{value:.1%}")
