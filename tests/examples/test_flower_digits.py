"""The Flower app among the examples: FedAvg fails on it, weights do not; in Flower's simulation with ray, too."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from tests.adapters.flower_grid import Nodes, enter_run
from tests.warm import ROOT

from steelyard.runs.history import History

APP = ROOT / "examples" / "flower_digits"
RULE = "power(VP)^3"
CONFIG: dict[str, Any] = {"num-server-rounds": 5, "local-epochs": 3, "learning-rate": 0.5}


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
def test_flwr_run_starts_it_in_flowers_simulation_with_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    home = tmp_path / "flower"
    app = shutil.copytree(APP, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    words = ["--federation-config", "num-supernodes=6", "--stream"]
    config = f"rule='{RULE}' folder='{tmp_path / 'run'}'"
    try:
        done = subprocess.run(
            ["flwr", "run", ".", *words, "--run-config", config],
            cwd=app, env=environment, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
    finally:
        for process in Path("/proc").glob("[0-9]*"):  # Flower leaves its SuperLink there for the next run.
            if str(home).encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGTERM)
    assert accuracy(done.stdout) > 0.85, done.stdout + done.stderr
    assert History(tmp_path / "run").last_round == 5
