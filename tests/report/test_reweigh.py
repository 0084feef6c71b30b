"""Weighing a run's updates again: the recorded rule gives the recorded weights, another rule what hand and CLI give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import CommandLine
from tests.report.made_run import make_run

from steelyard.cli.summaries import show_reweighed
from steelyard.errors import UserError
from steelyard.report.reweigh import cohorts, federation_with, reweigh
from steelyard.report.view import RunView
from steelyard.weighing.rule import WeighingSettings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("reweigh") / "run", rounds=5, clients=6, seeds=(1, 2))


@pytest.fixture(scope="module")
def view(run: Path) -> RunView:
    return RunView([run])


def test_the_rule_that_was_used_gives_the_weights_that_were_recorded(view: RunView) -> None:
    part = view.federation("VP>DS", 1)
    found = reweigh(view, part, WeighingSettings(criteria=("VP", "DS")))
    assert found["rounds"] == 5
    for row in found["clients"]:
        assert row["weight"] == pytest.approx(row["recorded"], abs=1e-12)
    assert sum(row["weight"] for row in found["clients"]) == pytest.approx(1)


def test_another_rule_by_hand(view: RunView) -> None:
    part = view.federation("VP>DS", 1)
    found = reweigh(view, part, WeighingSettings(criteria=("DS",)))
    totals: dict[str, float] = {}
    for _, clients, raw, _ in cohorts(view.clients(part), ["DS"]):
        for client, size in zip(clients, raw[:, 0], strict=True):
            totals[client] = totals.get(client, 0.0) + size / raw[:, 0].sum()
    assert {row["client"]: row["weight"] for row in found["clients"]} == pytest.approx(
        {client: total / 5 for client, total in totals.items()}
    )
    flawed = [row for row in found["clients"] if row["flaws"]]
    assert {row["client"] for row in flawed} <= {"client-0", "client-1"}
    assert found["flawed"]["weight"] == pytest.approx(sum(row["weight"] for row in flawed))
    assert "not a result" in found["note"]


def test_the_updates_are_those_of_a_rule_that_measured_what_is_asked_for(view: RunView) -> None:
    assert federation_with(view, [], None, None).label == "VP>DS"
    assert federation_with(view, ["LD"], None, None).label == "online(DS>LD)"
    with pytest.raises(UserError, match=r"criteria: MD not measured under .*allowed: VP>DS: VP, DS; fedavg: DS"):
        federation_with(view, ["MD"], None, None)
    with pytest.raises(UserError, match="criteria: LD not measured under 'fedavg'"):
        federation_with(view, ["LD"], "fedavg", None)


def test_the_command(
    steelyard: CommandLine, refused: Callable[..., str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = steelyard("weigh", run, "--priority", "DS>VP", "--normalise", "max", "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    view = RunView([run])
    settings = WeighingSettings(criteria=("DS", "VP"), normalise="max")
    expected = reweigh(view, view.federation("VP>DS", 1), settings)["clients"]
    assert [row["client"] for row in document["clients"]] == [row["client"] for row in expected]
    assert np.allclose([r["weight"] for r in document["clients"]], [r["weight"] for r in expected], atol=1e-12)
    show_reweighed(document)
    text = capsys.readouterr().out
    assert "as recorded" in text
    assert "not a result" in " ".join(text.split())
    again = steelyard("weigh", run, "--by", "DS>VP/max", "--format", "json")
    assert json.loads(again.stdout) == document
    assert "--normalise: got 'none' for a run" in refused("weigh", run, "--normalise", "none")
    assert "--by: got 'DS' together" in refused("weigh", run, "--by", "DS", "--score", "mean")
