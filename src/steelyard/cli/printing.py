"""Printing results on the command line: a document for programs, a summary or metrics for people."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from steelyard import files
from steelyard.activity import doing
from steelyard.errors import Stopped, ends_as_interrupted, printable

if TYPE_CHECKING:
    from steelyard.report.documents import Metrics
    from steelyard.result import Result


DoneT = TypeVar("DoneT")

REPORT = files.REPORT
"""The report's file in a run's folder."""


def print_json(document: object) -> None:
    """Print one document on standard output as JSON, the one place that does; NaN becomes null.

    What a terminal would act on stands in texts only, and is escaped there.
    """
    text = json.dumps(_finite(document), indent=2, ensure_ascii=False)
    print("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def _finite(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))) else value


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


def metric_table(document: Metrics) -> str:
    """Lay metrics by cutoff out with one line per metric and one column per cutoff; use it for people."""

    def rows(block: Mapping[str, Any], before: str = "") -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for name, value in block.items():
            flat |= rows(value, f"{before}{name} ") if isinstance(value, dict) else {before + name: value}
        return flat

    def cell(value: object) -> str:
        if value is None:
            return "-"
        return f"{value:.5f}" if isinstance(value, float) else str(value)

    columns = {cutoff: rows(block) for cutoff, block in document.items()}
    names = list(next(iter(columns.values())))
    width = max(map(len, names))
    lines = [" " * width + "".join(f"{'@' + cutoff:>14}" for cutoff in columns)]
    lines += [f"{name:<{width}}" + "".join(f"{cell(block[name]):>14}" for block in columns.values()) for name in names]
    return "\n".join(lines)


def watched(work: Callable[[], DoneT]) -> DoneT:
    """Do the work of a run; a stop by the user (Ctrl-C, or SIGTERM as a page sends it) is reported in one line."""
    try:
        with ends_as_interrupted():
            return work()
    except Stopped as stop:
        folder = str(stop.folder)
        print(
            f"steelyard: stopped; what is done is in {printable(folder)}; go on with: "
            f"steelyard resume {shlex.quote(folder)}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        print("steelyard: stopped before the run began; nothing was written", file=sys.stderr)
        raise typer.Exit(130) from None


def write_own_report(result: Result) -> None:
    """Write the report of a run into its folder."""
    # For speed of start: what draws is large.
    from steelyard.report.html import write_report
    from steelyard.report.view import RunView

    with doing("writing the report"):
        write_report(RunView([result.history]), result.folder / REPORT)


def report_line(folder: str, written: bool) -> str:
    """Say where the report of a run is, or how to make it."""
    if written:
        return f"report to open: {printable(str(Path(folder) / REPORT))}"
    return f"a report to open: steelyard report {shlex.quote(folder)}"


def finish(work: Callable[[], Result], format: str, report: bool = False) -> None:
    """Do the work of a command that runs an experiment and print its summary; use it for every such command."""
    result = watched(work)
    with doing("summing up"):
        summary = result.summary
    if report:
        write_own_report(result)
    if format == "json":
        print_json(summary)
    else:
        # For speed of start: tables are drawn only at the end of a run.
        from steelyard.cli.tables import show_summary

        show_summary(summary)
        print(report_line(str(result.folder), report))
