"""The Flower app among the examples: FedAvg fails on it, weighing does not; on a SuperLink too."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from tests.adapters.flower_grid import Nodes
from tests.ports import free_ports
from tests.warm import ROOT

from steelyard.clients.flower.adapter.messages import enter_run
from steelyard.federate.app_folder import CONNECTION, connection_file
from steelyard.federate.processes import Process, end_all, environment, reserved_port, start_superlink
from steelyard.runs.reader import History

APP = ROOT / "examples" / "flower_digits"
RULE = "power(VP)^3"
CONFIG: dict[str, Any] = {"num-server-rounds": 5, "local-epochs": 3, "learning-rate": 0.5}


def test_weighing_takes_ten_lines() -> None:
    marked = [line for line in (APP / "digits_app" / "server_app.py").read_text().splitlines() if line.endswith("# +")]
    assert len(marked) <= 10
    assert "steelyard" not in (APP / "digits_app" / "client_app.py").read_text()


class AppNodes(Nodes):
    """Nodes that run the example's own client app, each with rows of its own."""

    def __init__(self, app: Any, config: dict[str, Any]) -> None:
        super().__init__({number: lambda sent: None for number in range(1, 7)})
        self._app, self._config = app, config

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        enter_run(1, node)
        context = Context(1, node, {"partition-id": node - 1, "num-partitions": 6}, RecordDict(), self._config)
        return self._app(message, context)


def printed(app: Any, grid: Any, config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> float:
    """Run the server app and return the accuracy that it prints."""
    enter_run(1, 1)
    app(grid, Context(1, 1, {}, RecordDict(), config))
    return accuracy(capsys.readouterr().out)


def accuracy(output: str) -> float:
    line = next(line for line in output.splitlines() if " after round " in line)
    return float(line.split("accuracy ")[1].split("%")[0]) / 100


@pytest.mark.slow
def test_fedavg_fails_and_weighing_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(APP))
    server, client = (importlib.import_module(f"digits_app.{name}_app").app for name in ("server", "client"))
    found: dict[str, float] = {}
    for rule in ("fedavg", RULE):
        config = {**CONFIG, "rule": rule, "folder": str(tmp_path / "run")}
        found[rule] = printed(server, AppNodes(client, config), config, capsys)
    assert found["fedavg"] < 0.3
    assert found[RULE] > 0.85
    weights = History(tmp_path / "run").cohorts(RULE, 0, after=4)
    assert weights.weight[:2].max() < 0.05 < weights.weight[2:].min()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_a_superlink_with_six_supernodes(tmp_path: Path) -> None:
    """Flower's own processes on loopback: SuperLink, SuperNodes, `flwr run`; each task is a process."""
    listener = reserved_port()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "config.toml").write_text(connection_file(address, None))
    env = environment(tmp_path / "flwr", OMP_NUM_THREADS="1")
    processes: list[Process] = []
    try:
        superlink = start_superlink(["--insecure"], listener, env, tmp_path / "superlink.log", tmp_path)
        processes.append(superlink)
        superlink.wait_for_port(int(address.rpartition(":")[2]), 120)
        for number, port in enumerate(free_ports(6)):
            config = f"partition-id={number} num-partitions=6"
            command = [str(Path(sys.executable).parent / "flower-supernode"), "--insecure", "--superlink", address]
            command += ["--node-config", config, "--port", str(port)]
            processes.insert(0, Process(f"node-{number}", command, env, tmp_path / f"node-{number}.log", tmp_path))
        changes = f'rule="{RULE}" folder="{tmp_path / "run"}" num-server-rounds=2'
        done = subprocess.run(
            ["flwr", "run", str(APP), CONNECTION, "--stream", "--run-config", changes],
            env=env,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert "after round 2" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    finally:
        end_all(processes)
    history = History(tmp_path / "run")
    assert (history.chain.round, history.chain.problem) == (2, "")
    found = history.cohorts(RULE, 0, after=1)
    assert sorted(found.samples.tolist()) == [100] * 4 + [450] * 2
    assert found.weight[found.samples == 450].max() < 0.05
    assert history.rounds["server_accuracy"].iloc[-1] > 0.7
