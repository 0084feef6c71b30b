"""A resumed run trains with the engine that the run recorded, whatever this machine would choose now."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.stopping import stop_in_round

from steelyard.clients.local.engines import choice_file
from steelyard.experiment.loading import build
from steelyard.experiment.running import resume, run
from steelyard.runs.reader import History

EXPERIMENT = {
    "data": {"source": "digits", "augment": {"pad": 1, "flip": True}},
    "partition": {"scheme": "iid", "clients": 6},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"batch_size": 50},
    "rounds": {"count": 4},
    "compute": {"device": "cpu", "threads": 1},
}


def test_the_recorded_engine_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_file, "read", lambda key: "stacked:2")
    whole = History(run(build(EXPERIMENT), out=tmp_path / "whole"))
    with monkeypatch.context() as stopping:
        stop_in_round(3, stopping)
        with pytest.raises(KeyboardInterrupt):
            run(build(EXPERIMENT), out=tmp_path / "stopped")
    assert History(tmp_path / "stopped").info["engine_choice"] == "stacked:2"
    monkeypatch.setattr(choice_file, "read", lambda key: "threads")  # a trial on another day might say so
    resumed = History(resume(tmp_path / "stopped"))
    assert resumed.info["engine_choice"] == "stacked:2"
    assert resumed.info["engine_reason"] == "asked for"
    assert resumed.rounds["round"].tolist() == [0, 1, 2, 3, 4]
    cost = ["seconds", "cpu", "gpu"]
    assert resumed.rounds.drop(columns=cost).equals(whole.rounds.drop(columns=cost))
