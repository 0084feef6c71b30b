"""The server as a real process: nodes come in through the proxy, and nobody else comes in at all."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import uvicorn
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from tests.federate.accounts import NOBODY, as_nobody, pem, signed
from tests.kit import assert_refused, wait_until
from tests.ports import free_ports

from steelyard.clients.flower.register import Entry, enter, read_register, remove
from steelyard.federate import connections
from steelyard.federate.certificates import make_certificates, make_key
from steelyard.federate.connections import BoundedLoop, BoundedProtocol
from steelyard.federate.proxy import NodeProxy, Refusal
from steelyard.federate.queue import ServerFolder
from steelyard.federate.server import is_own, owner_of
from steelyard.federate.workers import environment, reserved_port
from steelyard.proof.signing import read_public_key


def private(file: Path) -> ec.EllipticCurvePrivateKey:
    found = serialization.load_ssh_private_key(file.read_bytes(), password=None)
    assert isinstance(found, ec.EllipticCurvePrivateKey)
    return found


@dataclass
class Served:
    folder: Path
    port: int
    authority: Path
    node: ec.EllipticCurvePrivateKey
    lines: list[str]

    def post(self, path: str, message: Any, key: ec.EllipticCurvePrivateKey | None = None) -> httpx.Response:
        headers = signed(key or self.node)
        url = f"https://127.0.0.1:{self.port}{path}"
        return httpx.post(
            url,
            content=message.SerializeToString(),
            headers=headers,
            verify=ssl.create_default_context(cafile=self.authority),
            timeout=30,
        )

    def link(self, path: str, size: int, seconds: float = 20) -> HTTPSConnection:
        """Begin a call that says how many bytes will follow; none do."""
        made = HTTPSConnection(
            "127.0.0.1", self.port, context=ssl.create_default_context(cafile=self.authority), timeout=seconds
        )
        made.putrequest("POST", f"/v1/fleet/{path}")
        for name, value in {**signed(self.node), "content-length": str(size)}.items():
            made.putheader(name, value)
        made.endheaders()
        return made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    """A server with one registered node, and everything that this node has."""
    root = tmp_path_factory.mktemp("served")
    made = make_certificates(root / "tls", ["127.0.0.1"])
    key, public = make_key(root / "hospital-a")
    folder = root / "server"
    enter(folder / "register.json", Entry("hospital-a", read_public_key(public), ("hospital-a",)))
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "steelyard", "federate", "serve", str(folder), "--tls", str(root / "tls")]
    process = subprocess.Popen(
        [*command, "--listen", f"127.0.0.1:{port}"],
        env=environment(root / "home"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or []), daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + 120
        while not any("is registered" in line for line in lines):
            assert process.poll() is None, lines
            assert time.monotonic() < deadline, lines
            time.sleep(0.1)
        yield Served(folder, port, made.authority, private(key), lines)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, lines
        reader.join(5)


def test_with_everything_that_a_node_has_nobody_registers_a_key_starts_a_run_or_takes_tasks(served: Served):
    stranger = ec.generate_private_key(ec.SECP384R1())
    calls: dict[str, Any] = {
        "/v1/control/register-node": RegisterNodeRequest(public_key=pem(stranger)),
        "/v1/fleet/register-node": RegisterNodeFleetRequest(public_key=pem(stranger)),
        "/v1/control/start-run": StartRunRequest(),
        "/v1/control/list-nodes": ListNodesRequest(),
        "/v1/runtime/acquire-task": AcquireTaskRequest(supported_task_types=["flwr-serverapp", "flwr-clientapp"]),
    }
    for path, message in calls.items():
        assert served.post(path, message).status_code == 403, path
    for trick in ("/v1/control/list-nodes?/v1/fleet/pull-messages", "/V1/CONTROL/list-nodes", "/docs"):
        assert served.post(trick, ListNodesRequest()).status_code == 403, trick
    activate = ActivateNodeRequest(public_key=pem(stranger), heartbeat_interval=30)
    assert served.post("/v1/fleet/activate-node", activate, stranger).status_code == 401
    assert any("refused 127.0.0.1: POST /v1/control/start-run" in line for line in served.lines)


def test_the_superlink_itself_listens_on_loopback_only(served: Served):
    config = (served.folder / ".flwr" / "config.toml").read_text()
    own = int(config.split("127.0.0.1:")[1].split('"')[0])
    assert own != served.port
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in line]
    assert [address for address in listening if address.endswith(f":{own:04X}")] == [f"0100007F:{own:04X}"]
    assert (served.folder.stat().st_mode & 0o777) == 0o700


def test_a_superexec_that_dies_is_started_again(served: Served) -> None:
    """Without it Flower takes runs and starts none of them."""

    def found() -> list[int]:
        every = Path("/proc").glob("[0-9]*/cmdline")
        return [int(file.parent.name) for file in every if belongs(file)]

    def belongs(file: Path) -> bool:
        try:
            mine = f"FLWR_HOME={served.folder}/.flwr".encode() in (file.parent / "environ").read_bytes()
            return mine and b"flower-superexec" in file.read_bytes()
        except OSError:
            return False

    wait_until(lambda: len(found()) == 1, 60, "no SuperExec")
    (before,) = found()
    os.kill(before, signal.SIGKILL)
    said = "the SuperExec, which starts runs, ended (code -9)"
    wait_until(lambda: said in (served.folder / "superlink.log").read_text(), 60, "not noticed")
    wait_until(lambda: len(found()) == 1 and found() != [before], 60, "not started again")


def test_a_call_that_is_too_large_is_refused_before_it_is_read(served: Served):
    assert served.link("push-object", 1 << 40).getresponse().status == 413


def test_a_call_without_parts_is_small(served: Served):
    trees = PushMessagesRequest(message_object_trees=[ObjectTree(object_id="x" * 64) for _ in range(6_000)])
    assert served.post("/v1/fleet/push-messages", trees).status_code == 413


def test_a_key_that_sends_much_at_once_waits_for_itself_alone(served: Served):
    links = [served.link("push-object", 30 << 20) for _ in range(8)]
    beat = SendNodeHeartbeatRequest(node=Node(node_id=1), heartbeat_interval=30)
    assert served.post("/v1/fleet/send-node-heartbeat", beat).status_code < 500  # Other calls pass.
    with pytest.raises(TimeoutError):
        served.link("pull-object", 0, 2).getresponse()
    for link in links:
        link.close()
    assert served.link("pull-object", 0).getresponse().status < 500  # What is gone holds no room.


def _raw(served: Served, content: bytes, seconds: float = 40.0) -> bytes:
    """Send bytes over TLS and return all that comes back until the connection ends."""
    trusted = ssl.create_default_context(cafile=served.authority)
    with (
        socket.create_connection(("127.0.0.1", served.port), timeout=seconds) as plain,
        trusted.wrap_socket(plain, server_hostname="127.0.0.1") as link,
    ):
        link.sendall(content)
        found = b""
        while part := link.recv(1 << 16):
            found += part
        return found


def _head(served: Served, target: str, **more: str) -> bytes:
    headers = {"host": "127.0.0.1", "connection": "close", **signed(served.node), **more}
    lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize(
    "target",
    [
        "https://127.0.0.1/v1/control/list-nodes",
        "/v1/fleet/pull-messages/../../control/list-nodes",
        "/v1/fleet/pull%2Dmessages",
        "/v1/fleet/pull-messages%00",
        "//v1/control/list-nodes",
    ],
)
def test_a_request_target_is_never_read_in_two_ways(served: Served, target: str):
    answer = _raw(served, _head(served, target, **{"content-length": "0"}))
    assert answer.split(b" ")[1] in (b"400", b"403"), answer


def test_a_body_in_chunks_has_the_same_bound_and_huge_headers_are_refused(served: Served):
    # Without its end: a head that comes in one piece is read as one, however long.
    huge = _head(served, "/v1/fleet/pull-messages", filler="x" * 100_000)[:90_000]
    assert _raw(served, huge).split(b" ")[1] == b"431"
    both = _head(served, "/v1/fleet/pull-messages", **{"content-length": "5", "transfer-encoding": "chunked"})
    smuggled = both + b"0\r\n\r\n" + _head(served, "/v1/control/list-nodes", **{"content-length": "0"})
    statuses = [part[:3] for part in _raw(served, smuggled).split(b"HTTP/1.1 ")[1:]]
    assert b"200" not in statuses[1:], statuses
    assert len(statuses) <= 2


def test_a_node_speaks_for_itself_alone(served: Served, tmp_path: Path):
    key, public = make_key(tmp_path / "other")
    other = private(key)
    enter(served.folder / "register.json", Entry("other", read_public_key(public)))
    activate = ActivateNodeRequest(public_key=pem(other), heartbeat_interval=30)
    deadline = time.monotonic() + 20
    while (joined := served.post("/v1/fleet/activate-node", activate, other)).status_code != 200:
        assert time.monotonic() < deadline, served.lines
        time.sleep(0.2)
    node = Node(node_id=ActivateNodeResponse.FromString(joined.content).node_id)
    assert served.post("/v1/fleet/pull-messages", PullMessagesRequest(node=node), other).status_code == 200
    # The other node's id, under our own key.
    for path, message in {
        "pull-messages": PullMessagesRequest(node=node),
        "push-messages": PushMessagesRequest(node=node),
        "deactivate-node": DeactivateNodeRequest(node_id=node.node_id),
        "activate-node": activate,
    }.items():
        status = served.post(f"/v1/fleet/{path}", message).status_code
        assert 400 <= status < 500, (path, status)
    remove(served.folder / "register.json", "other")
    assert served.post("/v1/fleet/activate-node", activate, other).status_code == 401


def test_a_second_server_on_the_same_port_or_folder_is_refused(served: Served, refused: Callable[..., str]) -> None:
    (free,), tls = free_ports(1), served.authority.parent
    before = (served.folder / ".flwr" / "config.toml").read_text()
    for folder, port, words in (
        ("server", served.port, f"--listen: 127.0.0.1:{served.port} cannot be used: Address already in use"),
        (served.folder, free, f"{served.folder}: another process serves this folder"),
    ):
        assert words in refused("federate", "serve", folder, "--tls", tls, "--listen", f"127.0.0.1:{port}")
    assert (served.folder / ".flwr" / "config.toml").read_text() == before


class TestCallers:
    def test_a_signature_must_be_there_hold_be_of_now_and_of_a_registered_key(self, tmp_path: Path):
        key, public = make_key(tmp_path / "a")
        enter(tmp_path / "register.json", Entry("a", read_public_key(public)))
        made = make_certificates(tmp_path / "tls", ["127.0.0.1"])
        caller, own = NodeProxy("127.0.0.1:1", made.authority, ServerFolder(tmp_path))._caller, private(key)
        assert caller(signed(own)).name == "a"
        forged = {**signed(own), "flwr-timestamp": datetime.now(UTC).isoformat()}
        for headers, words in (
            ({}, "a call without a signature"),
            (signed(ec.generate_private_key(ec.SECP384R1())), "a key that is not registered"),
            (signed(own, "2020-01-01T00:00:00+00:00"), "a signature of another time; is a clock wrong?"),
            (forged, "a signature that does not hold"),
            ({**signed(own), "flwr-public-key": "!"}, "a signature that does not hold"),
        ):
            with pytest.raises(Refusal, match=re.escape(words)):
                caller(headers)
        (tmp_path / "register.json").write_text("{")  # One that cannot be read lets nobody in.
        with pytest.raises(Refusal, match="a key that is not registered"):
            caller(signed(own))


def test_a_client_belongs_to_one_key_of_the_register(tmp_path: Path):
    file = tmp_path / "register.json"
    enter(file, Entry("a", "ssh one", ("x", "y")))
    assert_refused(lambda: enter(file, Entry("b", "ssh two", ("x",))), "'x' belongs to a")
    enter(file, Entry("b", "ssh two", (), 2))
    assert read_register(file).owner("y") == "ssh one"
    assert read_register(file).entries["ssh one"].refusal(("x", "z")) == "clients: got z; its entry allows x, y"
    assert (file.stat().st_mode & 0o777) == 0o600
    assert set(remove(file, "a").entries) == {"ssh two"}


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")


def own_connection() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        accepted, peer = server.accept()
        with accepted:
            assert is_own(peer, server.getsockname())
            mine.close()
            # A closed one would count as root's: the system forgets its owner.
            assert owner_of(peer, server.getsockname()) is None
            assert not is_own(peer, server.getsockname())
    return "own"


def test_a_connection_of_ones_own_is_known_until_it_is_closed():
    assert own_connection() == "own"


@needs_root
def test_the_system_says_whose_a_connection_is():
    assert as_nobody(own_connection) == "own"
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = server.getsockname()

        pid = os.fork()
        if not pid:
            os.setuid(NOBODY)
            with socket.create_connection(here) as theirs:
                theirs.recv(1)
            os._exit(0)
        accepted, peer = server.accept()
        assert owner_of(peer, here) == NOBODY
        assert not is_own(peer, here)
        accepted.close()
        os.waitpid(pid, 0)


@needs_root
def test_nobody_else_takes_the_port_before_the_superlink_listens():
    with reserved_port() as reserved:
        address = reserved.getsockname()

        def take() -> str:
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(address)
                other.listen()
            return "took it"

        assert as_nobody(take).startswith("OSError")


CALL = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Ahead(BoundedLoop):
    """Its clock can be set forward, so that nobody waits for a limit."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


async def application(scope: Any, receive: Any, send: Any) -> None:
    for _ in range(4 if scope["path"] == "/slow" else 0):
        cast(Ahead, asyncio.get_running_loop()).ahead += connections.HEAD_SECONDS
        await asyncio.sleep(0)  # The server looks at its connections meanwhile.
        await asyncio.sleep(0)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def against_server(play: Any) -> None:
    """Run a play against a server of this process; its argument opens a connection."""

    async def main() -> None:
        config = uvicorn.Config(application, http=BoundedProtocol, ws="none", log_level="critical", lifespan="off")
        config.load()
        state = uvicorn.Server(config).server_state
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: BoundedProtocol(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(20):
            await play(lambda: asyncio.open_connection("127.0.0.1", port))
        server.close()

    with asyncio.Runner(loop_factory=Ahead) as runner:
        runner.run(main())


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether the server ends a connection within five seconds without a word."""
    try:
        return await asyncio.wait_for(reader.read(), 5) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nhost:"])
def test_a_connection_without_a_whole_head_is_ended(monkeypatch: pytest.MonkeyPatch, begun: bytes):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)

    async def play(connect: Any) -> None:
        reader, writer = await connect()
        writer.write(begun)
        assert await ended(reader)

    against_server(play)


async def answered(connection: Any, call: bytes = CALL) -> bool:
    """Whether a call over a connection has its answer, or the server ends the connection."""
    reader, writer = connection
    writer.write(call)
    try:
        return b" 204 " in await reader.readuntil(b"\r\n\r\n")
    except (EOFError, ConnectionError):
        return False


def test_a_call_that_is_being_answered_takes_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)

    async def play(connect: Any) -> None:
        assert await answered(await connect(), CALL.replace(b"/ ", b"/slow "))

    against_server(play)


def test_one_address_has_so_many_connections_and_gets_them_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "MOST_FROM_ONE", 3)

    async def play(connect: Any) -> None:
        held = [await connect() for _ in range(3)]
        assert [await answered(each) for each in held] == [True] * 3  # The server has all of them.
        one_more, _ = await connect()
        assert await ended(one_more)
        held[0][1].close()
        while not await answered(await connect()):  # Until the server has seen it.
            pass

    against_server(play)
