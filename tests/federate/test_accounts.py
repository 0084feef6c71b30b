"""Other accounts of the machine do not reach a federation on loopback. Only root can try: it takes another account."""

from __future__ import annotations

import json
import os
import socket
import ssl
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest
from tests.federate.test_federate_processes import experiment

from steelyard.federate.local_federation import LocalFederation
from steelyard.federate.local_launch import Launch
from steelyard.federate.own_superlink import is_own, owner_of
from steelyard.federate.processes import reserved_port

NOBODY = 65_534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")


@pytest.fixture
def open_folder() -> Generator[Path]:
    """A folder that every account may enter: pytest's own are closed, and are not to be what keeps others out."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_nobody(work: Callable[[], str]) -> str:
    """Return what some work says that is done in a process of another account."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = work()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    os.waitpid(pid, 0)
    return said


def post(port: int, path: str, body: bytes, tls: ssl.SSLContext | None = None) -> str:
    """Return the first line of the answer to a call; nothing where the connection is ended without one."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/protobuf\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        stream = plain if tls is None else tls.wrap_socket(plain, server_hostname="127.0.0.1")
        with stream:
            try:
                stream.sendall(head.encode() + b"accept: application/protobuf\r\nconnection: close\r\n\r\n" + body)
                return stream.recv(200).decode("latin-1").partition("\r\n")[0]
            except OSError:
                return ""


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


@needs_root
@pytest.mark.parametrize("tls", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_account_starts_no_run_in_a_local_federation_and_reads_none_of_its_files(open_folder: Path, tls: bool):
    federation = LocalFederation(open_folder / "run", experiment(1), Launch(1, tls=tls))
    with federation:
        authority = None if federation.authority is None else ssl.create_default_context(cafile=federation.authority)
        runs, start = ListRunsRequest().SerializeToString(), StartRunRequest().SerializeToString()
        port = federation.port
        assert " 200" in post(port, "/v1/control/list-runs", runs, authority)  # We ourselves are let in.
        assert as_nobody(lambda: post(port, "/v1/control/list-runs", runs, authority)) == ""
        assert as_nobody(lambda: post(port, "/v1/control/start-run", start, authority)) == ""
        assert as_nobody(lambda: post(port, "/v1/fleet/register-node", b"", authority)) == ""
        assert as_nobody(lambda: (open_folder / "run").is_dir() and "there") == "there"
        assert as_nobody(lambda: ", ".join(os.listdir(federation.home))).startswith("PermissionError")
        assert json.loads((federation.home / "launch.json").read_text())["nodes"] == 1
