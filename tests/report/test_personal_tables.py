"""Where clients test models of their own, tables, JSON and the report say so, and clients' scores decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard import Experiment
from steelyard.experiment.comparing import with_rules
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.running import run
from steelyard.report.answer import main_table, write_comparison
from steelyard.report.comparison import compare_run
from steelyard.report.headline import headline
from steelyard.report.view import RunView
from steelyard.runs.reader import History


def ran(folder: Path, rules: str) -> Path:
    document = {
        "rounds": {"count": 2},
        "partition": {"clients": 4, "server": "fraction", "server_fraction": 0.2, "server_report": "same"},
        "model": {"name": "logistic"},
    }
    return run(with_rules(Experiment.model_validate(document), [rules]), out=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.mktemp("personal") / "run", "fedavg,local-only,fine-tuned")


def test_both_scores_are_columns_and_the_first_says_whose_models(folder: Path) -> None:
    document = compare_run(folder, read_experiment(folder))
    assert document["personal"] == ["fine-tuned", "local-only"]
    text = write_comparison(document, "text")
    (heading,) = [line for line in text.splitlines() if "server's rows (%)" in line]
    assert heading.split()[:4] == ["rule", "algorithm", "tested", "final"]
    whose = ("  own models ", "  common model ")
    rows = {line.split()[0]: line for line in text.splitlines() if any(words in line for words in whose)}
    assert {rule: "own models" in line for rule, line in rows.items()} == {
        "fedavg": False,
        "local-only": True,
        "fine-tuned": True,
    }
    # The server tests the common model: FedAvg's with and without fine-tuning, the first one where nobody sends.
    served = {row["rule"]: row["accuracy"]["mean"] for row in document["server"]}
    assert served["fedavg"] == served["fine-tuned"] != served["local-only"]
    devices = {row["rule"]: row["final"]["mean"] for row in document["devices"]}
    assert devices["fedavg"] != devices["fine-tuned"]
    for rule, line in rows.items():
        assert line.rstrip().endswith(f"{100 * served[rule]:.2f}")


def test_the_report_goes_by_the_clients_scores(folder: Path) -> None:
    document = compare_run(folder, read_experiment(folder))
    assert main_table(document).headings[:3] == ("rule", "algorithm", "tested")
    curves = {row["rule"]: row["mean"] for row in document["curves"]}
    for row in document["recommendation"]["rules"]:
        assert row["value"]["mean"] == pytest.approx(sum(curves[row["rule"]]) / 2)  # of both rounds, on the clients
    assert "on the clients' " in headline(RunView([History(folder)]))[0]


def test_without_such_models_nothing_is_said(tmp_path: Path) -> None:
    found = ran(tmp_path / "run", "fedavg,LD")
    document = compare_run(found, read_experiment(found))
    assert document["personal"] == []
    assert "tested" not in main_table(document).headings
