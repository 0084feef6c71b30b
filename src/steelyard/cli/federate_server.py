"""`steelyard federate serve`, `register`, `submit`, `list`, `follow`, `stop`, `nodes`, `log`: on the server's machine.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.base.errors import UserError, printable
from steelyard.cli.options import FormatOption, OutOption, SeedOption, SetOption, TrustOption, asking
from steelyard.cli.printing import print_json, terminal_width
from steelyard.federate import require_flower

if TYPE_CHECKING:
    from steelyard.federate.server_folder import ServerFolder, ServerRun

ServerArgument = Annotated[Path, typer.Argument(help="Folder of the server.")]
RunNumber = Annotated[
    int | None, typer.Argument(metavar="[RUN]", help="Number of the run; default: the one that goes on, or the last.")
]


def serve(
    folder: Annotated[Path, typer.Argument(help="Folder of the server: register of keys, database, logs.")],
    tls: Annotated[Path, typer.Option("--tls", help="Folder of `steelyard federate certificates`.")],
    listen: Annotated[str, typer.Option("--listen", help="Address and port for nodes.")] = "0.0.0.0:8000",
) -> None:
    """Serve nodes until you press Ctrl-C; only registered keys come in, and only as nodes."""
    require_flower()
    from steelyard.federate.serving import serve as serve_nodes

    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--listen: got '{listen}'; allowed: ADDRESS:PORT, such as 0.0.0.0:8000")
    serve_nodes(folder, tls, host.strip("[]"), int(port))


def register(
    folder: Annotated[Path, typer.Argument(help="Folder of the server.")],
    key: Annotated[Path | None, typer.Argument(help="The node's public key, FILE.pub.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the node; default: the file's name.")] = None,
    clients: Annotated[
        list[str] | None, typer.Option("--client", help="A client that only this key may hold. May be given again.")
    ] = None,
    most: Annotated[int, typer.Option("--most", min=1, help="Without --client: how many clients it may hold.")] = 1,
    gone: Annotated[str | None, typer.Option("--remove", help="Name of a node that is to be let in no longer.")] = None,
) -> None:
    """Register a node's key on the server's machine; a running server notices at once."""
    require_flower()
    from steelyard.clients.flower.register import FILE, Entry, enter, remove
    from steelyard.proof.signing import read_public_key

    file = folder / FILE
    if gone is not None:
        remove(file, gone)
        print(f"{gone} is let in no longer")
        return
    if key is None:
        raise UserError("KEY: got none; allowed: the .pub file of a node, or --remove NAME")
    name = key.name.removesuffix(".pub") if name is None else name
    entry = Entry(name, read_public_key(key), tuple(clients or ()), most)
    enter(file, entry)
    held = f"the clients {', '.join(entry.clients)}" if entry.clients else f"up to {most} clients"
    print(f"{entry.name} may hold {held}")


def submit(
    folder: Annotated[Path, typer.Argument(help="Folder of the server, which must be serving.")],
    experiment: Annotated[str, typer.Argument(help="Recipe or TOML file, or the folder of a run to go on with.")],
    changes: SetOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    trust: TrustOption = False,
) -> None:
    """Put a run into the queue of a server of this machine and show its rounds; a run folder is gone on with."""
    require_flower()
    from steelyard.experiment.loading import load, read_experiment
    from steelyard.federate.server_folder import submit as submit_run

    run = Path(experiment)
    if run.is_dir():
        stopped = read_experiment(run)
        if code := stopped.named_code():
            asking(trust)(experiment, code)
        _follow(submit_run(folder, stopped, out=run, resume=True))
    else:
        _follow(submit_run(folder, load(experiment, changes or [], seed, asking(trust)), out=out))


def list_runs(server: ServerArgument, format: FormatOption = "text") -> None:
    """List the runs of a server: which wait, which goes on, how far it is, how the others ended."""
    from steelyard.federate.server_folder import runs_of

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
    from steelyard.federate.server_folder import find_run

    _follow(find_run(_home(server), run))


def stop(server: ServerArgument, run: RunNumber = None) -> None:
    """Stop a run, or take it out of the queue; what is done is kept, and submitting its folder goes on with it."""
    from steelyard.federate.server_folder import find_run

    found = find_run(_home(server), run)
    if not found.is_open:
        raise UserError(f"RUN: run {found.number} has ended ({found.status()}); allowed: one that waits or goes on")
    found.ask_to_stop()
    print(f"run {found.number} is stopped; {found.advice()}")


def nodes(server: ServerArgument, format: FormatOption = "text") -> None:
    """List the registered nodes: when each was last there, its clock, its versions, and what it last refused."""
    from steelyard.federate.contacts import nodes_of

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
    from steelyard.federate.server_folder import find_run, lines_of

    for line in lines_of(find_run(_home(server), run)):
        if line is None:
            return
        print(printable(line))


def _follow(run: ServerRun) -> None:
    """Follow a run until it ends; an interrupt ends the following alone, and says so."""
    from steelyard.federate.server_folder import follow as until_it_ends

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
