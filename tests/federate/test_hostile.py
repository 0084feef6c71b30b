"""Hostile servers and nodes as real processes: what is asked for is not told, and little that is sent grows large."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesResponse
from tests.federate.real_federation import Federation, hospitals
from tests.kit import named, wait_until

from steelyard.federate.certificates import make_key
from steelyard.federate.workers import Process, end_all, environment

SHARED = """
server = "127.0.0.1:{port}"
ca = "tls/ca.pem"
key = "clinic"
partition-id = 0
num-partitions = 1
data = {{ path = "clinic.npz", source = "npz" }}
[partition]
scheme = "iid"
clients = 2
seed = 7
"""
ONE_ROW = {
    "data.share": "1e-9",
    "training.batch_size": "1",
    "training.learning_rate": "1.0",
    "partition.test": "none",
    "partition.minimum": "1",
}
WIPED = {
    "training.batch_size": "19",  # 96 training rows: the last batch of an epoch is one row,
    "training.learning_rate": "0.1",
    "training.weight_decay": "10",  # and a decay of all that was there before undoes the steps before it.
    "partition.test": "local",
}
NAMES = {
    "data.owner": "ssn",
    "partition.scheme": "natural",
    "partition.clients": "10",
    "rounds.fraction": "1.0",
    "federate.nodes": "1",
}
NET = """
import os
from pathlib import Path
from torch import nn

def network(feature_shape, outputs):
    (Path(__file__).parent / f"ran-{os.getpid()}").touch()
    return nn.Linear(feature_shape[0], outputs)
"""


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Generator[Federation]:
    """Two hospitals, and a node that takes its part of a larger file, in which a column is nobody's business."""
    with hospitals(tmp_path_factory.mktemp("hostile")) as made:
        root, rng = made.root, np.random.default_rng(5)
        ssn = [f"123-45-{6000 + number // 8}" for number in range(80)]
        np.savez(root / "clinic.npz", x=rng.normal(size=(80, 5)).astype("f4"), y=np.arange(80) % 2, ssn=ssn)
        make_key(root / "clinic")
        assert made.steelyard("register", "server", "clinic.pub", "--most", "100").returncode == 0
        (root / "clinic.toml").write_text(SHARED.format(port=made.port))
        (root / "net.py").write_text(NET)
        made.node("clinic")
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "line"),
    named(
        [
            ("one row", ONE_ROW, "NotAllowed: data.share: got 1e-09"),
            ("wiped", WIPED, "NotAllowed: training.batch_size: with this learning_rate"),
            ("names", NAMES, "NotAllowed: data.owner: got 'ssn'"),
            ("code", {"model.name": "net.py:network"}, "NotAllowed: model.name:"),
        ]
    ),
)
def test_what_a_hostile_server_asks_for_is_not_answered(clinic: Federation, changes: dict[str, str], line: str) -> None:
    changes = {"federate.start_timeout": "30", "rounds.count": "1", "rounds.fraction": "0.5", **changes}
    sets = [word for field, value in changes.items() for word in ("--set", f"{field}={value}")]
    done = clinic.steelyard("submit", "server", "hospitals.toml", *sets, "--trust", "--out", "runs/hostile")
    told = done.stdout + done.stderr
    assert (done.returncode, line in told, "123-45-" in told) == (2, True, False), told
    # The server's own processes, where its owner asked for it; no node's.
    assert len({path.name for path in clinic.root.glob("ran-*")}) <= 2


MB = 1 << 20


def peak(pid: int) -> int:
    """The most memory in bytes that a process ever held; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


class Bombs(BaseHTTPRequestHandler):
    """A server whose answers are 2 GB of zeros, without end or packed."""

    packed: bytes
    asked: list[str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        if self.path.endswith("activate-node"):
            self._send(ActivateNodeResponse(node_id=7).SerializeToString())
        elif not self.path.endswith("pull-messages"):
            self._send(PullMessagesResponse().SerializeToString())
        elif len(self.asked) % 2:
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
            wait_until(lambda: len(Bombs.asked) > 4 or node.code is not None, 100, "it does not ask")
            held = peak(node.pid)
        finally:
            end_all([node])
            server.shutdown()
    log = (tmp_path / "node.log").read_text()
    assert held < 700 * MB, f"the node held {held // MB} MB"
    assert Bombs.asked[:4] == ["endless", "packed"] * 2, log
