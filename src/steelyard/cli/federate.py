"""`steelyard federate ...`: serving and following a federation, app folders, trying one here, certificates, keys.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.base.errors import UserError, in_words, printable
from steelyard.base.logs import quiet
from steelyard.cli.options import (
    ExperimentArgument,
    FormatOption,
    OutOption,
    SeedOption,
    SetOption,
    TrustOption,
    asking,
)
from steelyard.cli.printing import emit, finish, next_step
from steelyard.clients.flower.register import FILE, Entry, enter, remove
from steelyard.experiment.loading import load, read_experiment
from steelyard.federate import require_flower
from steelyard.federate.app_folder import CONNECTION, write_app
from steelyard.federate.book import CODES, epsilon_of, prove_receipts, receipts_of, standing
from steelyard.federate.queue import find_run, lines_of, runs_of, server_folder
from steelyard.federate.queue import follow as until_it_ends
from steelyard.federate.queue import submit as submit_run
from steelyard.federate.standing import nodes_of
from steelyard.privacy.settings import OWNERS_DELTA
from steelyard.proof.signing import Keys, read_public_key
from steelyard.report.rendering import Table
from steelyard.result import Result
from steelyard.runs.history import History

if TYPE_CHECKING:
    from steelyard.federate.queue import ServerFolder, ServerRun


ServerArgument = Annotated[Path, typer.Argument(help="Folder of the server.")]
RunNumber = Annotated[
    int | None, typer.Argument(metavar="[RUN]", help="Number of the run (default: the current one, or the last).")
]


def serve(
    folder: Annotated[Path, typer.Argument(help="Folder of the server: register of keys, database, logs.")],
    tls: Annotated[Path, typer.Option("--tls", help="Folder of `steelyard federate certificates`.")],
    listen: Annotated[str, typer.Option("--listen", help="Address and port for nodes.")] = "0.0.0.0:8000",
) -> None:
    """Serve nodes until you press Ctrl-C; only registered keys come in, and only as nodes."""
    require_flower()
    from steelyard.federate.server import serve as serve_nodes

    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--listen: got '{listen}'; allowed: ADDRESS:PORT, such as 0.0.0.0:8000")
    serve_nodes(folder, tls, host.strip("[]"), int(port))


def register(
    folder: Annotated[Path, typer.Argument(help="Folder of the server.")],
    key: Annotated[Path | None, typer.Argument(help="The node's public key, FILE.pub.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the node (default: the file's name).")] = None,
    clients: Annotated[
        list[str] | None, typer.Option("--client", help="A client that only this key may hold. May be given again.")
    ] = None,
    most: Annotated[int, typer.Option("--most", min=1, help="Without --client: how many clients it may hold.")] = 1,
    gone: Annotated[str | None, typer.Option("--remove", help="Name of a node that is to be let in no longer.")] = None,
) -> None:
    """Register a node's key on the server's machine; a running server notices at once."""
    require_flower()

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
    experiment: Annotated[str, typer.Argument(help="Recipe or TOML file, or the folder of a run to resume.")],
    changes: SetOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    trust: TrustOption = False,
) -> None:
    """Put a run into the queue of a server of this machine and show its rounds, or resume the run in a folder."""
    require_flower()

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
    home = _home(server)
    found = [run.document() for run in runs_of(home)]
    rows = tuple(
        (
            str(run["run"]),
            run["status"],
            f"{run['round']}/{run['rounds']}",
            run["name"] or "",
            run["folder"],
            run["line"] if run["line"] and run["status"] != "finished" else "",
        )
        for run in found
    )
    table = Table("", ("run", "status", "round", "name", "folder", ""), rows, names=6)
    emit({"served": home.is_served(), "runs": found}, format, [table])
    if not home.is_served():
        print("no server runs here now", file=sys.stderr)


def follow(server: ServerArgument, run: RunNumber = None) -> None:
    """Show the rounds of a run as they come, until it ends; Ctrl-C leaves the run alone."""
    _follow(find_run(_home(server), run))


def stop(server: ServerArgument, run: RunNumber = None) -> None:
    """Stop a run, or take it out of the queue; what is done is kept, and submitting its folder goes on with it."""
    found = find_run(_home(server), run)
    if not found.is_open:
        raise UserError(f"RUN: run {found.number} has ended ({found.status()}); allowed: one that waits or runs")
    found.ask_to_stop()
    print(f"run {found.number} is stopped; {found.advice()}")


def nodes(server: ServerArgument, format: FormatOption = "text") -> None:
    """List the registered nodes: when each was last there, its clock, its versions, and what it last refused."""
    found = nodes_of(_home(server))
    rows = tuple(
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
    )
    headings = ("node", "status", "last contact", "clock", "steelyard", "flwr", "refused last")
    emit({"nodes": found}, format, [Table("", headings, rows, names=7)])


def log(server: ServerArgument, run: RunNumber = None) -> None:
    """Print all that the server's part of a run wrote."""
    for line in lines_of(find_run(_home(server), run)):
        if line is None:
            return
        print(printable(line))


def _follow(run: ServerRun) -> None:
    """Follow a run until it ends; an interrupt ends the following alone, and says so."""
    try:
        folder = until_it_ends(run)
        for line in (str(folder), *next_step(str(folder), "table", has_model=History(folder).facts.has_model)):
            print(printable(line))
    except KeyboardInterrupt:
        show, end = (run.server.command(name, str(run.number)) for name in ("follow", "stop"))
        print(
            f"steelyard: run {run.number} continues without you; `{show}` shows it again, `{end}` stops it",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


def _home(server: Path) -> ServerFolder:
    return server_folder(server)


# App folders, a federation on this machine, certificates and keys.


app = typer.Typer(no_args_is_help=True, add_completion=False)

app.command("serve")(serve)
app.command("register")(register)
app.command("submit")(submit)
app.command("list")(list_runs)
app.command("follow")(follow)
app.command("stop")(stop)
app.command("nodes")(nodes)
app.command("log")(log)


@app.command("init")
def init(
    folder: Annotated[Path, typer.Argument(help="New folder for the Flower app.")],
    experiment: ExperimentArgument = "quickstart",
    changes: SetOption = None,
    seed: SeedOption = None,
    address: Annotated[str, typer.Option("--superlink", help="Where the SuperLink listens.")] = "127.0.0.1:8000",
    authority: Annotated[
        Path | None, typer.Option("--root-certificates", help="ca.pem of the SuperLink; without it: no TLS.")
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Write a ready Flower app folder for an experiment; `flwr run` starts it."""
    described = load(experiment, changes or [], seed, asking(trust), whole_paths=False)
    certificate = None if authority is None else authority.resolve()
    for file in write_app(folder, described, address=address, authority=certificate):
        print(printable(str(file)))
    home, app = shlex.quote(f"{folder.resolve()}/.flwr"), shlex.quote(str(folder))
    print(f"next: FLWR_HOME={home} flwr run {app} {CONNECTION} --stream")


@app.command("local")
def local(
    experiment: ExperimentArgument,
    nodes: Annotated[int, typer.Option("--nodes", help="Number of nodes; clients are split among them.")] = 4,
    tls: Annotated[bool, typer.Option("--tls", help="Make certificates and register node keys.")] = False,
    changes: SetOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Start a server and nodes on this machine, run the experiment, and end them."""
    require_flower()
    from steelyard.federate.local import run_local

    described = load(experiment, changes or [], seed, asking(trust))
    finish(lambda: Result(run_local(described, nodes=nodes, tls=tls, out=out, progress=not quiet())), format)


@app.command("node")
def node(file: Annotated[Path, typer.Argument(help="The node's own TOML file.")]) -> None:
    """Take part in a federation as a node, by the rules in the node's own file, until you press Ctrl-C."""
    require_flower()
    from steelyard.federate.node import run_node

    run_node(file)


@app.command("model")
def model(
    file: Annotated[Path, typer.Argument(help="The node's own TOML file.")],
    out: Annotated[Path, typer.Option("--out", help="The model's own folder; it must not be there yet.")],
    format: FormatOption = "text",
) -> None:
    """Take the last global model that this node received, with what its own rows go through (keep-model = true)."""
    require_flower()
    from steelyard.cli.models import saved
    from steelyard.federate.own_model import take

    saved(take(file), out, format)


@app.command("ledger")
def ledger(
    file: Annotated[Path, typer.Argument(help="The node's own TOML file.")], format: FormatOption = "text"
) -> None:
    """Show what a node's answers with noise have given away so far, by run and rule, from its ledger."""
    require_flower()
    from steelyard.federate.node import ledger_of

    kept = ledger_of(file)
    entries = kept.entries()
    answers = [entry.model_dump() for entry in entries]
    standing_now = {"epsilon": epsilon_of(entries), "limit": kept.most, "delta": OWNERS_DELTA, "answers": answers}
    lines: list[str] = []
    for run, federation in dict.fromkeys((entry.run, entry.federation) for entry in entries):
        mine = [entry for entry in entries if (entry.run, entry.federation) == (run, federation)]
        lines.append(f"{standing(mine)} to {in_words(federation)} of run {run}")
    lines.append(f"{standing(entries, kept.most)} in all (delta {OWNERS_DELTA:g})")
    emit({"ledger": str(kept.path), **standing_now}, format, lines)


@app.command("receipts")
def show_receipts(
    state: Annotated[Path, typer.Argument(help="The node's state folder.")],
    run: Annotated[Path | None, typer.Option("--run", help="A run's folder: is what the node signed in it?")] = None,
    keys: Annotated[Path | None, typer.Option("--keys", help="Folder with the server.pub that you trust.")] = None,
) -> None:
    """Show what a node signed, round by round, and whether a run holds it; ends with 0 (took part), 1 (did not) or 2
    (the run differs).
    """

    trusted = None if keys is None else Keys.read(keys)
    found = receipts_of(state, trusted) if run is None else prove_receipts(state, run, trusted)
    for answer in found:
        print(printable(answer.line()))
    raise typer.Exit(max(CODES[answer.outcome] for answer in found))


@app.command("certificates")
def certificates(
    folder: Annotated[Path, typer.Argument(help="Folder for ca.pem, ca.key, server.pem and server.key.")],
    hosts: Annotated[
        list[str] | None, typer.Option("--host", help="Name or address of the server. May be given again.")
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="A new server certificate by the same authority; nodes need no new file.")
    ] = False,
    authority_key: Annotated[
        Path | None, typer.Option("--authority-key", help="With --renew: ca.key, where it lies elsewhere.")
    ] = None,
) -> None:
    """Make the certificates of a server: an authority of your own and a server certificate, good for a year."""
    require_flower()
    from steelyard.federate.certificates import make_certificates, renew_certificate

    if renew:
        made = renew_certificate(folder, hosts or [], authority_key)
        paths = (made.certificate, made.key)
    else:
        made = make_certificates(folder, hosts or [])
        paths = (made.authority, made.authority_key, made.certificate, made.key)
    for path in paths:
        print(printable(str(path)))


@app.command("key")
def key(
    file: Annotated[Path, typer.Argument(help="New file for the private key; FILE.pub gets the public one.")],
) -> None:
    """Make the key pair of a node."""
    require_flower()
    from steelyard.federate.certificates import make_key

    private, public = make_key(file)
    print(f"{printable(str(private))}\n{printable(str(public))}")
