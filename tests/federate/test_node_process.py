"""A server and two nodes as real processes, each with its own file: a run from nothing, and what a node refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from tests.ports import free_ports

from steelyard.errors import UserError
from steelyard.federate.certificates import make_certificates, make_key
from steelyard.federate.node import read_node
from steelyard.federate.processes import Process, end_all, environment
from steelyard.runs.reader import History

HOSPITALS = """
name = "hospitals"
seed = 1
[data]
source = "npz"
path = "own.npz"
classes = 2
[partition]
scheme = "iid"
clients = 2
minimum = 2
test = "local"
[model]
name = "logistic"
[rounds]
count = 4
fraction = 1.0
[weighing]
criteria = ["DS", "CB"]
score = "prioritized"
priority = "CB>DS"
[federate]
nodes = 2
timeout = 60
start_timeout = 100
"""
NODE = """
server = "{address}"
ca = "tls/ca.pem"
key = "{name}"
client = "{name}"
data = "{name}.npz"
state = "state-{name}"
"""


class Federation:
    """A served folder and its nodes, on this machine."""

    def __init__(self, root: Path, server: str) -> None:
        self.root, self.server, self.env = root, server, environment(root / "home")
        (self.port,) = free_ports(1)
        self.processes: list[Process] = []

    @property
    def server_process(self) -> Process:
        return self.processes[0]

    def steelyard(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "steelyard", "federate", *arguments]
        return subprocess.run(command, env=self.env, cwd=self.root, capture_output=True, text=True, timeout=280)

    def start_and_listen(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "steelyard", "federate", *arguments]
        return subprocess.Popen(
            command, env=self.env, cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def start(self, name: str, *arguments: str, **env: str) -> Process:
        return self._process(name, [sys.executable, "-m", "steelyard", "federate", *arguments], **env)

    def run_script(self, name: str, *arguments: str) -> Process:
        return self._process(name, [sys.executable, *arguments])

    def _process(self, name: str, command: list[str], **env: str) -> Process:
        process = Process(name, command, {**self.env, **env}, self.root / f"{name}.log", self.root)
        self.processes.append(process)
        return process

    def node(self, name: str, **env: str) -> Process:
        return self.start(name, "node", f"{name}.toml", **env)

    def stop(self, name: str) -> None:
        """Let a node leave."""
        end_all([process for process in self.processes if process.name == name])


@contextmanager
def hospitals(root: Path, server: str = "server", script: str = "") -> Generator[Federation]:
    """Serve two hospitals, each with its own key, data and process; by a script of a test where one is given."""
    made, rng = Federation(root, server), np.random.default_rng(3)
    make_certificates(root / "tls", ["127.0.0.1"])
    for name in ("hospital-a", "hospital-b"):
        features = rng.normal(size=(120, 5)).astype("f4")
        np.savez(root / f"{name}.npz", x=features, y=(features.sum(axis=1) > 0).astype("i8"))
        make_key(root / name)
        (root / f"{name}.toml").write_text(NODE.format(address=f"127.0.0.1:{made.port}", name=name))
        assert made.steelyard("register", server, f"{name}.pub", "--client", name).returncode == 0
    (root / "hospitals.toml").write_text(HOSPITALS)
    try:
        if script:
            (root / "serve.py").write_text(script)
            made.run_script("serve", "serve.py", server, str(made.port))
        else:
            made.start("serve", "serve", server, "--tls", "tls", "--listen", f"127.0.0.1:{made.port}")
        made.server_process.wait_for_port(made.port, 100)
        made.node("hospital-a")
        made.node("hospital-b")
        yield made
    finally:
        end_all(made.processes[::-1])


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Generator[Federation]:
    with hospitals(tmp_path_factory.mktemp("federation")) as made:
        yield made


@pytest.mark.slow
def test_a_run_from_nothing_and_a_node_that_is_killed_and_started_again(federation: Federation):
    done = federation.steelyard("submit", "server", "hospitals.toml", "--out", "runs/first")
    assert done.returncode == 0, done.stdout + done.stderr
    history = History(federation.root / "runs" / "first")
    assert history.clients["failure"].isna().all()
    assert history.untested.empty
    assert history.rounds["accuracy"].iloc[-1] > 0.8
    seconds = history.rounds["seconds"].iloc[1:].median()
    print(f"seconds a round: {seconds:.2f}")
    assert seconds < 15  # 1 to 2 on an idle machine; Flower's own SuperNode takes 20 to 60.
    victim = federation.processes[2]
    os.kill(victim.pid, signal.SIGKILL)
    federation.node("hospital-b")  # The same key: the same node.
    again = federation.steelyard("submit", "server", "hospitals.toml", "--set", "rounds.count=2", "--out", "runs/again")
    assert again.returncode == 0, again.stdout + again.stderr
    assert set(History(federation.root / "runs" / "again").clients["client"]) == {"hospital-a", "hospital-b"}


@pytest.mark.slow
def test_code_that_a_server_names_does_not_run_on_a_node(federation: Federation):
    root = federation.root
    (root / "net.py").write_text(
        "import os\nfrom torch import nn\n\ndef network(feature_shape, outputs):\n"
        f"    open({str(root)!r} + f'/ran-{{os.getpid()}}', 'w').close()\n"
        "    return nn.Linear(feature_shape[0], outputs)\n"
    )
    name = f"{root / 'net.py'}:network"
    done = federation.steelyard(
        "submit", "server", "hospitals.toml", "--set", f"model.name={name}", "--trust", "--out", "runs/code"
    )
    assert done.returncode == 2
    assert "NotAllowed: model.name:" in done.stderr, done.stdout + done.stderr
    time.sleep(0.5)
    ran = [int(path.name.split("-")[1]) for path in root.glob("ran-*")]
    assert len(set(ran)) <= 2  # The server's own processes, where its owner asked for it; no node's.
    for node in federation.processes[1:]:
        assert "is not run here" in node.log.read_text() or node.code is not None


@pytest.mark.slow
def test_a_node_counts_what_it_tells_over_runs_and_restarts(tmp_path: Path):
    """With noise 2, three rounds tell epsilon 3.709 and four 4.377: the second run has two rounds and gets one."""
    noise = ("--set", "privacy={criteria='public',local={clip=0.5,noise=2.0}}", "--set", "rounds.count=2")
    with hospitals(tmp_path) as made:
        made.stop("hospital-a")
        file = tmp_path / "hospital-a.toml"
        file.write_text(file.read_text() + 'require = "local"\nepsilon = 3.8\n')
        for number, run in enumerate(("first", "second")):
            node = made.start(f"counting-{number}", "node", "hospital-a.toml")
            done = made.steelyard("submit", "server", "hospitals.toml", *noise, "--out", f"runs/{run}")
            assert done.returncode == 0, done.stdout + done.stderr
            made.stop(f"counting-{number}")
        lines = node.log.read_text().splitlines()
        assert lines[0] == "steelyard: ledger: epsilon 2.943 of 3.8 in 2 answers so far (delta 1e-05)"
        assert [line.partition("takes ")[2] for line in lines if "answer 3 " in line] == ["epsilon to 3.709 of 3.8"]
        (refused,) = [line for line in lines if "not answered: " in line]
        assert "round 2 would take the total of this node's answers over its epsilon 3.8" in refused
        rows = History(tmp_path / "runs" / "second").clients
        left = rows[rows["failure"].notna()]
        assert left[["client", "round"]].to_numpy().tolist() == [["hospital-a", 2]]
        shown = made.steelyard("ledger", "hospital-a.toml").stdout.splitlines()
        assert [line.partition(" to ")[0] for line in shown] == [
            "epsilon 2.943 in 2 answers",
            "epsilon 1.993 in 1 answer",
            "epsilon 3.709 of 3.8 in 3 answers in all (delta 1e-05)",
        ]
        (tmp_path / "state-hospital-a" / "ledger.jsonl").write_text("")
        again = made.steelyard("node", "hospital-a.toml")
        assert (again.returncode, again.stderr.count("\n")) == (2, 1)
        assert "is damaged (it is empty)" in again.stderr


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('server = "here"\nclient = "a"\n', "server: got 'here'; allowed: the server's address and port"),
        ('server = "h:1"\nclient = "a"\n', "ca: got None; allowed: the path of a file"),
        ('server = "h:1"\ninsecure = true\nclient = "a"\nalow = "x"\n', "alow: unknown (did you mean 'allow'?)"),
        ('server = "h:1"\ninsecure = true\n', "node config: got no clients"),
        ("server = ", "not TOML"),
    ],
)
def test_a_wrong_node_file_is_named(tmp_path: Path, text: str, line: str):
    (tmp_path / "node.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        read_node(tmp_path / "node.toml")
    assert line in str(caught.value)


def test_paths_of_a_node_file_are_meant_from_its_folder(tmp_path: Path):
    (tmp_path / "x.npz").touch()
    (tmp_path / "node.toml").write_text('server = "h:1"\ninsecure = true\nclient = "a"\ndata = "x.npz"\nstate = "/s"\n')
    server, config = read_node(tmp_path / "node.toml")
    assert (server.address, server.authority) == ("h:1", None)
    assert config == {"client": "a", "data": str(tmp_path / "x.npz"), "state": "/s"}


def test_state_files_are_their_owners_alone(tmp_path: Path):
    import torch
    from flwr.app import RecordDict

    from steelyard.federate.node_state import NodeStates

    states: Any = NodeStates(RecordDict(), "r", "f", 2, tmp_path / "state")
    states.keep(1, {"vector": torch.ones(2)})
    (file,) = (tmp_path / "state").iterdir()
    assert (file.stat().st_mode & 0o777) == 0o600
