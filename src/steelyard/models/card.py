"""The card of a model: what it is for, what it takes and gives, and what its run shows of it, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from steelyard.base.errors import printable
from steelyard.data.preparation import Column, Preparation
from steelyard.models.document import Origin, Test
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


def card(
    origin: Origin, found: Record, title: str, about: Sequence[Block], *, left_out: str = "", sites: bool = True
) -> str:
    """Return the card, from what the run's record says; use it when a model is taken.

    `about` says what the folder holds; `left_out` which tests are left out; `sites`: name them with their rows.
    """
    parts: list[Block] = [
        f"# {title} of {origin.run}",
        f"Intended use, as the experiment says: {origin.purpose or 'not said'}",
        "## Where it is from",
        (
            f"Rule: {origin.rule} ({origin.algorithm}), seed {origin.seed}; {origin.chosen}.",
            *found["why"],
            f"Digest of the model in the run's chain: {origin.digest}.",
            f"Final hash of the run: {origin.closing}; verified: {found['verified']['verdict']}.",
            f"Not covered by it: {found['not_covered']}.",
        ),
        *about,
        *("## Tests in its run", *_tests(origin.tests), *filter(None, [left_out])),
    ]
    if sites:
        rows = tuple((site["client"], _text(site["rows"]), _share(site["weight"])) for site in found["sites"])
        parts += ["## Data by site", Table("Sites", ("site", "training rows", "mean weight"), rows)]
    return render([*parts, "## Privacy", tuple(found["privacy"])], "markdown")


def takes_and_gives(
    prepared: Preparation | None, arrays: Mapping[str, Sequence[str | int]] = MappingProxyType({})
) -> list[Block]:
    """Return the part of a card that says what a model takes and gives, as far as that is known.

    `arrays` are the types and shapes of the weights where nothing else is known of the network.
    """
    parts: list[Block] = ["## What it takes and gives", tuple(_input_and_output(prepared))]
    if prepared is None:
        rows = tuple((name, str(kind), "×".join(map(str, shape))) for name, (kind, *shape) in arrays.items())
        return [*parts, Table("Arrays, in their order", ("array", "type", "shape"), rows[:MOST_COLUMNS], names=2)]
    if prepared.columns:
        rows = tuple(_column(column) for column in prepared.columns[:MOST_COLUMNS])
        headings = ("column", "type", "seen in training", "if empty")
        parts.append(Table("Columns, in their order", headings, rows, names=4))
    held = ["categories"] if prepared.columns else []
    if prepared.scale is not None or prepared.sites:
        whose = f"{len(prepared.sites)} single sites" if prepared.sites else "all training rows together"
        held.append(f"means and deviations of {whose}")
    if held:
        parts.append(f"model.json holds {' and '.join(held)}. They are exact: no noise covers them.")
    return parts


def _input_and_output(prepared: Preparation | None) -> Sequence[str]:
    if prepared is None:
        return [
            "What rows go through before the network, how the network is built and what its outputs mean is not known "
            "here: the app that trained it knows. This folder has the weights by the names that they have there."
        ]
    shape = "×".join(map(str, prepared.shape))
    lines = {
        "table": f"It takes a table with {len(prepared.columns)} columns, which become {shape} numbers.",
        "images": f"It takes images; they are cut to the middle square, and become {shape} (channels, height, width).",
        "characters": f"It takes the last {shape} characters of a text.",
        "words": f"It takes the first {shape} words of a text, hashed to {prepared.vocabulary} tokens.",
        "array": f"It takes arrays of {shape} numbers.",
        "prepared": f"It takes arrays of {shape} numbers, as the nodes make them of their rows: no node told how "
        "(statistics in its file). Other rows give nonsense. Classes have their numbers alone.",
    }
    found = [lines[prepared.form]]
    if prepared.normalise == "client":
        found.append(
            "Each site scales numbers by its own training rows: a site that trained by those (`--site NAME`), a new "
            "site by its new rows, so give it many rows at once."
        )
    target = prepared.target
    positive = (
        f" The positive class is {target.names[1]}." if target.task == "classes" and len(target.names) == 2 else ""
    )
    return [*found, f"It gives {_TASKS[target.task]}{_names(target.names)}.{positive}"]


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
    rows = tuple((test.where, _text(test.rows or None), test.measure, test.shown) for test in tests)
    return [Table("Scores with 95% intervals", ("where", "rows", "measure", "score"), rows)]


def _text(value: int | None) -> str:
    return "not known" if value is None else f"{value:,}"


def _share(value: float | None) -> str:
    return "-" if value is None else printable(f"{value:.1%}")
