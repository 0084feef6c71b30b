"""Hostile servers and nodes as real processes: what is asked for is not told, and little that is sent grows large."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesResponse
from tests.federate.real_federation import Federation, experiment, hospitals, wait_until
from tests.federate.small_experiment import weights

from steelyard.experiment.remote_server import RemoteServer
from steelyard.federate.certificates import make_key
from steelyard.federate.local import follow
from steelyard.federate.local_federation import started
from steelyard.federate.local_launch import Launch
from steelyard.federate.processes import Process, end_all, environment
from steelyard.learning.settings import ModelSettings
from steelyard.runs.reader import History

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
FEW = {"rounds.count": "1", "rounds.fraction": "0.5"}
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


def submitted(federation: Federation, name: str, changes: dict[str, str]) -> tuple[int, str]:
    changes = {"federate.start_timeout": "30", **FEW, **changes}
    sets = [word for field, value in changes.items() for word in ("--set", f"{field}={value}")]
    done = federation.steelyard("submit", "server", "hospitals.toml", *sets, "--trust", "--out", f"runs/{name}")
    return done.returncode, done.stdout + done.stderr


def assert_no_row(federation: Federation, name: str) -> None:
    """Hold that the row of which an update is made is none of the hospitals'."""
    (after,) = weights(federation.root / "runs" / name).values()
    before = RemoteServer(ModelSettings(name="logistic"), {"features": [5], "classes": 2}).initial(1)
    change = (after - before).reshape(-1)
    weight, bias = change[: 5 * (len(change) // 6)].reshape(-1, 5)[0], change[5 * (len(change) // 6)]
    row = (weight / bias).to(torch.float64).numpy()
    files = [np.load(federation.root / f"hospital-{letter}.npz")["x"] for letter in "ab"]
    assert np.abs(np.concatenate(files) - row).max(axis=1).min() > 1e-3


def assert_no_name(federation: Federation, name: str) -> None:
    assert not any("123-45-" in client for client in History(federation.root / "runs" / name).clients["client"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "line", "unharmed"),
    [
        ("one-row", ONE_ROW, "NotAllowed: data.share: got 1e-09", assert_no_row),
        ("wiped", WIPED, "NotAllowed: training.batch_size: with this learning_rate", assert_no_row),
        ("names", NAMES, "NotAllowed: data.owner: got 'ssn'", assert_no_name),
        ("code", {}, "NotAllowed: model.name:", lambda federation, name: None),
    ],
)
def test_what_a_hostile_server_asks_for_is_not_answered(
    clinic: Federation, name: str, changes: dict[str, str], line: str, unharmed: Callable[[Federation, str], None]
) -> None:
    if name == "code":
        changes = {"model.name": f"{clinic.root / 'net.py'}:network"}
    code, told = submitted(clinic, name, changes)
    if code == 0:
        unharmed(clinic, name)
    assert "123-45-" not in told
    assert (code, line in told) == (2, True), told
    ran = {int(path.name.split("-")[1]) for path in clinic.root.glob("ran-*")}
    assert len(ran) <= 2  # The server's own processes, where its owner asked for it; no node's.


@pytest.mark.slow
def test_an_honest_experiment_runs_on_all_of_them(clinic: Federation) -> None:
    shared = {"partition.clients": "2", "partition.seed": "7", "partition.minimum": "2"}
    code, told = submitted(clinic, "honest", {"federate.nodes": "3", "rounds.fraction": "1.0", **shared})
    assert code == 0, told
    history = History(clinic.root / "runs" / "honest")
    assert set(history.clients["client"]) == {"client-000", "client-001", "hospital-a", "hospital-b"}
    assert history.clients["failure"].isna().all()


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
        wait_until(lambda: "pid" in federation.outcome(), 100, "it does not begin")
        pid = federation.outcome()["pid"]
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
                wait_until(lambda: len(Bombs.asked) > 4 or node.code is not None, 100, "it does not ask")
        finally:
            end_all([node])
            server.shutdown()
    log = (tmp_path / "node.log").read_text()
    assert found[node.pid] < 700 * MB, f"the node held {found[node.pid] // MB} MB"
    assert Bombs.asked[:4] == ["endless", "packed", "nonsense", "endless"], log
