"""A server that wants rows, over a real SuperLink: what it asks of nodes with files of their own is not answered."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from tests.federate.small_experiment import weights
from tests.federate.test_node_process import Federation, hospitals

from steelyard.experiment.remote_server import RemoteServer
from steelyard.federate.certificates import make_key
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
ONE_ROW = {
    "data.share": "1e-9",
    "training.batch_size": "1",
    "training.learning_rate": "1.0",
    "partition.test": "none",
    "partition.minimum": "1",
    "rounds.count": "1",
    "rounds.fraction": "0.5",
}
WIPED = {
    "training.batch_size": "19",  # 96 training rows: the last batch of an epoch is one row,
    "training.learning_rate": "0.1",
    "training.weight_decay": "10",  # and a decay of all that was there before undoes the steps before it.
    "partition.test": "local",
    "rounds.count": "1",
    "rounds.fraction": "0.5",
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Generator[Federation]:
    with hospitals(tmp_path_factory.mktemp("hostile")) as made:
        yield made


@pytest.fixture(scope="module")
def clinic(federation: Federation) -> Federation:
    """The same with a node that takes its part of a larger file, in which a column is nobody's business."""
    root, rng = federation.root, np.random.default_rng(5)
    ssn = [f"123-45-{6000 + number // 8}" for number in range(80)]
    np.savez(root / "clinic.npz", x=rng.normal(size=(80, 5)).astype("f4"), y=np.arange(80) % 2, ssn=ssn)
    make_key(root / "clinic")
    assert federation.steelyard("register", "server", "clinic.pub", "--most", "100").returncode == 0
    (root / "clinic.toml").write_text(SHARED.format(port=federation.port))
    federation.node("clinic")
    return federation


def submitted(federation: Federation, name: str, changes: dict[str, str]) -> tuple[int, str]:
    changes = {"federate.start_timeout": "30", **changes}
    sets = [word for field, value in changes.items() for word in ("--set", f"{field}={value}")]
    done = federation.steelyard("submit", "server", "hospitals.toml", *sets, "--out", f"runs/{name}")
    return done.returncode, done.stdout + done.stderr


def leaked(federation: Federation, name: str) -> float:
    """How far the row that an update is made of lies from the nearest row of the hospitals; 0: it is that row."""
    (after,) = weights(federation.root / "runs" / name).values()
    before = RemoteServer(ModelSettings(name="logistic"), {"features": [5], "classes": 2}).initial(1)
    change = (after - before).reshape(-1)
    weight, bias = change[: 5 * (len(change) // 6)].reshape(-1, 5)[0], change[5 * (len(change) // 6)]
    row = (weight / bias).to(torch.float64).numpy()
    files = [np.load(federation.root / f"hospital-{letter}.npz")["x"] for letter in "ab"]
    return float(np.abs(np.concatenate(files) - row).max(axis=1).min())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("one-row", ONE_ROW, "NotAllowed: data.share: got 1e-09"),
        ("wiped", WIPED, "NotAllowed: training.batch_size: with this learning_rate"),
    ],
)
def test_no_update_is_a_row(federation: Federation, name: str, changes: dict[str, str], line: str):
    code, told = submitted(federation, name, changes)
    if code == 0:
        assert leaked(federation, name) > 1e-3
    assert (code, line in told) == (2, True), told


@pytest.mark.slow
def test_no_column_becomes_names(clinic: Federation):
    asked = {"data.owner": "ssn", "partition.scheme": "natural", "partition.clients": "10", "rounds.count": "1"}
    code, told = submitted(clinic, "names", {**asked, "federate.nodes": "1"})
    if code == 0:
        assert not any("123-45-" in name for name in History(clinic.root / "runs" / "names").clients["client"])
    assert "123-45-" not in told
    assert (code, "NotAllowed: data.owner: got 'ssn'" in told) == (2, True), told


@pytest.mark.slow
def test_an_honest_experiment_runs_on_all_of_them(clinic: Federation):
    changes = {"rounds.count": "1", "federate.nodes": "3"}
    shared = {"partition.clients": "2", "partition.seed": "7", "partition.minimum": "2"}
    code, told = submitted(clinic, "honest", {**changes, **shared})
    assert code == 0, told
    history = History(clinic.root / "runs" / "honest")
    assert set(history.clients["client"]) == {"client-000", "client-001", "hospital-a", "hospital-b"}
    assert history.clients["failure"].isna().all()
    assert history.untested["client"].tolist() == [name for name in history.untested["client"] if "client-" in name]
