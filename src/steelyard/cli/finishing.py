"""What every command does that runs something: a stop in one line, a summary at the end, the report if asked."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from steelyard.base import files
from steelyard.base.errors import Stopped, ends_as_interrupted, printable
from steelyard.base.logs import doing, logger
from steelyard.cli.printing import print_json

if TYPE_CHECKING:
    from steelyard.result import Result

_log = logger(__name__)

DoneT = TypeVar("DoneT")


def watched(work: Callable[[], DoneT]) -> DoneT:
    """Do the work of a run; a stop by the user (Ctrl-C, or SIGTERM as a page sends it) is reported in one line."""
    try:
        with ends_as_interrupted():
            return work()
    except Stopped as stop:
        folder = str(stop.folder)
        how = "the same command and --out" if stop.again else "steelyard resume"
        _log.error(f"stopped; what is done is in {folder}; go on with: {how} {shlex.quote(folder)}")
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        _log.error("stopped before the run began; nothing was written")
        raise typer.Exit(130) from None


def write_own_report(result: Result, baseline: str | None = None) -> None:
    """Write the report of a run into its folder; `baseline` is the rule that the others are compared with."""
    # For speed of start: what draws is large.
    from steelyard.report.html import write_report
    from steelyard.report.view import RunView

    with doing("writing the report"):
        write_report(RunView([result.history], baseline), result.folder / files.REPORT)


def report_line(folder: str, written: bool) -> str:
    """Say where the report of a run is, or how to make it."""
    if written:
        return f"report to open: {printable(str(Path(folder) / files.REPORT))}"
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
        from steelyard.cli.summaries import show_summary

        show_summary(summary)
        print(report_line(str(result.folder), report))
