"""What a run prints names every measure and says which way is better, on the clients' rows and on the server's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from steelyard import Experiment, in_memory
from steelyard.cli.summaries import show_summary
from steelyard.errors import UserError
from steelyard.report.answer import write_comparison

SERVER = {"clients": 3, "server": "fraction", "server_report": "apart"}


def test_a_regression_has_two_measures_with_two_directions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Experiment(data={"source": "diabetes"}, partition=SERVER, rounds={"count": 1}).run(tmp_path / "run")
    show_summary(result.summary)
    shown = capsys.readouterr().out
    assert "minus RMSE: more is better." in shown
    assert shown.split("on the server's test set: ")[1].split("\n")[0].endswith("(less is better)")
    table = write_comparison(result.table, "text")
    assert "minus RMSE on the clients  worst tenth of the clients" in table
    assert "RMSE: less is better, minus RMSE: more is better." in table


def test_several_labels_show_the_score_itself_on_the_servers_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(1)
    features = draw.normal(size=(120, 4)).astype("float32")
    data = in_memory(features, (features[:, :2] > 0).astype(int))
    experiment = Experiment(data={"source": "memory"}, partition=SERVER, model={"name": "mlp"}, rounds={"count": 1})
    show_summary(experiment.run(tmp_path / "run", dataset=data).summary)
    shown = capsys.readouterr().out
    assert "macro F1: more is better." in shown
    figures = shown.split("on the server's test set: ")[1].split("\n")[0]
    assert figures.startswith("macro F1 ")
    assert ", micro F1 " in figures
    assert figures.endswith("(more is better)")


def test_data_from_python_are_scored_by_what_they_are(tmp_path: Path) -> None:
    """Nobody said that it is a regression: its errors were taken for accuracies, and had no interval."""
    draw = np.random.default_rng(1)
    features = draw.normal(size=(120, 4)).astype("float32")
    data = in_memory(features, 3 * features[:, 0])
    experiment = Experiment(data={"source": "memory"}, partition={"clients": 3}, rounds={"count": 1})
    for name, given in (("same", data), ("by seed", lambda seed: data)):
        summary = experiment.run(tmp_path / name, dataset=given).summary
        assert summary["measure"] == "minus RMSE"
        assert summary["rules"][0]["worst_tenth_on"] is not None
    with pytest.raises(UserError, match=r"data\.task: got 'classes' for data that are 'regression'"):
        experiment.changed({"data.task": "classes"}).run(tmp_path / "wrong", dataset=data)
