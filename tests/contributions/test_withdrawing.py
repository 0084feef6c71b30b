"""A run without a client: nobody asks or tests it, both folders name each other, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import CommandLine
from tests.contributions.test_replaying import experiment

from steelyard.contributions.finding import without
from steelyard.experiment.running import resume, run
from steelyard.runs.reader import History


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(experiment(), out=tmp_path_factory.mktemp("withdrawn") / "run")


def test_a_run_without_a_client(folder: Path, tmp_path: Path, steelyard: CommandLine) -> None:
    done = steelyard("withdraw", folder, "client-002", "--out", tmp_path / "fewer")
    assert done.returncode == 0, done.stderr
    before, after = History(folder), History(tmp_path / "fewer")
    assert "client-002" in set(before.clients["client"])
    for frame in (after.clients, after.evaluations):
        assert set(frame["client"]) == set(before.evaluations["client"]) - {"client-002"}
    lineage = json.loads(after.info["withdrawn_from"])
    assert lineage == {"run": str(folder), "head": before.chain.head, "client": "client-002", "round": 0}
    assert json.loads(before.info["withdrawals"]) == [{"client": "client-002", "run": str(tmp_path / "fewer")}]
    assert not before.chain.problem
    assert not after.chain.problem
    assert resume(tmp_path / "fewer") == tmp_path / "fewer"


def test_the_model_is_that_of_the_retrained_others(folder: Path, tmp_path: Path) -> None:
    from steelyard.contributions.withdrawing import withdraw

    fewer = withdraw(folder, "client-001", out=tmp_path / "fewer")
    truth = without(folder, "client-001", retrained=True)
    again = without(fewer, "client-000", retrained=True)
    assert again["after"] == pytest.approx(truth["without"], rel=1e-5)


def test_what_is_refused(folder: Path, refused: Callable[..., str]) -> None:
    assert "CLIENT: got 'client-999'" in refused("withdraw", folder, "client-999")
    assert "holds a run already" in refused("withdraw", folder, "client-001", "--out", folder)
    assert "no run here" in refused("withdraw", folder.parent, "client-001")
