"""Printing results on the command line: a document for programs, a summary or metrics for people."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from steelyard.base.errors import UserError, printable
from steelyard.base.logs import logger
from steelyard.report.rendering import Style, Table, as_text, wrapped

if TYPE_CHECKING:
    from steelyard.cli.options import TableFormat
    from steelyard.report.recommender import Metrics

_log = logger(__name__)


def print_json(document: object) -> None:
    """Print one document on standard output as JSON, the one place that does; NaN becomes null.

    What a terminal would act on stands in texts only, and is escaped there.
    """
    # For speed of start: commands that print lists need no pydantic.
    from pydantic_core import to_jsonable_python

    plain = json.dumps(to_jsonable_python(document))
    text = json.dumps(json.loads(plain, parse_constant=lambda name: None), indent=2, ensure_ascii=False)
    print("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def emit(
    document: object, format: TableFormat, text: Callable[[Style, int | None], str], csv: Callable[[], str] = str
) -> None:
    """Print what a command found: as JSON, as CSV where it has such a form, or as `text` in a style and width."""
    if format == "json":
        print_json(document)
    else:
        print(csv() if format == "csv" else text(format, terminal_width()), end="")


def refuse_together(option: str, others: Mapping[str, object], allowed: str) -> None:
    """Refuse options that say nothing beside another one, each by its name, where it is given."""
    if given := [name for name, value in others.items() if value not in (None, False)]:
        raise UserError(f"{option}: got it with {' and '.join(given)}; allowed: {allowed}")


def print_part(part: object, folder: Path, format: str) -> None:
    """Print that a part of a comparison or a sweep is done: alone it has no table."""
    if format == "json":
        print_json({"part": str(part), "folder": str(folder)})
        return
    print(f"part {part} stored in {printable(str(folder))}")
    print("when all parts are done: steelyard join FOLDERS --out WHOLE")


def terminal_width() -> int | None:
    """Return the terminal's width, also as COLUMNS gives it; None where the output goes to a file or a program."""
    if "COLUMNS" not in os.environ and not sys.stdout.isatty():
        return None
    return max(40, shutil.get_terminal_size().columns)


def print_entries(entries: Mapping[str, str]) -> None:
    """Print names with a text each; in a terminal the texts are broken so that they stay beside their names."""
    column = max(map(len, entries), default=0)
    width = terminal_width()
    for name, text in entries.items():
        shown = f"{printable(name):<{column}}  {printable(' '.join(text.split()))}"
        if width is None:
            print(shown)
        else:
            print(textwrap.fill(shown, width, subsequent_indent=" " * min(column + 2, width // 2)))


def print_wrapped(text: str) -> None:
    """Print a sentence; in a terminal it is broken between words."""
    print(wrapped(printable(text), terminal_width()))


def print_table(table: Table) -> None:
    """Print a table for people; in a terminal it is broken into blocks of columns that fit."""
    print(as_text(table, terminal_width()))


def metric_table(document: Metrics) -> Table:
    """Lay metrics by cutoff out with one line per metric and one column per cutoff; use it for people."""

    def flat(block: Mapping[str, object], before: str = "") -> dict[str, object]:
        found: dict[str, object] = {}
        for name, value in block.items():
            inner = cast("Mapping[str, object]", value)
            found |= flat(inner, f"{before}{name} ") if isinstance(value, Mapping) else {before + name: value}
        return found

    def cell(value: object) -> str:
        if value is None:
            return "-"
        return f"{value:.5f}" if isinstance(value, float) else str(value)

    columns = {cutoff: flat(block) for cutoff, block in document.items()}
    names = list(next(iter(columns.values())))
    rows = tuple((name, *(cell(block[name]) for block in columns.values())) for name in names)
    return Table("", ("metric", *(f"@{cutoff}" for cutoff in columns)), rows)


def warn_of_changes(folder: Path) -> None:
    """Warn that the experiment file of a run is not as the run wrote it, where that is so."""
    # For speed of start: few commands read runs.
    from steelyard.experiment.resuming import changed_since

    if line := changed_since(folder):
        _log.warning(line)
