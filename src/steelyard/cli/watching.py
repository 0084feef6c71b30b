"""`steelyard ls`, `steelyard top` and `steelyard watch`: looking at runs while they go on and after.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Annotated

import typer

from steelyard.base.errors import UserError
from steelyard.cli.options import FormatOption
from steelyard.cli.printing import print_json

FolderArgument = Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder with runs in it, or a run's own folder.")]


def ls(folder: FolderArgument = Path("runs"), format: FormatOption = "text") -> None:
    """List the runs in a folder: state, progress, accuracy, age and size."""
    from steelyard.runs.glance import glances

    found = glances(folder)
    if format == "json":
        print_json([glance.document() for glance in found])
        return
    from steelyard.cli.lists import show_runs

    show_runs(folder, found)


def top(
    folder: FolderArgument = Path("runs"),
    every: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Watch runs in the terminal: progress, accuracy, who counts most; q or Ctrl-C leaves."""
    from steelyard.cli.top import watch_runs

    if not math.isfinite(every):
        raise UserError(f"--every: got {every}; allowed: a number of seconds, at least 0.2")
    watch_runs(folder, every=every, once=once)


def watch(
    folder: FolderArgument = Path("runs"),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port.")] = 8765,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; other machines reach any but loopback.")
    ] = ("127.0.0.1"),
    token: Annotated[
        str | None,
        typer.Option("--token", help="What a browser must bring, 16 characters or more; default: made and printed."),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Also start and resume experiments that name Python code of their own.")
    ] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Show runs only: nothing is started, stopped or resumed.")
    ] = False,
    server: Annotated[
        Path | None,
        typer.Option("--server", help="Folder of a federation's server: its runs, its queue and its nodes, too."),
    ] = None,
) -> None:
    """Open a page over the runs in a folder, live while they run; Ctrl-C ends it."""
    from steelyard.page import require_page

    require_page()
    if not folder.exists() and folder != Path("runs"):
        raise UserError(f"{folder}: no such folder; allowed: a folder of runs, which may be empty")
    from steelyard.page.serving import serve

    announce = functools.partial(print, flush=True)
    serve(folder, host=host, port=port, token=token, announce=announce, trust=trust, read_only=read_only, server=server)
