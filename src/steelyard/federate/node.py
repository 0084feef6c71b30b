"""`steelyard federate node`: takes part in a federation with the installed client app, by the node's own rules.

This side of a node speaks to the server: fetches messages, has them answered, sends the answers. It speaks Flower's
fleet protocol and nothing else. No app that a server sends is ever fetched, let alone run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from pydantic import Field, model_validator

from steelyard.base.errors import UserError, told_as
from steelyard.base.logs import logger, show
from steelyard.base.settings import parse
from steelyard.clients.flower.calls import CallError, CallRefused, FleetConnection
from steelyard.clients.flower.internals import ErrorCode
from steelyard.clients.flower.news import SIGN_OF_LIFE_SECONDS
from steelyard.clients.flower.parts import (
    LARGEST_MESSAGE,
    MessageParts,
    PartsLost,
    PartsNotTaken,
    PartsTree,
    error_parts,
    fetch,
)
from steelyard.clients.flower.wire import Refused
from steelyard.clients.node import FILES, MEMORY, NodeConfig
from steelyard.experiment.node_rules import check_own
from steelyard.federate.book import NodeLedger
from steelyard.federate.workers import Worker, WorkerDied, Workers, WorkersSpec, read_frame, write_frame
from steelyard.proof.signing import read_private_key

_log = logger(__name__)

ResultT = TypeVar("ResultT")

_SHORTEST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.1, 1.0, 1.3
_LONGEST_WAIT = 10.0
_GRACE_SECONDS = 5.0
_MOST_PULL_SECONDS = 600.0
_UNAUTHORIZED, _PRECONDITION = 401, 412
_ANOTHER_SERVER = ("certificate", "wrong_version_number")
"""Words of an error when the server shows no certificate, or not one of ours."""
_FORGOTTEN_SECONDS = 35.0
"""How long a node that was killed may count as connected, and how long a server that starts may not know our key."""


class _Unknown(UserError):
    """The server does not know this node, or not any more."""


@dataclass(frozen=True)
class Server:
    """Where the server is, how it is known, and by which key we are known to it."""

    address: str
    authority: Path | None = None
    """ca.pem; None: no TLS."""
    key: Path | None = None
    """The node's private key; None: a key for this start only, where the server lets anybody in."""

    def connection(self, stop: threading.Event) -> FleetConnection:
        """Return a connection that signs every call; once `stop` is set it waits for no server that is away."""
        private = ec.generate_private_key(ec.SECP384R1()) if self.key is None else read_private_key(self.key)
        authority = None if self.authority is None else _authority(self.authority)
        return FleetConnection(self.address, authority, private, stop)


def _authority(file: Path) -> bytes:
    try:
        content = file.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise UserError(f"ca: {file} is not a certificate; allowed: the server's ca.pem") from None
    except OSError as error:
        raise UserError(f"ca: {file} cannot be read: {error.strerror}; allowed: ca.pem") from error
    return content


class NodeLink:
    """One node's life: join, answer messages until `stop` is set, leave. Call `run` in a thread of its own.

    A call for a message is held by the server, so the thread may be in it long after `stop` is set. Whoever wants to
    end calls `leave` then, where the link `is_waiting`.
    """

    def __init__(self, server: Server, workers: Workers, number: int, stop: threading.Event) -> None:
        self._fleet = server.connection(stop)
        self._own_key = server.key is None
        self._workers, self._number, self._stop = workers, number, stop
        self._worker: Worker | None = None
        self._warned = False
        self._heard = False
        """Whether the server has answered a call for a message since we joined."""
        self._unheard = 0.0
        """When a call was last without an answer; the server may have taken it all the same."""
        self.is_waiting = False
        """Whether it is asking for a message and has none to answer."""

    def run(self) -> None:
        """Take part until `stop` is set; raises `UserError` where the server does not want this node."""
        try:
            if not self._join():
                return
            beat = threading.Thread(target=self._beat, daemon=True, name=f"heartbeat-{self._number}")
            beat.start()
            _log.info(f"node {self._number} is connected")
            if ahead := self._fleet.ahead:
                where = "ahead of" if ahead > 0 else "behind"
                line = f"this clock is {abs(ahead):.0f} s {where} the server's, whose time is used; set it right"
                _log.warning(f"node {self._number}: {line}")
            self._serve()
        finally:
            self.leave()

    def _join(self) -> bool:
        """Join the federation; False where we are to stop before."""
        if self._own_key:
            try:
                self._call(self._fleet.register)
            except CallRefused as refusal:
                raise UserError(f"the server refuses a node without a key: {refusal}") from None
        # One key is one node. One that was killed, or whose last call got an answer too late, counts as connected for a
        # while: it waits.
        begun = time.monotonic()
        while not self._stop.is_set():
            try:
                self._heard = False
                return self._call(lambda: self._fleet.activate(SIGN_OF_LIFE_SECONDS)) is not None
            except CallRefused as refusal:
                waited = time.monotonic() - max(begun, self._unheard)
                if refusal.status != _PRECONDITION or waited > _FORGOTTEN_SECONDS:
                    raise UserError(
                        f"the server refuses this node: {refusal}; is its key registered, and used by no other node?"
                    ) from None
                self._stop.wait(1.0)
        return False

    def leave(self) -> None:
        """End the worker and say goodbye to the server."""
        if self._worker is not None:
            self._worker.end()
        with contextlib.suppress(CallError):
            if self._fleet.node:
                self._fleet.deactivate()
                if self._own_key:
                    self._fleet.unregister()
        if not self.is_waiting:
            self._fleet.close()

    def _beat(self) -> None:
        while not self._stop.wait(SIGN_OF_LIFE_SECONDS / 2):
            if self.is_waiting:
                continue  # The server holds our call, and knows by it that we are there.
            with contextlib.suppress(CallError):
                self._fleet.send_heartbeat(SIGN_OF_LIFE_SECONDS)

    def _serve(self) -> None:
        pause = _SHORTEST_PAUSE
        while not self._stop.is_set():
            begun = time.monotonic()
            found = self._next_message()
            if found is None:
                return
            if not found:
                # A server that held our call for long is asked again at once.
                self._stop.wait(max(0.0, begun + pause - time.monotonic()))
                pause = min(pause * _GROWTH, _LONGEST_PAUSE)
                continue
            pause = _SHORTEST_PAUSE
            try:
                self._answer(*found[0])
            except (CallError, ValueError, RuntimeError, PartsLost, PartsNotTaken) as error:
                # The run was stopped, the server has no room, or the answer is too late: there will be another message.
                _log.error(f"a message was not answered: {type(error).__name__}: {error}"[:300])

    def _next_message(self) -> list[tuple[Message, PartsTree]] | None:
        """Return the next message; a server that has started anew is joined again. None where we are to stop."""
        self.is_waiting = True
        try:
            found = self._call(self._fleet.next_message)
            self._heard = True
            return found
        except _Unknown:
            if not self._heard:
                raise
            return [] if self._join() else None
        finally:
            self.is_waiting = False

    def _answer(self, message: Message, tree: PartsTree) -> None:
        begun, run, name = time.monotonic(), message.metadata.run_id, message.metadata.message_id
        seconds = min(message.metadata.ttl, _MOST_PULL_SECONDS)  # Flower's own bound is two hours.
        try:
            parts = fetch(name, tree, self._fleet.part_puller(run), LARGEST_MESSAGE, seconds, most=2)
        except Refused as refusal:
            _log.error(f"node {self._number}: a message was refused: {refusal}")
            self._fleet.confirm(run, name)
            answer = error_parts(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"refused: {refusal}")
        else:
            self._fleet.confirm(run, name)
            frame = write_frame({"message": name, "run": run, "node": self._fleet.node}, parts)
            del parts
            answer = self._worked(frame, message)
        announced = self._call(lambda: self._fleet.announce(answer, time.monotonic() - begun))
        if announced is not None:
            self._fleet.push_parts(run, answer, announced)

    def _worked(self, frame: bytes, message: Message) -> MessageParts:
        """Have a message answered by the worker; one that hangs or dies is replaced for the next message."""
        try:
            if self._worker is None or self._worker.gone:
                self._worker = self._workers.worker(self._number)
            _, parts = read_frame(self._worker.ask(frame, message.metadata.ttl + _GRACE_SECONDS))
        except (WorkerDied, TimeoutError, UserError) as fault:
            _log.error(f"node {self._number}: its worker {type(fault).__name__} {fault}")
            if self._worker is not None:
                self._worker.end()
                self._worker = None
            if isinstance(fault, WorkerDied):
                return error_parts(message, ErrorCode.CLIENT_APP_CRASHED, "")
            return error_parts(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(fault).__name__}: {fault}")
        return MessageParts(parts.pop("head"), parts.pop("tree"), parts)

    def _call(self, call: Callable[[], ResultT]) -> ResultT | None:
        """Call the server, and again while it is away; None once we are to stop."""
        wait = 0.5
        while not self._stop.is_set():
            try:
                result = call()
            except CallRefused as refusal:
                # Other refusals concern one call only, such as one of a run that has ended.
                if refusal.status == _UNAUTHORIZED:
                    raise _Unknown(f"the server refuses this node: {refusal}") from None
                if refusal.status < 500:
                    raise
                self._unheard = time.monotonic()  # Its SuperLink may have taken the call, and told the proxy too late.
                self._warn(f"the server answers {refusal.status}")
            except CallError as error:
                # What else goes wrong with TLS (no time for a handshake, an end in the middle of one) is a server that
                # is busy or starts anew.
                if any(word in str(error).lower() for word in _ANOTHER_SERVER):
                    raise UserError(f"ca: the server is not the one that it should be: {error}") from None
                self._unheard = time.monotonic()
                self._warn(f"the server is not reached: {error}")
            else:
                self._warned = False
                return result
            self._stop.wait(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        return None

    def _warn(self, line: str) -> None:
        if not self._warned and not self._stop.is_set():
            self._warned = True
            _log.error(f"node {self._number}: {line}; trying again")


_LEAVING_SECONDS = 4.0
"""How long a node that is to stop may go on with what it was asked; a local federation kills it after eight."""
_TESTED = "tests of models are answered without noise, and epsilon does not cover them; tests = false answers none"
"""What the owner of a node with a limit should know when it starts."""


class NodeFile(NodeConfig):
    """A node's TOML file: where its server is, and its configuration."""

    server: str = Field(pattern=r":[0-9]+$")
    """The server's address and port: "10.0.0.1:8000"."""
    ca: Path | None = None
    """The certificate by which the server is known."""
    insecure: bool = False
    """true: without TLS; for a server on one's own machine."""
    memory: None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Nothing: the node's process adds it."""

    @model_validator(mode="after")
    def _has_files(self) -> Self:
        for key, file in (("ca", self.ca), ("key", self.key)):
            if not self.insecure and (file is None or not file.is_file()):
                raise ValueError(f"{key}: got {file}; allowed: the path of a file (or insecure = true, without TLS)")
        return self


def read_node(file: Path) -> tuple[Server, dict[str, Any]]:
    """Return the server and the configuration that a node's TOML file describes; paths are meant from that file."""
    try:
        with told_as(f"{file}: cannot be read", "a node's TOML file"):
            document = parse(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not TOML: {error}") from None
    folder, table = file.parent.resolve(), document.get("data")
    for holder, key in [*((document, key) for key in (*FILES, "state", "key", "peers", "ca")), (table, "path")]:
        if isinstance(holder, dict) and isinstance(holder.get(key), str) and holder[key]:
            holder[key] = str(folder / holder[key])
    found = NodeFile.read(document, f"{file}: ")
    if found.allow:
        document["allow"] = [_own_code(code, folder) for code in found.allow]
    config = {key: value for key, value in document.items() if key not in ("server", "ca", "insecure")}
    check_own(NodeConfig.read(config))
    secure = not found.insecure
    return Server(found.server, found.ca if secure else None, found.key if secure else None), config


def _own_code(code: str, folder: Path) -> str:
    """Return allowed code with the whole path of its file."""
    source, colon, name = code.rpartition(":") if not code.endswith(".py") else (code, "", "")
    return f"{folder / source}{colon}{name}" if source.endswith(".py") else code


@contextlib.contextmanager
def _started(
    configs: Sequence[Mapping[str, Any]], experiment: str, threads: int, stop: threading.Event
) -> Generator[Workers]:
    """Start the workers of these nodes, and end them; `stop` is set before.

    A server can end workers, but not us: what they must not forget outlives them, where no owner gave a folder for it.
    """
    with tempfile.TemporaryDirectory(prefix="steelyard-node-") as memory:
        own = [{MEMORY: f"{memory}/{number}", **config} for number, config in enumerate(configs)]
        workers = Workers(WorkersSpec(own, experiment, threads))
        try:
            yield workers
        finally:
            stop.set()
            workers.close()


def run_nodes(
    servers: Sequence[Server], configs: Sequence[Mapping[str, Any]], *, experiment: str = "", threads: int = 0
) -> None:
    """Take part until SIGINT or SIGTERM, one thread and one worker per node; raises where no node is wanted.

    What takes longer than some seconds then is given up: the server hears that the node has left.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    faults: list[str] = []

    def take_part(link: NodeLink, number: int) -> None:
        try:
            link.run()
        except UserError as error:
            faults.append(str(error))
            _log.error(f"node {number}: {error}")

    with _started(configs, experiment, threads, stop) as workers:
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
    if faults and len(faults) == len(running):
        raise UserError(faults[0])


def ledger_of(file: Path) -> NodeLedger:
    """Return the ledger of the node that a file describes; what `steelyard federate ledger` shows."""
    found = NodeLedger.of(NodeConfig.read(read_node(file)[1]))
    if found is None:
        raise UserError(f'{file}: keeps no ledger; allowed: require = "local" with epsilon and state')
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
