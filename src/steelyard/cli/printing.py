"""Printing results on the command line: a document for programs, or the summary of a run for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from steelyard.api import Result


def print_json(document: Any) -> None:
    """Print one JSON document on standard output; NaN has no place in JSON and becomes null."""
    print(json.dumps(_finite(document), indent=2, ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))) else value


def watched(work: Callable[[], Result]) -> Result:
    """Do the work of a run; a stop by the user is reported in one line."""
    try:
        return work()
    except KeyboardInterrupt:
        print("steelyard: stopped; `steelyard resume` on the run's folder continues it", file=sys.stderr)
        raise typer.Exit(130) from None


def finish(work: Callable[[], Result], format: str) -> None:
    """Do the work of a command that runs an experiment and print its summary; use it for every such command."""
    result = watched(work)
    if format == "json":
        print_json(result.summary)
    else:
        # For speed of start: tables are drawn only at the end of a run.
        from steelyard.cli.tables import show_summary

        show_summary(result.summary)
