"""A sweep for people and programs: the document of its points, its table, its CSV."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from steelyard.base.documents import Document
from steelyard.base.measures import Estimate, measure_of, show_estimate
from steelyard.report.rendering import Table, as_csv
from steelyard.studies.study import Scalar

RESULTS, BEST, PICTURE = "results.csv", "best.toml", "sweep.svg"
"""Files of a sweep's folder: the table, the best point as an experiment, the figure."""
MOST_ROWS = 50
"""Points that are shown; the file with the results has all."""


class SweepRow(Document):
    """One point of a sweep: the values of its fields, its rule, and the measure over its seeds."""

    point: int
    run: str
    values: dict[str, Scalar]
    rule: str
    seeds: tuple[int, ...]
    value: Estimate
    unreached: int
    """In how many seeds a target was not reached: these count as the last round."""
    diverged: bool
    samples: int = 0
    """How many validation samples an accuracy rests on; 0 where that is not known."""


class SweepTest(Document):
    """What the best point did on the test set."""

    run: str
    rule: str
    value: Estimate
    unreached: int


class SweepDocument(Document):
    """A sweep: every point that is done, the best first."""

    folder: str
    measure: str
    measured: str
    less_is_better: bool
    validation: float
    seeds: tuple[int, ...]
    fields: tuple[str, ...]
    rows: tuple[SweepRow, ...]
    best: SweepRow | None
    left: tuple[str, ...] = ()
    """Runs that are not done."""
    diverged: tuple[str, ...] = ()
    test: SweepTest | None = None
    problems: tuple[str, ...] = ()


def show(value: Scalar) -> str:
    """Write a value of the grid as tables and the names of folders show it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def sweep_csv(document: SweepDocument) -> str:
    """Return the points of a sweep as CSV, the best first, with a column for each field and for each seed."""
    seeds = [f"seed {seed}" for seed in document.seeds]
    headings = ["point", *document.fields, "rule", document.measured, "low", "high", "unreached", *seeds, "run"]
    rows: list[list[str | float]] = []
    for row in document.rows:
        values = [one if isinstance(one, int | float) else show(one) for one in row.values.values()]
        numbers = (row.value.mean, row.value.low, row.value.high, row.unreached, *row.value.values)
        rows.append([row.point, *values, row.rule, *numbers, row.run])
    return as_csv(headings, rows)


def sweep_table(document: SweepDocument) -> Table:
    """Return a sweep with a line for each point, the best first."""
    rows, best = document.rows, document.best and document.best.point
    others = alike(document)
    unreached = any(row.unreached for row in rows)
    with_rule = len({row.rule for row in rows}) > 1 or not document.fields
    headings = ("point", *_short_names(document.fields), *["rule"] * with_rule, document.measured)
    return Table(
        f"{document.measured} on a validation split ({document.validation:.0%} of the training data), "
        f"{'lower' if document.less_is_better else 'higher'} is better",
        (*headings, *["unreached"] * unreached),
        tuple(
            (
                f"{row.point} {'*' if row.point == best else '=' if row.point in others else ''}".rstrip(),
                *map(show, row.values.values()),
                *[row.rule] * with_rule,
                "diverged" if row.diverged else show_value(row.value, document),
                *[f"{row.unreached} of {len(row.seeds)}"] * unreached,
            )
            for row in rows[:MOST_ROWS]
        ),
        _note(document),
    )


def alike(document: SweepDocument) -> list[int]:
    """Return the further points that are within one test sample of the best, or equal to it where nobody counts."""
    if document.best is None:
        return []
    best, margin = document.best, 1 / document.best.samples if document.best.samples else 0.0
    near = (row for row in document.rows if abs(row.value.mean - best.value.mean) <= margin + 1e-12)
    return [row.point for row in near if row.point != best.point]


def _short_names(fields: Sequence[str]) -> list[str]:
    """Return fields by their last word, or whole where two of them would be alike."""
    last = [field.rpartition(".")[2] for field in fields]
    return [name if last.count(name) == 1 else field for field, name in zip(fields, last, strict=True)]


def show_value(value: Estimate, document: SweepDocument) -> str:
    """Write a mean over seeds with half its 95 % interval, where there are several."""
    if measure_of(document.measured).percent:
        return show_estimate(value, 2, 100.0, unit=" %", between=" ±")
    if document.measure == "rounds-to-target":
        whole = len(value.values) == 1 and value.mean.is_integer()
        return show_estimate(value, 0 if whole else 1, between=" ±")
    return show_estimate(value, 5, between=" ±")


def _note(document: SweepDocument) -> str:
    notes = ["the best is marked *"] if document.best is not None else ["no point has a figure"]
    if others := alike(document):
        within = f" to one of its {document.best.samples} samples" if document.best and document.best.samples else ""
        count = "1 point is" if len(others) == 1 else f"{len(others)} points are"
        notes.append(f"{count} as good{within}, marked =: the best is the first of them in the grid")
    if len(document.seeds) > 1:
        notes.append(f"mean of {len(document.seeds)} seeds ± half the 95% interval")
    if any(row.unreached for row in document.rows):
        notes.append("a target that is not reached counts as the last round")
    if len(document.rows) > MOST_ROWS:
        notes.append(f"{MOST_ROWS} of {len(document.rows)} points")
    if any(row.diverged for row in document.rows):
        notes.append("diverged: training diverged in one seed or more")
    if document.left:
        notes.append(f"not done: {len(document.left)} runs")
    return "; ".join(notes)


def next_lines(document: SweepDocument) -> list[str]:
    """Say where the sweep lies, and how to run the best point on the test set, or what it did there."""
    stored = f"sweep stored in {document.folder}"
    if document.left:
        # The picture is drawn when all runs are done, and where a point has a figure.
        return [stored, f"continue with: steelyard resume {shlex.quote(document.folder)}"]
    if document.best is None:
        return [stored]
    lines = [f"{stored}; its picture: {PICTURE}"]
    if document.test is not None:
        return [*lines, f"the best on the test set: {document.measured} {show_value(document.test.value, document)}"]
    best = shlex.quote(f"{document.folder}/{BEST}")
    return [*lines, f"the best on the test set: steelyard run {best}"]
