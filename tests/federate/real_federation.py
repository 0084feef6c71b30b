"""Real processes of federations: nodes, servers, runs that are waited for, and what is left of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.federate.small_experiment import described
from tests.ports import free_ports

from steelyard.experiment.loading import build, to_toml
from steelyard.federate.certificates import make_certificates, make_key
from steelyard.federate.local import rounds_of
from steelyard.federate.workers import Process, end_all, environment
from steelyard.runs.history import History

LONG = ("--set", "rounds.count=2000", "--set", "rounds.evaluate_every=2000")


def experiment(nodes: int, timeout: float = 120.0, **sections: Any) -> Any:
    sections = {"partition": {"clients": 8}, "rounds": {"count": 5}, **sections}
    return build({**described(**sections), "federate": {"nodes": nodes, "timeout": timeout}})


def written(folder: Path, **sections: Any) -> str:
    file = folder / "small.toml"
    file.write_text(to_toml(experiment(1, **sections)), encoding="utf-8")
    return str(file)


def left_running(folder: Path) -> list[str]:
    """Processes whose command line or environment speaks of this folder, apart from ourselves."""
    found: list[str] = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
                if str(folder).encode() in words and b"flower" in words:
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return found


def last_round(folder: Path) -> int:
    return rounds_of(folder)[0]


def failures(folder: Path, client: str) -> dict[int, str | None]:
    """Return why a client was left out, by round; None where it took part."""
    rows = History(folder).clients
    mine = rows[rows["client"] == client]
    found = zip(mine["round"].tolist(), mine["failure"].tolist(), strict=True)
    return {round: why if isinstance(why, str) else None for round, why in found}


def server_apps(root: Path) -> list[int]:
    """Return the server apps of a federation's server: those whose register lies in this folder."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            app = b"flwr-serverapp" in (process / "cmdline").read_bytes()
            if app and f"STEELYARD_REGISTER={root}".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


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
keep-model = true
"""


class Federation:
    """A served folder and its nodes, on this machine."""

    def __init__(self, root: Path) -> None:
        self.root, self.env = root, environment(root / "home")
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
        command = [sys.executable, "-m", "steelyard", "federate", *arguments]
        process = Process(name, command, {**self.env, **env}, self.root / f"{name}.log", self.root)
        self.processes.append(process)
        return process

    def node(self, name: str, **env: str) -> Process:
        return self.start(name, "node", f"{name}.toml", **env)

    def stop(self, name: str) -> None:
        """Let a node leave."""
        end_all([process for process in self.processes if process.name == name])


@contextmanager
def hospitals(
    root: Path, names: Sequence[str] = ("hospital-a", "hospital-b"), terms: str = "", **serving: str
) -> Generator[Federation]:
    """Serve two hospitals, each with its own key, data and process; all have the public keys of all, and some terms.

    `serving` are environment variables of the server.
    """
    made, rng = Federation(root), np.random.default_rng(3)
    make_certificates(root / "tls", ["127.0.0.1"])
    (root / "peers").mkdir()
    for name in names:
        features = rng.normal(size=(160 if name.endswith("-c") else 120, 5)).astype("f4")
        np.savez(root / f"{name}.npz", x=features, y=(features.sum(axis=1) > 0).astype("i8"))
        make_key(root / name)
        (root / f"{name}.toml").write_text(NODE.format(address=f"127.0.0.1:{made.port}", name=name) + terms)
        shutil.copy(root / f"{name}.pub", root / "peers")
        assert made.steelyard("register", "server", f"{name}.pub", "--client", name).returncode == 0
    (root / "hospitals.toml").write_text(HOSPITALS)
    try:
        made.start("serve", "serve", "server", "--tls", "tls", "--listen", f"127.0.0.1:{made.port}", **serving)
        made.server_process.wait_for_port(made.port, 100)
        for name in names:
            made.node(name)
        yield made
    finally:
        end_all(made.processes[::-1])


def fill(disk: Path) -> Path:
    """Write until nothing more goes onto a disk; returns the file to remove."""
    filler = disk / "filler"
    handle = os.open(filler, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(handle, bytes(4096))
    except OSError:
        os.close(handle)
    return filler
