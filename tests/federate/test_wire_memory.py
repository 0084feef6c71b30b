"""What the other side can make a process hold: the peak memory of real ones, while they are sent little that grows."""

from __future__ import annotations

import gzip
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesResponse
from tests.federate.test_federate_processes import experiment

from steelyard.federate.local import follow
from steelyard.federate.local_federation import started
from steelyard.federate.local_launch import Launch
from steelyard.federate.processes import Process, end_all, environment
from steelyard.runs.reader import History

HOSTILE = Path(__file__).parent / "hostile_node.py"
MB = 1 << 20


def peak(pid: int) -> int:
    """The most memory in bytes that a process ever held; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


@contextmanager
def sampled(pids: list[int]) -> Generator[dict[int, int]]:
    """Note the peak memory of processes until the end; more may be added meanwhile."""
    found: dict[int, int] = {}
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.05):
            for pid in list(pids):
                found[pid] = max(found.get(pid, 0), peak(pid))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_a_node_cannot_make_the_server_hold_gigabytes(tmp_path: Path):
    described = experiment(
        2, timeout=60.0, partition={"clients": 2}, rounds={"count": 1, "fraction": 1.0, "samples": True}
    )
    folder, pids = tmp_path / "run", list[int]()
    with started(folder, described, Launch(2), apart=True) as federation, sampled(pids) as found:
        end_all([federation.nodes.pop()])  # In its place: one that bombs its introduction, one that bombs its answers.
        command = [sys.executable, str(HOSTILE), federation.address, "client-001", "pieces", "lists"]
        federation.nodes.append(Process("hostile", command, federation.env(), tmp_path / "hostile.log", tmp_path))
        federation.submit()
        while not (pid := federation.outcome().get("pid")):
            time.sleep(0.05)
        assert federation.superlink is not None
        pids += [pid, federation.superlink.pid]
        follow(federation, 1)
    sent = (tmp_path / "hostile.log").read_text()
    for kind in ("query.introduce", "train.task", "evaluate.question"):
        assert f"bytes to {kind}" in sent, sent
    assert found[pid] < 1000 * MB, f"the server app held {found[pid] // MB} MB"
    assert found[federation.superlink.pid] < 600 * MB
    history = History(folder)
    refused = history.clients.set_index("client")["failure"]["client-001"]
    assert refused.startswith("size: more than ")
    assert history.rounds["round"].tolist() == [0, 1]
    assert "once it is read; allowed: at most 4194304" in history.info["federation_notes"]


class Bombs(BaseHTTPRequestHandler):
    """A server whose answers are 2 GB of zeros, without end or packed, and then no answers at all."""

    packed: bytes
    asked: list[str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        if self.path.endswith("activate-node"):
            self._send(ActivateNodeResponse(node_id=7).SerializeToString())
        elif not self.path.endswith("pull-messages"):
            self._send(PullMessagesResponse().SerializeToString())
        elif len(self.asked) % 3 == 2:
            self.asked.append("nonsense")
            self._send(b"\xff" * 10)
        elif len(self.asked) % 3 == 1:
            self.asked.append("packed")
            self.send_header("content-encoding", "gzip")
            self._send(self.packed)
        else:
            self.asked.append("endless")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            piece = b"%x\r\n" % MB + bytes(MB) + b"\r\n"
            for _ in range(2048):
                self.wfile.write(piece)

    def _send(self, body: bytes) -> None:
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_cannot_make_a_node_hold_gigabytes(tmp_path: Path):
    Bombs.asked = []
    Bombs.packed = gzip.compress(bytes(32 * MB), 1) * 64
    with ThreadingHTTPServer(("127.0.0.1", 0), Bombs) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = tmp_path / "node.toml"
        (tmp_path / "a.npz").touch()
        file.write_text(f'server = "127.0.0.1:{server.server_port}"\ninsecure = true\nclient = "a"\ndata = "a.npz"\n')
        command = [sys.executable, "-m", "steelyard", "federate", "node", str(file)]
        node = Process("node", command, environment(tmp_path / "home"), tmp_path / "node.log", tmp_path)
        try:
            with sampled([node.pid]) as found:
                deadline = time.monotonic() + 100
                while len(Bombs.asked) < 4 and node.code is None and time.monotonic() < deadline:
                    time.sleep(0.05)
                time.sleep(1)
        finally:
            end_all([node])
            server.shutdown()
    log = (tmp_path / "node.log").read_text()
    assert found[node.pid] < 700 * MB, f"the node held {found[node.pid] // MB} MB"
    assert Bombs.asked[:4] == ["endless", "packed", "nonsense", "endless"], log
