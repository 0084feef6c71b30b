"""Serving the page: the address, what is refused before anything listens, and the end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from urllib.parse import urlencode

import uvicorn

from steelyard.base.errors import UserError, told_as
from steelyard.base.logs import logger
from steelyard.federate.server_folder import server_folder
from steelyard.page.app import create_app
from steelyard.page.guard import Keys
from steelyard.page.jobs import Jobs
from steelyard.page.server import ServerView
from steelyard.report.figures.look import bundle

_log = logger(__name__)

SHORTEST = 16
"""Characters of a token at least."""


def _warm() -> None:
    """Do what takes seconds the first time, so that the first visitor does not wait for libraries or for Vega."""
    for name in ("pandas", "scipy.stats"):
        import_module(name)
    bundle()


class _Server(uvicorn.Server):
    """Informs open streams when the end was asked for, so that they do not hold it up."""

    ending = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note that the end was asked for, then do what uvicorn does."""
        self.ending = True
        super().handle_exit(sig, frame)


def keys_with(token: str | None) -> Keys:
    """Return the keys of a page: with a token of the user's own, or with one that is made for this start."""
    if token is None:
        return Keys()
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable():
        raise UserError(f"--token: got {len(token)} characters; allowed: {SHORTEST} or more, plain letters and digits")
    return Keys(token)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 takes any free one."""
    with told_as(f"--host, --port: cannot listen on {host}:{port}"):
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        # At once: whoever reads the address that is printed finds somebody there.
        made.listen(128)
    return made


def serve(
    root: Path,
    *,
    host: str,
    port: int,
    token: str | None,
    announce: Callable[[str], None],
    trust: bool = False,
    read_only: bool = False,
    server: Path | None = None,
) -> None:
    """Serve the page until Ctrl-C; runs that it started go on. `announce` gets the address to open.

    `server` is the folder of a federation's server, which is then shown too.
    """
    keys = keys_with(token)
    if not root.exists():
        root.mkdir(parents=True)
    if not root.is_dir():
        raise UserError(f"{root}: is a file; allowed: a folder, which may be empty")
    jobs = Jobs(root.resolve(), trust=trust, read_only=read_only)
    shown_server = None if server is None else ServerView(server_folder(server), jobs)
    made = listen(host, port)
    shown = f"[{host}]" if ":" in host.strip("[]") else host
    address = f"http://{shown}:{made.getsockname()[1]}/"
    ends = lambda: web.ending or web.should_exit  # noqa: E731
    app = create_app(root.resolve(), host, keys, jobs, ends, shown_server)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        lifespan="off",
        ws="none",
    )
    web = _Server(settings)
    threading.Thread(target=_warm, daemon=True).start()
    announce(f"page over {root}: {address}?{urlencode({'token': keys.token})}")
    announce("Ctrl-C ends the page; runs that it started go on")
    try:
        web.run(sockets=[made])
    except KeyboardInterrupt:
        pass
    finally:
        made.close()
    going = jobs.going()
    if going:
        _log.warning(f"still running: {', '.join(going)}; steelyard top {root} shows them")
