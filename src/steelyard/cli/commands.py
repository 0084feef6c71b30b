"""The options that every command takes, before its name and after it: how much is said, and a file for all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard import logs
from steelyard.errors import UserError

_PANEL = "Messages"
_LEVEL = "steelyard.level"


def _level(context: typer.Context, level: str) -> None:
    if context.meta.setdefault(_LEVEL, level) != level:
        raise UserError("--verbose, --quiet: got both; allowed: one of them")
    logs.show(level)


def _verbose(context: typer.Context, given: bool) -> None:
    if given:
        _level(context, "debug")


def _quiet(context: typer.Context, given: bool) -> None:
    if given:
        _level(context, "warning")


def _log_file(path: Path | None) -> None:
    if path is not None:
        logs.show(file=path)


VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", callback=_verbose, help="Also say each step.", rich_help_panel=_PANEL)
]
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", callback=_quiet, help="Show no progress; warnings and errors only.", rich_help_panel=_PANEL
    ),
]
LogFileOption = Annotated[
    Path | None,
    typer.Option(
        "--log-file", callback=_log_file, help="Add every message, with its time, to a file.", rich_help_panel=_PANEL
    ),
]


def share_options(root: Any) -> None:
    """Have every command below take the options on messages that the root takes; they act when they are read."""
    shared = [option for option in root.params if option.name in ("verbose", "quiet", "log_file")]
    for option in shared:
        option.expose_value = False
    waiting = list(root.commands.values())
    while waiting:
        command = waiting.pop()
        command.params.extend(shared)
        waiting += getattr(command, "commands", {}).values()
