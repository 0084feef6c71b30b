"""`steelyard ls` and `steelyard top`: looking at runs while they go on and after.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from steelyard.cli.printing import print_json

app = typer.Typer(pretty_exceptions_enable=False)

FolderArgument = Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder with runs in it, or a run's own folder.")]


@app.command("ls")
def ls(
    folder: FolderArgument = Path("runs"),
    format: Annotated[Literal["text", "json"], typer.Option("--format", help="text, or json for programs.")] = "text",
) -> None:
    """List the runs in a folder: state, progress, accuracy, age and size."""
    from steelyard.runs.glance import glances

    found = glances(folder)
    if format == "json":
        print_json([glance.document() for glance in found])
        return
    from steelyard.cli.lists import show_runs

    show_runs(folder, found)


@app.command("top")
def top(
    folder: FolderArgument = Path("runs"),
    every: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Watch runs in the terminal: progress, accuracy, who counts most; q or Ctrl-C leaves."""
    from steelyard.cli.top import watch_runs

    watch_runs(folder, every=every, once=once)
