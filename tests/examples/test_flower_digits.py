"""The Flower app among the examples: FedAvg fails on it, weighing does not; on a SuperLink too."""

from __future__ import annotations

import importlib
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
