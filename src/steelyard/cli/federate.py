"""`steelyard federate ...`: app folders, trying a federation on this machine, certificates and keys.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from steelyard.base.errors import in_words, printable
from steelyard.base.logs import quiet
from steelyard.cli import federate_server
from steelyard.cli.finishing import finish
from steelyard.cli.options import (
    ExperimentArgument,
    FormatOption,
    OutOption,
    SeedOption,
    SetOption,
    TrustOption,
    asking,
)
from steelyard.cli.printing import print_json
from steelyard.federate import require_flower

app = typer.Typer(
    name="federate",
    help="Run an experiment across machines, on Flower.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.command("serve")(federate_server.serve)
app.command("register")(federate_server.register)
app.command("submit")(federate_server.submit)
app.command("list")(federate_server.list_runs)
app.command("follow")(federate_server.follow)
app.command("stop")(federate_server.stop)
app.command("nodes")(federate_server.nodes)
app.command("log")(federate_server.log)


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
    from steelyard.experiment.loading import load
    from steelyard.federate.app_folder import CONNECTION, write_app

    described = load(experiment, changes or [], seed, asking(trust), whole_paths=False)
    certificate = None if authority is None else authority.resolve()
    for file in write_app(folder, described, address=address, authority=certificate):
        print(printable(str(file)))
    home, app = shlex.quote(f"{folder.resolve()}/.flwr"), shlex.quote(str(folder))
    print(f"next: FLWR_HOME={home} flwr run {app} {CONNECTION} --stream")


@app.command("local")
def local(
    experiment: ExperimentArgument,
    nodes: Annotated[int, typer.Option("--nodes", help="Number of nodes; clients are shared out among them.")] = 4,
    tls: Annotated[bool, typer.Option("--tls", help="Make certificates and register node keys.")] = False,
    changes: SetOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    trust: TrustOption = False,
    format: FormatOption = "text",
) -> None:
    """Start a server and nodes on this machine, run the experiment, and end them."""
    from steelyard.experiment.loading import load

    require_flower()
    from steelyard.federate.local import run_local
    from steelyard.result import Result

    described = load(experiment, changes or [], seed, asking(trust))
    finish(lambda: Result(run_local(described, nodes=nodes, tls=tls, out=out, progress=not quiet())), format)


@app.command("node")
def node(file: Annotated[Path, typer.Argument(help="The node's own TOML file.")]) -> None:
    """Take part in a federation as a node, by the rules in the node's own file, until you press Ctrl-C."""
    require_flower()
    from steelyard.federate.node import run_node

    run_node(file)


@app.command("ledger")
def ledger(
    file: Annotated[Path, typer.Argument(help="The node's own TOML file.")], format: FormatOption = "text"
) -> None:
    """Show what a node's answers with noise have given away so far, by run and rule, from its ledger."""
    require_flower()
    from steelyard.federate.node import ledger_of
    from steelyard.federate.node_ledger import epsilon_of, standing
    from steelyard.privacy.settings import OWNERS_DELTA

    kept = ledger_of(file)
    entries = kept.entries()
    if format == "json":
        answers = [entry.model_dump() for entry in entries]
        standing_now = {"epsilon": epsilon_of(entries), "limit": kept.most, "delta": OWNERS_DELTA, "answers": answers}
        print_json({"ledger": str(kept.path), **standing_now})
        return
    for run, federation in dict.fromkeys((entry.run, entry.federation) for entry in entries):
        mine = [entry for entry in entries if (entry.run, entry.federation) == (run, federation)]
        print(printable(f"{standing(mine)} to {in_words(federation)} of run {run}"))
    print(f"{standing(entries, kept.most)} in all (delta {OWNERS_DELTA:g})")


@app.command("receipts")
def show_receipts(
    state: Annotated[Path, typer.Argument(help="The node's state folder.")],
    run: Annotated[Path | None, typer.Option("--run", help="A run's folder: is what the node signed in it?")] = None,
    keys: Annotated[Path | None, typer.Option("--keys", help="Folder with the server.pub that you trust.")] = None,
) -> None:
    """Show what a node signed, round by round, and whether a run holds it; ends with 0 (took part), 1 (did not) or 2
    (the run differs).
    """
    from steelyard.federate.receipts import CODES, listed, prove
    from steelyard.proof.signing import Keys

    trusted = None if keys is None else Keys.read(keys)
    found = listed(state, trusted) if run is None else prove(state, run, trusted)
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
