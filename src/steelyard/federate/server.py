"""`steelyard federate serve`: a SuperLink on loopback, the proxy before it, the register's keys, the runs in turn.

Nobody without a key must keep nodes out: connections to the proxy are bounded in number and in time. As a process, this
is Flower's SuperLink, closed to other accounts: python -m steelyard.federate.server SOCKET PARTS OPTIONS. Whoever
reaches a SuperLink may start a run there, and a run is a programme that runs as whoever started the SuperLink. On
loopback that is every account of the machine. So a connection of another account is ended before it is read; the system
knows whose each is. PARTS is a folder for the parts of messages, emptied at the start; "" keeps them in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from steelyard.base.errors import UserError, ends_as_interrupted
from steelyard.base.logs import logger, show
from steelyard.clients.flower.calls import CallError, CallRefused, SuperLinkControl
from steelyard.clients.flower.register import REGISTER, Entry, RegisterFile
from steelyard.federate.app_folder import CONNECTION, connection_file, number_of_run
from steelyard.federate.certificates import check_certificates, days_left, make_key
from steelyard.federate.connections import BoundedLoop, BoundedProtocol
from steelyard.federate.proxy import NodeProxy
from steelyard.federate.queue import STOPPED, ServerFolder, ServerRun, forget_outcome, is_server_app, runs_of
from steelyard.federate.workers import (
    LAUNCHER,
    Process,
    end_all,
    end_with_parent,
    environment,
    last_words,
    reserved_port,
)
from steelyard.proof.signing import HEAD_KEY

_MOST_FILES = 8192


def allow_many_files() -> None:
    """Let this process hold as many connections as its bounds speak of; the usual limit of 1024 files is soft."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_log = logger(__name__)

Address = tuple[str, int]

_TABLE = Path("/proc/net/tcp")
_SUPERLINK_DRAIN_SECONDS = 2
_IDLE_SECONDS = 75
"""How long an unused connection stays open: a new one costs a handshake and a look at whose it is."""
_TRIES = 3
"""The table changes while it is read, and a line may be missed."""


class OwnProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """HTTP as uvicorn speaks it, with processes of our own account only."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Look whose it is; another account's is ended at once."""
        super().connection_made(transport)
        peer, here = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self._own = is_own(peer, here)
        if not self._own:
            _log.error("refused: a connection of another account of this machine")
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read on, unless it was ended: TLS may have unpacked some already."""
        if self._own:
            super().data_received(data)


def is_own(peer: Address, here: Address) -> bool:
    """Whether the other end of a connection belongs to our account, or to root; True where the system cannot tell."""
    return not _TABLE.exists() or owner_of(peer, here) in (os.geteuid(), 0)


def owner_of(peer: Address, here: Address) -> int | None:
    """Return the account at the other end of a connection on this machine; None where nobody holds it any more."""
    wanted = [_written(peer), _written(here)]
    for _ in range(_TRIES):
        for line in _TABLE.read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[1:3] == wanted:
                # Without an inode it is closed already, and the system says root of everybody's.
                return int(words[7]) if words[9] != "0" else None
    return None


def _written(address: Address) -> str:
    host, port = address
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"


_COMMAND_SECONDS = 180.0
_ASK_SECONDS = 3.0
"""How often Flower is asked about a run whose server app has not spoken yet."""
_MOST_TRIES = 3
"""How often a run is started by itself: one that takes its server along every time must not do so for ever."""


class RunQueue:
    """The runs of a server, one at a time; call `look` again and again. `quiet`: somebody else says how they go."""

    def __init__(self, server: ServerFolder, control: SuperLinkControl, *, quiet: bool = False) -> None:
        self._server, self._control = server, control
        self._levels = (logging.DEBUG, logging.DEBUG) if quiet else (logging.INFO, logging.ERROR)
        self._mark = uuid.uuid4().hex
        """By which this server knows the runs that it started itself."""
        self._stopped: set[int] = set()
        self._ended: set[int] = set()
        """Runs that are over: a queue looks twice a second, and need not read all that ever ran."""
        self._asked = self._begun = 0.0
        self._closed = False

    def close(self) -> None:
        """Let the runs be: the server ends, and what goes on goes on with the next one."""
        self._closed = True

    def look(self) -> None:
        """Stop what is to stop, notice what ended, and start the next run where none goes."""
        known = runs_of(self._server, without=self._ended)
        waiting = [run for run in known if run.is_open]
        self._ended |= {run.number for run in known} - {run.number for run in waiting}
        for run in waiting:
            if run.is_to_stop:
                self._stop(run)
        first = next((run for run in waiting if run.is_open), None)
        if first is None:
            return
        if first.started.get("server") == self._mark:
            self._check(first)
        else:
            self._start(first)

    def _stop(self, run: ServerRun) -> None:
        if run.started.get("server") != self._mark:
            run.end(run.left_waiting())
            _log.log(self._levels[0], f"run {run.number} was stopped")
        elif run.number not in self._stopped and (number := run.started.get("flower")):
            self._control.stop(int(number))
            self._stopped.add(run.number)

    def _start(self, run: ServerRun) -> None:
        """Start a run; one that an earlier server began goes on from its last whole round."""
        tries = int(run.started.get("tries", 0))
        if tries >= _MOST_TRIES:
            run.end(f"its server ended {tries} times while it ran; {run.advice()}")
            return
        forget_outcome(run.folder)
        run.note_started(self._mark, tries + 1)
        self._begun = time.monotonic()
        command = ["flwr", "run", str(run.app), CONNECTION, "--format", "json"]
        command += ["--run-config", "resume=true"] if tries else []
        words = f"goes on, try {tries + 1}" if tries else "begins"
        _log.log(self._levels[0], f"run {run.number} {words}: {run.out}")
        number, words = self._send(command)
        if number is None:
            self._end(run, f"the run did not begin: {words}")
        else:
            run.note_started(self._mark, tries + 1, number)

    def _send(self, command: list[str]) -> tuple[int | None, str]:
        """Send an app to the SuperLink; returns Flower's number for the run, or None and why there is none."""
        try:
            done = subprocess.run(
                command,
                env=environment(self._server.flower),
                capture_output=True,
                text=True,
                timeout=_COMMAND_SECONDS,
                preexec_fn=end_with_parent,
            )
        except subprocess.TimeoutExpired:
            return None, f"no answer within {_COMMAND_SECONDS:g} s"
        try:
            return number_of_run(done.stdout), ""
        except (ValueError, KeyError):
            return None, last_words(f"{done.stdout}\n{done.stderr}") or f"code {done.returncode}"

    def _check(self, run: ServerRun) -> None:
        """Notice the end of a run whose server app does not say so itself."""
        outcome, number = run.outcome, run.started.get("flower")
        pid = outcome.get("pid")
        if isinstance(pid, int):
            if not is_server_app(pid) and run.is_open:
                self._end(run, STOPPED if run.is_to_stop else f"the ServerApp was killed; {run.advice()}")
                if number is not None:
                    self._stop_quietly(int(number))
        elif number is not None and time.monotonic() - self._asked > _ASK_SECONDS:
            self._asked = time.monotonic()
            ended, seconds = self._control.ended(int(number)), float(run.submitted.get("start_timeout", math.inf))
            if run.outcome:
                return
            if ended is not None:
                words = f"the ServerApp did not start: {last_words(ended) or self._server.folder}"
                self._end(run, STOPPED if run.is_to_stop else words)
            elif time.monotonic() - self._begun > seconds:
                log = self._server.folder / "superlink.log"
                self._end(run, f"the ServerApp did not start within federate.start_timeout = {seconds:g} s; see {log}")
                self._stop_quietly(int(number))

    def _stop_quietly(self, number: int) -> None:
        try:
            self._control.stop(number)
        except CallError:
            return  # Flower notices by itself that the app is gone, only later.

    def _end(self, run: ServerRun, line: str) -> None:
        if not self._closed:
            run.end(line)
            _log.log(self._levels[1], f"run {run.number}: {line}")


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
    with home.held(), _listening(host, port) as listener, superlink(home, certificates, parts=home.parts) as link:
        link.wait()
        application = NodeProxy(link.address, certificates / "ca.pem", home)
        server = uvicorn.Server(_settings(application, certificates))
        registrar, queue = Registrar(link.control, home.register), RunQueue(home, link.control)
        registrar.look()  # Before the first node calls: one whose key is not known is turned away.
        _log.info(f"nodes come in at {host}:{port}; runs are submitted on this machine only")
        looks = [registrar.look, queue.look, application.report]
        threads = [threading.Thread(target=_repeat, args=(server, link.process, look), daemon=True) for look in looks]
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
        if (code := link.process.code) is not None:
            # Whoever is killed has no last words; those of others in its log would mislead.
            words = "" if code < 0 else link.process.tail()
            words = words or f"log {link.process.log}"
            raise UserError(f"the SuperLink ended (code {code}): {words}; serve again, and its run goes on")


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
    """Registers the keys of a register with the SuperLink, on this machine; call `look` again and again."""

    def __init__(self, control: SuperLinkControl, register: Path, *, quiet: bool = False) -> None:
        self._control, self._file = control, RegisterFile(register)
        self._level = logging.DEBUG if quiet else logging.INFO
        self._done: set[str] = set()

    def look(self) -> None:
        """Register what is new."""
        for key, entry in self._file.now().entries.items():
            if key not in self._done and self._register(entry):
                self._done.add(key)
                _log.log(self._level, f"the key of {entry.name} is registered")

    def _register(self, entry: Entry) -> bool:
        try:
            self._control.register(entry.key, entry.name)
        except CallRefused as refusal:
            # Registered before, in the database of an earlier start: all is well.
            if refusal.status != _CONFLICT and "already" not in str(refusal).lower():
                _log.error(f"the key of {entry.name} is not registered: {refusal}")
            return True
        except CallError:
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


@dataclass(eq=False)
class SuperLink:
    """Flower's SuperLink on loopback, for the runs of one folder; use `superlink` to start one."""

    home: ServerFolder
    process: Process
    port: int
    authority: Path | None
    """The certificate by which it is known; None: without TLS."""
    beside: list[Process] = field(default_factory=list[Process])
    """What is to end before it does: nodes say goodbye to it."""

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Wait until it listens."""
        self.process.wait_for_port(self.port, _START_SECONDS)

    @cached_property
    def control(self) -> SuperLinkControl:
        """What registers keys with it and stops its runs."""
        return SuperLinkControl(self.address, None if self.authority is None else self.authority.read_bytes())


@contextmanager
def superlink(
    home: ServerFolder, certificates: Path | None, *, parts: Path | None = None, **more: str
) -> Generator[SuperLink]:
    """Start a SuperLink, and end it; with certificates it lets in nodes of registered keys alone.

    Its socket is bound already, so that no other account can take its port before it. The parts of messages lie in the
    folder `parts`; None: in its memory.
    """
    listener = reserved_port()
    port, handle = int(listener.getsockname()[1]), listener.fileno()
    home.flower.mkdir(parents=True, exist_ok=True)
    known, options = {LAUNCHER: str(os.getpid())}, ["--insecure"]
    authority = None if certificates is None else certificates / "ca.pem"
    (home.flower / "config.toml").write_text(connection_file(f"127.0.0.1:{port}", authority), encoding="utf-8")
    if certificates is not None:
        options = [
            *("--ssl-ca-certfile", str(authority), "--ssl-certfile", str(certificates / "server.pem")),
            *("--ssl-keyfile", str(certificates / "server.key"), "--enable-supernode-auth"),
        ]
        if not home.head_key.exists():
            make_key(home.head_key)
        known |= {REGISTER: str(home.register), HEAD_KEY: str(home.head_key)}
    command = [sys.executable, "-m", "steelyard.federate.server", str(handle), str(parts or "")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation", *options]
    # Relative paths of a run are meant from where the server was started.
    env, log = environment(home.flower, **known, **more), home.folder / "superlink.log"
    made = SuperLink(home, Process("superlink", command, env, log, Path.cwd(), [handle]), port, authority)
    listener.close()
    try:
        with ends_as_interrupted():
            yield made
    finally:
        end_all([*made.beside, made.process])


def main() -> None:
    """Run Flower's SuperLink until a signal ends it."""
    # For speed of start: whoever only speaks to a SuperLink need not load all of it.
    from steelyard.clients.flower.superlink import run_superlink

    show()
    listener, folder = socket.socket(fileno=int(sys.argv.pop(1))), sys.argv.pop(1)
    parts = Path(folder) if folder else None
    if parts is not None:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(mode=0o700)
    allow_many_files()

    def run(app: Any, **options: Any) -> None:
        kept = {name: value for name, value in options.items() if name not in ("host", "port", "reload", "workers")}
        # A line for each call would fill the disk; a call that is held must not hold up the end.
        kept |= {
            "access_log": False,
            "timeout_graceful_shutdown": _SUPERLINK_DRAIN_SECONDS,
            "timeout_keep_alive": _IDLE_SECONDS,
        }
        uvicorn.Server(uvicorn.Config(app, http=OwnProtocol, **kept)).run(sockets=[listener])

    run_superlink(run, parts)


if __name__ == "__main__":
    main()
