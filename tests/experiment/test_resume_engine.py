"""A resumed run trains with the engine that the run recorded, whatever this machine would choose now."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.stopping import stop_in_round

from steelyard.cli.summaries import show_summary
from steelyard.clients.local.engines import choice_file
from steelyard.experiment.loading import build
from steelyard.experiment.running import resume, run
from steelyard.report.html import html
from steelyard.report.summary import summarise
from steelyard.report.view import RunView
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
    monkeypatch.setattr(choice_file, "read", lambda key: choice_file.Choice("stacked:2"))
    whole = History(run(build(EXPERIMENT), out=tmp_path / "whole"))
    with monkeypatch.context() as stopping:
        stop_in_round(3, stopping)
        with pytest.raises(KeyboardInterrupt):
            run(build(EXPERIMENT), out=tmp_path / "stopped")
    assert History(tmp_path / "stopped").info["engine_choice"] == "stacked:2"
    # A trial on another day might say so.
    monkeypatch.setattr(choice_file, "read", lambda key: choice_file.Choice("threads"))
    resumed = History(resume(tmp_path / "stopped"))
    assert resumed.info["engine_choice"] == "stacked:2"
    assert resumed.info["engine_reason"] == "asked for"
    assert resumed.rounds["round"].tolist() == [0, 1, 2, 3, 4]
    cost = ["seconds", "cpu", "gpu"]
    assert resumed.rounds.drop(columns=cost).equals(whole.rounds.drop(columns=cost))


NOTE = "the model draws at random while it trains; clients are trained one after another"
NETWORK = """
import torch
class Noisy(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, x):
        x = x.flatten(1)
        return super().forward(x + 0.1 * torch.rand(x.shape) if self.training else x)
"""


def test_chance_outside_the_names_is_told_and_repeats_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "nets.py").write_text(NETWORK)
    experiment = {**EXPERIMENT, "model": {"name": str(tmp_path / "nets.py:Noisy")}, "rounds": {"count": 2}}
    whole = run(build(experiment), out=tmp_path / "whole")
    with monkeypatch.context() as stopping:
        stop_in_round(2, stopping)
        with pytest.raises(KeyboardInterrupt):
            run(build(experiment), out=tmp_path / "stopped")
    resumed = resume(tmp_path / "stopped")
    for folder in (whole, resumed):
        assert History(folder).notes.startswith(f"{NOTE}; ")
        show_summary(summarise(folder, build(experiment).rounds))
        assert NOTE in " ".join(capsys.readouterr().out.split())
        assert NOTE in html(RunView([History(folder)]))
    cost = ["seconds", "cpu", "gpu"]
    assert History(resumed).rounds.drop(columns=cost).equals(History(whole).rounds.drop(columns=cost))


def test_dropout_inside_torchs_layers_is_no_chance_outside_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "nets.py").write_text("""
from torch import nn
class Encoded(nn.Sequential):
    def __init__(self):
        first = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        super().__init__(nn.Flatten(), nn.Unflatten(1, (8, 8)), first, nn.Flatten(), nn.Linear(64, 10))
""")
    changed = {"model": {"name": str(tmp_path / "nets.py:Encoded")}, "compute": {"engine": "vmap:3", "device": "cpu"}}
    experiment = {**EXPERIMENT, **changed, "rounds": {"count": 2}}
    whole = History(run(build(experiment), out=tmp_path / "whole"))
    with monkeypatch.context() as stopping:
        stop_in_round(2, stopping)
        with pytest.raises(KeyboardInterrupt):
            run(build(experiment), out=tmp_path / "stopped")
    resumed = History(resume(tmp_path / "stopped"))
    assert resumed.info["engine_choice"] == "vmap:3"
    assert "at random" not in whole.notes
    cost = ["seconds", "cpu", "gpu"]
    assert resumed.rounds.drop(columns=cost).equals(whole.rounds.drop(columns=cost))
