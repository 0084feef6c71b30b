"""`steelyard federate list`, `follow`, `stop`, `nodes` and `log`: what an operator does on the server's machine.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.options import FormatOption
from steelyard.cli.printing import print_json, terminal_width
from steelyard.errors import UserError, printable

if TYPE_CHECKING:
    from steelyard.federate.server_folder import ServerFolder
    from steelyard.federate.server_runs import ServerRun

ServerArgument = Annotated[Path, typer.Argument(help="Folder of the server.")]
RunNumber = Annotated[
    int | None, typer.Argument(metavar="[RUN]", help="Number of the run; default: the one that goes on, or the last.")
]


def list_runs(server: ServerArgument, format: FormatOption = "text") -> None:
    """List the runs of a server: which wait, which goes on, how far it is, how the others ended."""
    from steelyard.federate.server_runs import runs_of

    home = _home(server)
    found = [run.document() for run in runs_of(home)]
    if format == "json":
        print_json({"served": home.is_served(), "runs": found})
        return
    rows = [
        (
            str(run["run"]),
            run["status"],
            f"{run['round']}/{run['rounds']}",
            run["name"] or "",
            run["folder"],
            run["line"] or "",
        )
        for run in found
    ]
    _print_table(("run", "status", "round", "name", "folder", ""), rows)
    if not home.is_served():
        print("nobody serves this folder now", file=sys.stderr)


def follow(server: ServerArgument, run: RunNumber = None) -> None:
    """Show the rounds of a run as they come, until it ends; Ctrl-C leaves the run alone."""
    from steelyard.federate.server_runs import find_run

    follow_run(find_run(_home(server), run))


def stop(server: ServerArgument, run: RunNumber = None) -> None:
    """Stop a run, or take it out of the queue; what is done is kept, and submitting its folder goes on with it."""
    from steelyard.federate.server_runs import find_run

    found = find_run(_home(server), run)
    if not found.is_open:
        raise UserError(f"RUN: run {found.number} has ended ({found.status()}); allowed: one that waits or goes on")
    found.ask_to_stop()
    print(f"run {found.number} is stopped; {found.advice()}")


def nodes(server: ServerArgument, format: FormatOption = "text") -> None:
    """List the registered nodes: when each was last there, its clock, its versions, and what it last refused."""
    from steelyard.federate.server_nodes import nodes_of

    found = nodes_of(_home(server))
    if format == "json":
        print_json({"nodes": found})
        return
    rows = [
        (
            node["name"],
            node["status"],
            node["last"] or "never",
            "" if node["clock"] is None else f"{node['clock']:+.0f} s",
            node["steelyard"] or "",
            node["flower"] or "",
            node["refused"] or "",
        )
        for node in found
    ]
    _print_table(("node", "status", "last contact", "clock", "steelyard", "flwr", "refused last"), rows)


def log(server: ServerArgument, run: RunNumber = None) -> None:
    """Print all that the server's part of a run wrote."""
    from steelyard.federate.server_runs import find_run
    from steelyard.federate.submitting import lines_of

    for line in lines_of(find_run(_home(server), run)):
        if line is None:
            return
        print(printable(line))


def follow_run(run: ServerRun) -> None:
    """Follow a run until it ends; an interrupt ends the following alone, and says so."""
    from steelyard.federate.submitting import follow as until_it_ends

    try:
        print(printable(str(until_it_ends(run))))
    except KeyboardInterrupt:
        show, end = (run.server.command(name, str(run.number)) for name in ("follow", "stop"))
        print(
            f"steelyard: run {run.number} goes on without you; `{show}` shows it again, `{end}` stops it",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


def _home(server: Path) -> ServerFolder:
    from steelyard.federate.server_folder import server_folder

    return server_folder(server)


def _print_table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from steelyard.report.rendering import Table, as_text

    print(as_text(Table("", headings, tuple(rows), names=len(headings)), terminal_width()).strip("\n"))
