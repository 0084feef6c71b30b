"""Hostile servers and nodes as real processes: what is asked for is not told, and little that is sent grows large."""

from __future__ import annotations

import gzip
import os
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("flwr")

from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesResponse
from tests.federate.real_federation import HOSPITALS, NODE, Federation, hospitals
from tests.kit import named, wait_until

from steelyard.experiment.loading import read_experiment
from steelyard.federate.certificates import make_key
from steelyard.federate.workers import Process, end_all, environment
from steelyard.runs.history import History

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
    changes = {"federate.start_timeout": "120", "rounds.count": "1", "rounds.fraction": "0.5", **changes}
    sets = [word for field, value in changes.items() for word in ("--set", f"{field}={value}")]
    done = clinic.steelyard("submit", "server", "hospitals.toml", *sets, "--trust", "--out", "runs/hostile")
    told = done.stdout + done.stderr
    assert (done.returncode, line in told, "123-45-" in told) == (2, True, False), told
    # The server's own processes, where its owner asked for it; no node's.
    assert len({path.name for path in clinic.root.glob("ran-*")}) <= 2


TABLE = """
statistics = "findings"
[data]
source = "csv"
path = "{name}.csv"
labels = "y"
classes = 2
"""
READ = 'source = "csv"\npath = "own.csv"\nlabels = "y"\nnormalise = "standard"'


@pytest.mark.slow
def test_sites_hear_before_round_1_that_they_measure_in_other_units(clinic: Federation) -> None:
    """The two hospitals come back with tables; the clinic, whose owner tells nothing, has none."""
    root, rng = clinic.root, np.random.default_rng(8)
    for name, factor in (("hospital-a", 1), ("hospital-b", 1000)):
        clinic.stop(name)
        table = pd.DataFrame(rng.normal(50, 9, (120, 2)), columns=["age", "dose"])
        table["y"] = (table["age"] > 50).astype(int)
        table["dose"] *= factor
        table[["dose", "y", "age"][:: 1 if factor == 1 else -1]].to_csv(root / f"{name}.csv", index=False)
        text = NODE.format(address=f"127.0.0.1:{clinic.port}", name=name).replace(f'data = "{name}.npz"\n', "")
        (root / f"{name}.toml").write_text(text + TABLE.format(name=name))
        clinic.node(name)
    (root / "tables.toml").write_text(HOSPITALS.replace('source = "npz"\npath = "own.npz"', READ))
    done = clinic.steelyard("submit", "server", "tables.toml", "--set", "rounds.count=1", "--out", "runs/tables")
    assert done.returncode == 0, done.stdout + done.stderr
    found = History(root / "runs" / "tables").facts.finding_lines
    line = "warning: column 'dose' at 'hospital-b' is about 1000 times as large as at the others, as its node says"
    assert f"{line} (other-units)" in found
    assert line in done.stdout + done.stderr
    assert set(read_experiment(root / "runs" / "tables").model_dump()["data"]["scales"]) == {"age", "dose"}
    log = (root / "hospital-b.log").read_text()
    assert "mean, deviation and cells in bins of 2 columns of numbers, and how often words are in y" in log
    assert "column 'dose' at 'hospital-b' is about 1000 times as large as at the others" in log


TERMS = """
require = "aggregation"
peers = "peers"
questions-per-day = 9
"""
KEEPS_TO_NOTHING = """
import sys
if any("flwr-serverapp" in word for word in sys.orig_argv):
    from steelyard.experiment import node_rules
    node_rules.held_to = lambda *_: {}
"""
THREE = (
    HOSPITALS.replace("clients = 2", "clients = 3").replace("nodes = 2", "nodes = 3").replace("count = 4", "count = 1")
)
OPEN = THREE[: THREE.index("[weighing]")] + THREE[THREE.index("[federate]") :] + '[weighing]\ncriteria = ["DS"]\n'
SUMMED = OPEN + '[privacy.aggregation]\nkind = "secure"\n'
ALONE = SUMMED.replace('["DS"]', '["DS"]\nscore = "power"\npower = 900\nnormalise = "max"') + "largest_weight = 1.0\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_owner_refuses_a_server_that_keeps_to_nobodys_terms(tmp_path: Path) -> None:
    """Its app is changed so that it holds no rule to what the owners' files say."""
    (tmp_path / "changed").mkdir()
    (tmp_path / "changed" / "sitecustomize.py").write_text(KEEPS_TO_NOTHING)
    path = f"{tmp_path / 'changed'}:{os.environ.get('PYTHONPATH', '')}"
    names = ("hospital-a", "hospital-b", "hospital-c")
    with hospitals(tmp_path, names, TERMS, PYTHONPATH=path) as made:

        def submitted(out: str, experiment: str) -> tuple[int, str, list[str]]:
            (tmp_path / f"{out}.toml").write_text(experiment)
            done = made.steelyard("submit", "server", f"{out}.toml", "--out", f"runs/{out}")
            return done.returncode, done.stdout + done.stderr, [(tmp_path / f"{n}.log").read_text() for n in names]

        code, told, logs = submitted("summed", SUMMED)
        assert code == 0, (told, logs)
        assert all("helps to open the sum of 3 clients" in log for log in logs)
        for out, experiment, line in (
            ("open", OPEN.replace("start_timeout = 100", "start_timeout = 60"), "privacy.aggregation: missing"),
            ("alone", ALONE, "least-cohort: 2 of 3 clients count"),
            ("asking", SUMMED.replace("count = 1", "count = 20"), "questions-per-day: 9 in the last 24 hours"),
        ):
            code, told, logs = submitted(out, experiment)
            assert code == 2, told
            refused = [f"not answered: {line}" in log for log in logs]
            assert all(refused) or (out == "alone" and sum(refused) == 2 and "not answered: largest-w" in str(logs)), (
                logs
            )


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


@pytest.mark.slow
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
            wait_until(lambda: len(Bombs.asked) > 2 or node.code is not None, 100, "it does not ask")
            held = peak(node.pid)
        finally:
            end_all([node])
            server.shutdown()
    log = (tmp_path / "node.log").read_text()
    assert held < 700 * MB, f"the node held {held // MB} MB"
    assert Bombs.asked[:3] == ["endless", "packed", "endless"], log
