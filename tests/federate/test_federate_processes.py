"""Real federations on loopback: SuperLink, SuperNodes and apps as processes, with TLS; nodes and servers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from tests.federate import small_experiment
from tests.federate.small_experiment import assert_same_weights
from tests.ports import free_ports

from steelyard.errors import UserError
from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.federate import node_link
from steelyard.federate.certificates import make_key
from steelyard.federate.local import follow, resume_local, rounds_of
from steelyard.federate.local_federation import started
from steelyard.federate.local_launch import Launch
from steelyard.federate.outcomes import read_outcome
from steelyard.runs.reader import History

ROOT = Path(__file__).parents[2]
SMALL = {
    **small_experiment.SMALL,
    "partition": {**small_experiment.SMALL["partition"], "clients": 8},
    "rounds": {"count": 5, "fraction": 0.5},
}


def experiment(nodes: int, timeout: float = 120.0, **sections: Any) -> Any:
    document = {**SMALL, "federate": {"nodes": nodes, "timeout": timeout}}
    for name, value in sections.items():
        document[name] = {**document.get(name, {}), **value} if isinstance(value, dict) else value
    return build(document)


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


def wait_for_round(folder: Path, round: int, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while rounds_of(folder)[0] < round:
        assert time.monotonic() < deadline, f"round {round} was not reached"
        time.sleep(0.05)


def test_two_nodes_with_tls_equal_the_simulation_and_a_stranger_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # It could be a node that was killed a moment ago, so it tries for a while; here once.
    monkeypatch.setattr(node_link, "_FORGOTTEN_SECONDS", 0.0)
    # Only the last round is evaluated, to save time; cohorts of half the clients.
    described = experiment(2, rounds={"count": 3, "evaluate_every": 3})
    run(described, out=tmp_path / "simulated")
    folder = tmp_path / "federated"
    with started(folder, described, Launch(2, tls=True)) as federation:
        key, _ = make_key(tmp_path / "stranger")
        stranger = node_link.Server(federation.address, federation.authority, key)
        with pytest.raises(UserError, match="the server refuses this node"):
            node_link.NodeLink(stranger, None, 0, threading.Event()).run()  # type: ignore[arg-type]
        federation.submit()
        follow(federation, 3)
    assert_same_weights(tmp_path / "simulated", folder)
    here, there = History(tmp_path / "simulated"), History(folder)
    assert here.clients["client"].tolist() == there.clients["client"].tolist()
    assert there.clients["failure"].isna().all()
    np.testing.assert_allclose(here.clients["weight"], there.clients["weight"], rtol=1e-5)
    np.testing.assert_allclose(here.evaluations["score"], there.evaluations["score"], atol=1e-9)
    assert there.info["status"] == "finished"
    assert there.info["nodes"] == "2"  # The stranger is not among them.
    assert left_running(folder) == []


@pytest.mark.slow
def test_the_process_of_a_stranger_tries_for_a_while_and_ends_with_one_line(tmp_path: Path):
    with started(tmp_path / "run", experiment(2), Launch(2, tls=True)) as federation:
        key, _ = make_key(tmp_path / "stranger")
        stranger = federation.start_nodes([0], "stranger", key=key)
        deadline = time.monotonic() + 60
        while stranger.code is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert stranger.code not in (None, 0)
        assert "the server refuses this node" in stranger.log.read_text()


@pytest.mark.slow
def test_a_node_is_killed_then_the_superlink_and_the_run_is_resumed(tmp_path: Path):
    described = experiment(2, timeout=15.0, rounds={"count": 3, "fraction": 1.0, "evaluate_every": 3})
    folder = tmp_path / "run"
    with started(folder, described, Launch(2), apart=True) as federation:
        federation.submit()
        wait_for_round(folder, 1)
        os.kill(federation.nodes[1].pid, signal.SIGKILL)
        wait_for_round(folder, 2)
        assert federation.superlink is not None
        os.kill(federation.superlink.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"the superlink ended \(code -9.*; 2 rounds are whole, `steelyard resume"):
            follow(federation, 3)
    assert left_running(folder) == []
    history = History(folder)
    failed = history.clients[history.clients["failure"].notna()]
    assert failed["client"].tolist() == ["client-001", "client-003", "client-005", "client-007"]
    assert set(failed["failure"]) == {"no answer within 15 s"}
    assert set(failed["round"]) == {2}
    resume_local(folder)
    history = History(folder)
    assert history.info["status"] == "finished"
    assert history.rounds["round"].tolist() == [0, 1, 2, 3]
    last = history.clients[history.clients["round"] == 3]
    assert len(last) == 8
    assert last["failure"].isna().all()  # Both nodes are back.
    assert left_running(folder) == []


@pytest.mark.slow
def test_scaffold_and_feddyn_over_a_real_superlink_that_is_killed_and_resumed_equal_the_simulation(tmp_path: Path):
    described = experiment(
        2,
        weighing={"criteria": ["DS"], "priority": "DS"},
        algorithm={"name": "scaffold"},
        beside={"feddyn": {"criteria": ["DS"], "algorithm": {"name": "feddyn"}}},
        training={"momentum": 0.5, "schedule": {"kind": "cosine"}},
        rounds={"count": 4, "fraction": 0.6, "evaluate_every": 4},
    )
    run(described, out=tmp_path / "simulated")
    folder = tmp_path / "run"
    with started(folder, described, Launch(2)) as federation:
        federation.submit()
        wait_for_round(folder, 2)
        assert federation.superlink is not None
        os.kill(federation.superlink.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"the superlink ended \(code -9"):
            follow(federation, 4)
    assert left_running(folder) == []
    resume_local(folder)
    assert_same_weights(tmp_path / "simulated", folder)
    history = History(folder)
    assert history.clients["failure"].isna().all()
    assert history.info["federation_notes"] == ""  # Nodes that were started anew have what their clients kept.
    assert history.rounds["round"].max() == 4
    assert left_running(folder) == []


@pytest.mark.slow
def test_twenty_nodes_and_three_rounds_lose_nothing(tmp_path: Path):
    described = experiment(20, timeout=300.0, partition={"clients": 40}, rounds={"count": 3, "fraction": 1.0})
    run(described, out=tmp_path / "simulated")
    folder = tmp_path / "run"
    with started(folder, described, Launch(20)) as federation:
        federation.submit()
        follow(federation, 3)
    history = History(folder)
    assert len(history.clients) == 3 * 40
    assert history.clients["failure"].isna().all()
    assert len(history.evaluations) == 4 * 40
    assert_same_weights(tmp_path / "simulated", folder)
    assert left_running(folder) == []


@pytest.mark.slow
def test_five_users_of_a_recommender_on_five_nodes(tmp_path: Path):
    from tests.federate.test_federate_recommend import document

    described = build({**document(tmp_path), "federate": {"nodes": 5, "timeout": 120.0}})
    run(described, out=tmp_path / "simulated")
    folder = tmp_path / "run"
    with started(folder, described, Launch(5)) as federation:
        federation.submit()
        follow(federation, 4)
        private = sorted(folder.name for folder in (federation.home / "private").iterdir())
    assert_same_weights(tmp_path / "simulated", folder)
    asked = set(History(folder).clients["client"])
    assert private == sorted(f"node-00{name[1]}" for name in asked)  # Her vector, on her node alone.


def steelyard(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    command = [sys.executable, "-m", "steelyard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=280, **options)


def written(tmp_path: Path, **sections: Any) -> str:
    from steelyard.experiment.loading import to_toml

    file = tmp_path / "small.toml"
    file.write_text(to_toml(experiment(1, **sections)), encoding="utf-8")
    return str(file)


@pytest.mark.slow
def test_the_command_line_from_start_to_resume(tmp_path: Path):
    folder = tmp_path / "run"
    file = written(tmp_path, rounds={"count": 3})
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    command = [sys.executable, "-m", "steelyard", "federate", "local", file, "--nodes", "2", "--out", str(folder)]
    begun = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_for_round(folder, 1)
    os.kill(read_outcome(folder / "flower")["pid"], signal.SIGKILL)  # The ServerApp.
    _, errors = begun.communicate(timeout=60)
    assert begun.returncode == 2
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("steelyard: the ServerApp was killed; ")
    assert left_running(folder) == []
    resumed = steelyard("resume", str(folder), "--format", "json")
    assert resumed.returncode == 0, resumed.stderr
    assert History(folder).rounds["round"].max() == 3
    again = steelyard("federate", "local", file, "--out", str(folder))
    assert again.returncode == 2
    assert "holds a run already" in again.stderr
    exported = steelyard("export", str(folder))
    assert exported.returncode == 0
    assert len(exported.stdout.splitlines()) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_stops_it_nothing_is_left_running(tmp_path: Path, number: signal.Signals):
    folder = tmp_path / "run"
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    command = [sys.executable, "-m", "steelyard", "federate", "local", written(tmp_path), "--nodes", "2"]
    begun = subprocess.Popen([*command, "--out", str(folder)], env=env, stderr=subprocess.PIPE, text=True)
    wait_for_round(folder, 0)
    begun.send_signal(number)
    begun.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while left_running(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left_running(folder) == []
    assert begun.returncode == (-9 if number == signal.SIGKILL else 130)


@pytest.mark.slow
def test_nodes_that_raise_hang_or_die_are_left_out(tmp_path: Path):
    plugin = tmp_path / "faults.py"
    plugin.write_text(
        "import os, time\n"
        "from steelyard.weighing.criteria import client_criterion\n"
        "@client_criterion('FT', description='misbehaves')\n"
        "def fault(local):\n"
        "    if local.client == 'client-001':\n        raise RuntimeError('disk full')\n"
        "    if local.client == 'client-002':\n        time.sleep(600)\n"
        "    if local.client == 'client-003':\n        os._exit(9)\n"
        "    return 1.0\n",
        encoding="utf-8",
    )
    described = experiment(
        4,
        timeout=15.0,
        partition={"clients": 4},
        rounds={"count": 2, "fraction": 1.0, "evaluate_every": 2},
        weighing={"criteria": ["DS", "FT"], "priority": "DS>FT", "plugins": [str(plugin)]},
    )
    folder = tmp_path / "run"
    with started(folder, described, Launch(4)) as federation:
        federation.submit()
        follow(federation, 2)
    history = History(folder)
    first = history.clients[history.clients["round"] == 1].set_index("client")["failure"]
    assert first.isna()["client-000"]
    assert first["client-001"] == "criterion FT failed: RuntimeError"  # Its class, not what it said.
    assert first["client-002"] in ("no answer within 15 s", "raised an error: TimeoutError: took longer than the 15 s")
    assert first["client-003"] == "its ClientApp died"
    assert (history.rounds["answered"].tolist()) == [0, 1, 1]


@pytest.mark.slow
def test_too_few_clients_stop_the_run_with_a_line(tmp_path: Path):
    described = experiment(2, timeout=8.0, rounds={"count": 3, "fraction": 1.0, "min_clients": 8, "evaluate_every": 3})
    folder = tmp_path / "run"
    with started(folder, described, Launch(2), apart=True) as federation:
        federation.submit()
        wait_for_round(folder, 1)
        os.kill(federation.nodes[1].pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"4 of 8 clients .*fewer than rounds.min_clients = 8.*resume"):
            follow(federation, 3)
    assert History(resume_local(folder)).info["status"] == "finished"


@pytest.mark.slow
def test_an_app_folder_runs_with_flower_alone(tmp_path: Path):
    """`federate init`, then only Flower's own commands: its SuperExec starts every app."""
    from steelyard.federate.processes import Process, end_all, environment

    made = steelyard("federate", "init", str(tmp_path / "app"), written(tmp_path, rounds={"count": 1}), "--set",
                     "federate.nodes=2")  # fmt: skip
    assert made.returncode == 0, made.stderr
    port, *ports = free_ports(3)
    home = tmp_path / "app" / ".flwr"
    config = (home / "config.toml").read_text().replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    (home / "config.toml").write_text(config)
    env = environment(home)
    command = ["flower-superlink", "--insecure", "--port", str(port), "--disable-runtime-dependency-installation"]
    processes = [Process("superlink", command, env, tmp_path / "superlink.log", tmp_path)]
    try:
        processes[0].wait_for_port(port, 60)
        for number, own in enumerate(ports):
            config = ["--node-config", f"partition-id={number} num-partitions=2"]
            command = [
                "flower-supernode",
                "--insecure",
                "--superlink",
                f"127.0.0.1:{port}",
                "--port",
                str(own),
                *config,
            ]
            env = environment(tmp_path / f"home-{number}")
            processes.append(Process(f"node-{number}", command, env, tmp_path / f"node-{number}.log", tmp_path))
        command = ["flwr", "run", str(tmp_path / "app"), "federation", "--stream"]
        done = subprocess.run(
            [*command, "--run-config", f'out="{tmp_path / "run"}"'],
            env=environment(home), capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert "steelyard: finished" in done.stdout, done.stdout + done.stderr
    finally:
        end_all(processes[::-1])
    assert History(tmp_path / "run").rounds["round"].tolist() == [0, 1]
