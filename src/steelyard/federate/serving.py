"""`steelyard federate serve`: a SuperLink on loopback, the proxy before it, the keys of the register, and the runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn

from steelyard.base.errors import UserError, ends_as_interrupted
from steelyard.base.logs import logger
from steelyard.clients.flower.adapter.superlink import SuperLinkControl
from steelyard.clients.flower.register import REGISTER, Entry, RegisterFile
from steelyard.federate.app_folder import connection_file
from steelyard.federate.bounded import BoundedLoop, BoundedProtocol, allow_many_files
from steelyard.federate.certificates import check_certificates, days_left, make_key
from steelyard.federate.processes import LAUNCHER, Process, end_all, environment, reserved_port, start_superlink
from steelyard.federate.proxy import NodeProxy
from steelyard.federate.run_queue import RunQueue
from steelyard.federate.server_folder import ServerFolder
from steelyard.proof.signing import HEAD_KEY

_log = logger(__name__)

_START_SECONDS = 120.0
_LOOK_SECONDS = 0.5
_DRAIN_SECONDS = 3
_JOIN_SECONDS = 5.0
_WARN_DAYS = 30
_CONFLICT = 409
_LARGEST_HEAD = 32 << 10
"""Most bytes of a call's headers; a node's have about one thousand."""


def serve(folder: Path, certificates: Path, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM: nodes come in through the proxy; whoever is on this machine submits runs."""
    home, certificates = ServerFolder(folder.resolve()), certificates.resolve()
    check_certificates(certificates)
    if (days := days_left(certificates)) < _WARN_DAYS:
        again = f"`steelyard federate certificates {certificates} --renew`, then serve again"
        _log.warning(f"{certificates}/server.pem is good for {days:.0f} more days; {again}")
    home.make()
    allow_many_files()
    with home.held(), _listening(host, port) as listener, _superlink(home, certificates) as (superlink, address):
        authority = certificates / "ca.pem"
        control = SuperLinkControl(address, authority.read_bytes())
        application = NodeProxy(address, authority, home)
        server = uvicorn.Server(_settings(application, certificates))
        registrar, queue = Registrar(control, RegisterFile(home.register)), RunQueue(home, control)
        registrar.look()  # Before the first node calls: one whose key is not known is turned away.
        _log.info(f"nodes come in at {host}:{port}; runs are submitted on this machine only")
        looks = [registrar.look, queue.look, application.report]
        threads = [threading.Thread(target=_repeat, args=(server, superlink, look), daemon=True) for look in looks]
        for thread in threads:
            thread.start()
        try:
            with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=BoundedLoop) as runner:
                runner.run(server.serve(sockets=[listener]))
        finally:
            # Whoever looks after the runs must not take their end with us for an end of their own.
            queue.close()
            server.should_exit = True
            for thread in threads:
                thread.join(_JOIN_SECONDS)
        if superlink.code is not None:
            # Whoever is killed has no last words; those of others in its log would mislead.
            words = f"log {superlink.log}" if superlink.code < 0 else superlink.tail() or f"log {superlink.log}"
            raise UserError(f"the SuperLink ended (code {superlink.code}): {words}; serve again, and its run goes on")


def _settings(application: NodeProxy, certificates: Path) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=BoundedProtocol,
        ws="none",  # An upgraded connection would leave the protocol that counts it.
        h11_max_incomplete_event_size=_LARGEST_HEAD,
        ssl_certfile=str(certificates / "server.pem"),
        ssl_keyfile=str(certificates / "server.key"),
        access_log=False,
        log_level="error",  # Warnings are a line for each call that is no HTTP: whoever likes could fill the disk.
        server_header=False,
        limit_concurrency=2000,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
    )


class Registrar:
    """Registers the keys of the register with the SuperLink, on this machine; call `look` again and again."""

    def __init__(self, control: SuperLinkControl, register: RegisterFile) -> None:
        self._control, self._file = control, register
        self._done: set[str] = set()

    def look(self) -> None:
        """Register what is new."""
        for key, entry in self._file.now().entries.items():
            if key not in self._done and self._register(entry):
                self._done.add(key)
                _log.info(f"the key of {entry.name} is registered")

    def _register(self, entry: Entry) -> bool:
        try:
            self._control.register(entry.key, entry.name)
        except httpx.HTTPStatusError as error:
            # Registered before, in the database of an earlier start: all is well.
            if error.response.status_code == _CONFLICT or "already" in error.response.text.lower():
                return True
            _log.error(f"the key of {entry.name} is not registered: {error.response.text[:200]}")
            return True
        except httpx.HTTPError:
            return False
        return True


def _repeat(server: uvicorn.Server, superlink: Process, look: Callable[[], None]) -> None:
    """Look again and again while we serve; without its SuperLink a server ends."""
    pause, before = threading.Event(), ""
    while not server.should_exit:
        if superlink.code is not None:
            server.should_exit = True
            return
        try:
            look()
            before = ""
        except Exception as error:  # Nodes must not be shut out because one look goes wrong.
            line = f"{type(error).__name__}: {error}"
            if line != before:
                _log.error(line)
            before = line
        pause.wait(_LOOK_SECONDS)


@contextmanager
def _listening(host: str, port: int) -> Generator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)  # The error's own text repeats the address.
        raise UserError(
            f"--listen: {host}:{port} cannot be used: {why}; allowed: an address of this machine and a free port"
        ) from error
    with listener:
        yield listener


@contextmanager
def _superlink(home: ServerFolder, certificates: Path) -> Generator[tuple[Process, str]]:
    listener = reserved_port()
    port = int(listener.getsockname()[1])
    address = f"127.0.0.1:{port}"
    authority = certificates / "ca.pem"
    home.flower.mkdir(parents=True, exist_ok=True)
    (home.flower / "config.toml").write_text(connection_file(address, authority), encoding="utf-8")
    options = [
        *("--ssl-ca-certfile", str(authority), "--ssl-certfile", str(certificates / "server.pem")),
        *("--ssl-keyfile", str(certificates / "server.key"), "--enable-supernode-auth"),
    ]
    if not home.head_key.exists():
        make_key(home.head_key)
    known = {REGISTER: str(home.register), HEAD_KEY: str(home.head_key), LAUNCHER: str(os.getpid())}
    env = environment(home.flower, **known)
    # Relative paths of a run are meant from where the server was started.
    process = start_superlink(options, listener, env, home.folder / "superlink.log", Path.cwd(), home.parts)
    try:
        with ends_as_interrupted():
            process.wait_for_port(port, _START_SECONDS)
            yield process, address
    finally:
        end_all([process])
