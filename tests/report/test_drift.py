"""Findings in the data travels with a run: into its report, its record and a heat map."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.report.made_run import make_run

from steelyard.data.findings import found
from steelyard.report.figures import draw
from steelyard.report.html import html
from steelyard.report.record import record
from steelyard.report.view import RunView
from steelyard.runs.facts import RunFacts
from steelyard.runs.store import Store


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("checked") / "run", rounds=1, clients=4, seeds=(1,))
    accepted = found("labels-spelled-alike", "labels at 'south' differ").model_copy(update={"accepted": True})
    drift = {"north": {"age": 0.1, "size": 0.02}, "south": {"age": 2.5}}
    store = Store(folder)
    store.note(RunFacts(findings=[accepted], drift=drift))
    store.close()
    return folder


def test_findings_stand_in_the_report_and_in_the_record(checked: Path) -> None:
    line = "error, accepted: labels at &#39;south&#39; differ (labels-spelled-alike)"
    page = html(RunView([checked]))
    assert page.index("Findings in the data") < page.index(line)
    assert record(checked)["findings"] == ["error, accepted: labels at 'south' differ (labels-spelled-alike)"]


def test_the_columns_that_drift_most_come_first(checked: Path) -> None:
    chart = draw(RunView([checked]), "drift")
    assert chart is not None
    assert "most: age 2.50" in chart.description
    assert chart.to_dict()["encoding"]["y"]["sort"] == ["age", "size"]
