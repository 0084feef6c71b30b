"""`steelyard federate serve`, `register` and `submit`: what is done on the server's machine.

What is heavy is imported inside the commands, for speed of start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.federate_console import follow_run
from steelyard.cli.options import OutOption, SeedOption, SetOption, TrustOption, asking
from steelyard.errors import UserError
from steelyard.federate import require_flower


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
    from steelyard.signing import read_public_key

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
    from steelyard.federate.submitting import submit as submit_run

    run = Path(experiment)
    if run.is_dir():
        stopped = read_experiment(run)
        if code := stopped.named_code():
            asking(trust)(experiment, code)
        follow_run(submit_run(folder, stopped, out=run, resume=True))
    else:
        follow_run(submit_run(folder, load(experiment, changes or [], seed, asking(trust)), out=out))
