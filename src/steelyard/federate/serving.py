"""`steelyard federate serve`: a SuperLink on loopback, the proxy before it, and the keys of the register in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from steelyard.clients.flower.adapter.superlink import KeyRegistration
from steelyard.clients.flower.register import FILE, REGISTER, Entry
from steelyard.errors import UserError, ends_as_interrupted
from steelyard.federate.app_folder import connection_file
from steelyard.federate.bounded import BoundedLoop, BoundedProtocol, allow_many_files
from steelyard.federate.certificates import check_certificates, make_key
from steelyard.federate.processes import Process, end_all, environment, reserved_port, start_superlink
from steelyard.federate.proxy import NodeProxy, RegisteredKeys
from steelyard.logs import logger
from steelyard.signing import HEAD_KEY

_log = logger(__name__)

_START_SECONDS = 120.0
_LOOK_SECONDS = 0.5
_DRAIN_SECONDS = 3
_CONFLICT = 409
_LARGEST_HEAD = 32 << 10
"""Most bytes of a call's headers; a node's have about one thousand."""


@dataclass(frozen=True)
class ServerFolder:
    """What a server keeps: the register of keys, Flower's database, logs, and how `flwr` reaches the SuperLink."""

    folder: Path
    certificates: Path
    """Folder with ca.pem, server.pem and server.key."""

    @property
    def register(self) -> Path:
        """The register of node keys."""
        return self.folder / FILE

    @property
    def head_key(self) -> Path:
        """The private key that signs the heads of runs; made at the first start. Move it away to have another."""
        return self.folder / "server"

    @property
    def flower(self) -> Path:
        """FLWR_HOME of this machine's `flwr` commands."""
        return self.folder / ".flwr"

    def check(self) -> None:
        """Refuse certificates that cannot serve, and keep what lies in the folder from other users of the machine."""
        check_certificates(self.certificates)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.chmod(self.folder, 0o700)
        except OSError as error:
            raise UserError(
                f"{self.folder}: cannot be used: {error.strerror}; allowed: a folder of your own"
            ) from error


def serve(folder: Path, certificates: Path, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM: nodes come in through the proxy; whoever is on this machine submits runs."""
    home = ServerFolder(folder.resolve(), certificates.resolve())
    home.check()
    allow_many_files()
    with _listening(host, port) as listener, _superlink(home) as (superlink, address):
        keys = RegisteredKeys(home.register)
        registrar = Registrar(address, home.certificates / "ca.pem", keys)
        application = NodeProxy(f"https://{address}", home.certificates / "ca.pem", home.register)
        config = uvicorn.Config(
            application,
            http=BoundedProtocol,
            ws="none",  # An upgraded connection would leave the protocol that counts it.
            h11_max_incomplete_event_size=_LARGEST_HEAD,
            ssl_certfile=str(home.certificates / "server.pem"),
            ssl_keyfile=str(home.certificates / "server.key"),
            access_log=False,
            log_level="warning",
            server_header=False,
            limit_concurrency=2000,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
        )
        server = uvicorn.Server(config)
        watch = threading.Thread(target=_watch, args=(server, superlink, registrar), daemon=True, name="watch")
        watch.start()
        _log.info(f"nodes come in at {host}:{port}; runs are submitted on this machine only")
        with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=BoundedLoop) as runner:
            runner.run(server.serve(sockets=[listener]))
        if superlink.code is not None:
            raise UserError(f"the SuperLink ended (code {superlink.code}): {superlink.tail() or superlink.log}")


class Registrar:
    """Registers the keys of the register with the SuperLink, on this machine; call `look` again and again."""

    def __init__(self, address: str, authority: Path, keys: RegisteredKeys) -> None:
        self._keys = keys
        self._done: set[str] = set()
        self._link = KeyRegistration(address, authority.read_bytes())

    def look(self) -> None:
        """Register what is new."""
        for key, entry in self._keys.register().entries.items():
            if key not in self._done and self._register(entry):
                self._done.add(key)
                _log.info(f"the key of {entry.name} is registered")

    def _register(self, entry: Entry) -> bool:
        try:
            self._link.register(entry.key, entry.name)
        except httpx.HTTPStatusError as error:
            # Registered before, in the database of an earlier start: all is well.
            if error.response.status_code == _CONFLICT or "already" in error.response.text.lower():
                return True
            _log.error(f"the key of {entry.name} is not registered: {error.response.text[:200]}")
            return True
        except httpx.HTTPError:
            return False
        return True


def _watch(server: uvicorn.Server, superlink: Process, registrar: Registrar) -> None:
    pause = threading.Event()
    while not server.should_exit:
        if superlink.code is not None:
            server.should_exit = True
            return
        try:
            registrar.look()
        except Exception as error:  # Nodes must not be shut out because one entry is odd.
            _log.error(f"register: {type(error).__name__}: {error}")
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
def _superlink(home: ServerFolder) -> Generator[tuple[Process, str]]:
    listener = reserved_port()
    port = int(listener.getsockname()[1])
    address = f"127.0.0.1:{port}"
    authority = home.certificates / "ca.pem"
    home.flower.mkdir(parents=True, exist_ok=True)
    (home.flower / "config.toml").write_text(connection_file(address, authority), encoding="utf-8")
    options = [
        *("--ssl-ca-certfile", str(authority), "--ssl-certfile", str(home.certificates / "server.pem")),
        *("--ssl-keyfile", str(home.certificates / "server.key"), "--enable-supernode-auth"),
        *("--database", str(home.folder / "federation.db")),
    ]
    if not home.head_key.exists():
        make_key(home.head_key)
    env = environment(home.flower, **{REGISTER: str(home.register), HEAD_KEY: str(home.head_key)})
    # Relative paths of a run are meant from where the server was started.
    process = start_superlink(options, listener, env, home.folder / "superlink.log", Path.cwd())
    try:
        with ends_as_interrupted():
            process.wait_for_port(port, _START_SECONDS)
            yield process, address
    finally:
        end_all([process])
