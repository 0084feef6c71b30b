"""`steelyard federate node`: takes part in a federation with the installed client app, by the node's own rules."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.logs import logger, show
from steelyard.clients.node import FILES, KEYS, NodeConfig
from steelyard.experiment.node_rows import check_own
from steelyard.federate.node_ledger import NodeLedger
from steelyard.federate.node_link import NodeLink, Server
from steelyard.federate.node_workers import Workers, WorkersSpec

_log = logger(__name__)

_OWN = ("server", "ca", "insecure")
"""Keys of a node's file that say where the server is; all others are its `NodeConfig`."""

_LEAVING_SECONDS = 4.0
"""How long a node that is to stop may go on with what it was asked; a local federation kills it after eight."""
_TESTED = "tests of models are answered without noise, and epsilon does not cover them; tests = false answers none"
"""What the owner of a node with a limit should know when it starts."""


def read_node(file: Path) -> tuple[Server, dict[str, Any]]:
    """Return the server and the configuration that a node's TOML file describes; paths are meant from that file."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}; allowed: a node's TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not TOML: {error}") from None
    for key in document:
        if key not in _OWN and key not in KEYS and not key.startswith(("device-", "user-")):
            known = [*_OWN, *KEYS]
            raise UserError(f"{file}: {key}: unknown{nearest(key, known)}; allowed: {listed(known)}, device-*, user-*")
    config = {key: value for key, value in document.items() if key not in _OWN}
    table = config.get("data")
    for holder, key in [*((config, key) for key in (*FILES, "state", "key")), (table, "path")]:
        if isinstance(holder, dict) and isinstance(holder.get(key), str) and holder[key]:
            holder[key] = str(file.parent.resolve() / holder[key])
    if "allow" in config:
        config["allow"] = [_own_code(code, file.parent.resolve()) for code in NodeConfig.read(config).allow]
    check_own(NodeConfig.read(config))
    return _server(file, document), config


def _own_code(code: str, folder: Path) -> str:
    """Return allowed code with the whole path of its file."""
    source, colon, name = code.rpartition(":") if not code.endswith(".py") else (code, "", "")
    return f"{folder / source}{colon}{name}" if source.endswith(".py") else code


def _server(file: Path, document: Mapping[str, Any]) -> Server:
    address = document.get("server")
    if not isinstance(address, str) or not address.rpartition(":")[2].isdigit():
        raise UserError(f'{file}: server: got {address!r}; allowed: the server\'s address and port, "10.0.0.1:8000"')
    if document.get("insecure") is True:
        return Server(address)
    paths: dict[str, Path] = {}
    for key in ("ca", "key"):
        value = document.get(key)
        if not isinstance(value, str) or not (file.parent / value).is_file():
            raise UserError(
                f"{file}: {key}: got {value!r}; allowed: the path of a file (or insecure = true, without TLS)"
            )
        paths[key] = file.parent.resolve() / value
    return Server(address, paths["ca"], paths["key"])


def run_nodes(
    servers: Sequence[Server], configs: Sequence[Mapping[str, Any]], *, experiment: str = "", threads: int = 0
) -> None:
    """Take part until SIGINT or SIGTERM, one thread and one worker per node; raises where no node is wanted.

    What takes longer than some seconds then is given up: the server hears that the node has left.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    spec = WorkersSpec([dict(config) for config in configs], experiment, threads)
    workers = Workers(spec)
    faults: list[str] = []

    def take_part(link: NodeLink, number: int) -> None:
        try:
            link.run()
        except UserError as error:
            faults.append(str(error))
            _log.error(f"node {number}: {error}")

    try:
        links = [NodeLink(server, workers, number, stop) for number, server in enumerate(servers)]
        # Daemons: one whose call is held by the server is not waited for at the end.
        running = [
            threading.Thread(target=take_part, args=(link, number), name=f"node-{number}", daemon=True)
            for number, link in enumerate(links)
        ]
        for thread in running:
            thread.start()
        busy, asked = list(zip(running, links, strict=True)), 0.0
        while busy:
            # Short waits, so that signals are noticed in between.
            busy[0][0].join(0.2)
            asked = asked or (time.monotonic() if stop.is_set() else 0.0)
            late = asked and time.monotonic() - asked > _LEAVING_SECONDS
            for thread, link in [one for one in busy if asked and (late or one[1].is_waiting)]:
                link.leave()
                busy.remove((thread, link))
            busy = [(thread, link) for thread, link in busy if thread.is_alive()]
    finally:
        stop.set()
        workers.close()
    if faults and len(faults) == len(running):
        raise UserError(faults[0])


def ledger_of(file: Path) -> NodeLedger:
    """Return the ledger of the node that a file describes; what `steelyard federate ledger` shows."""
    found = NodeLedger.of(NodeConfig.read(read_node(file)[1]))
    if found is None:
        raise UserError(f'{file}: keeps no ledger; allowed: require = "local" with state = "FOLDER"')
    return found


def run_node(file: Path) -> None:
    """Take part as a node's file says; what `steelyard federate node` does."""
    server, config = read_node(file)
    os.umask(0o077)  # What a node writes is its owner's alone.
    own = NodeConfig.read(config)
    ledger = NodeLedger.of(own)
    if ledger is not None:
        _log.info(f"ledger: {ledger.open()}")
    if own.epsilon is not None and own.tests:
        _log.warning(_TESTED)
    if own.guards_rows:
        _log.info(f"no answer rests on fewer than {own.min_rows} rows of {own.data} (min-rows)")
    _log.info(f"taking part at {server.address}; Ctrl-C leaves")
    run_nodes([server], [config])


def main(file: Path) -> int:
    """Take part as the several nodes on this machine that a JSON file describes; their workers are forked with the data
    loaded: python -m steelyard.federate.node FILE.
    """
    show()
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    try:
        servers = [Server(one["address"], _path(one["authority"]), _path(one["key"])) for one in document["servers"]]
        run_nodes(servers, document["configs"], experiment=document["experiment"], threads=1)
    except UserError as error:
        _log.error(error)
        return 2
    return 0


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
