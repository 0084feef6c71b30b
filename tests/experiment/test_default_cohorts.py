"""Who takes part where no share is given: what is run, recorded, accounted and shown; and rounds of one client."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.kit import SMALL

from steelyard.experiment.loading import build
from steelyard.experiment.running import run
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.ledger import FILE, Ledger
from steelyard.result import Result
from steelyard.runs.history import History


def of(clients: int = 12, **rounds: Any) -> dict[str, Any]:
    partition = {"scheme": "iid", "clients": clients}
    weighing = {"criteria": ["DS", "LD"]}
    return {**SMALL, "partition": partition, "rounds": {"count": 3, **rounds}, "weighing": weighing}


def recorded(folder: Path) -> float:
    """The share that a run's folder names."""
    return tomllib.loads((folder / "experiment.toml").read_text())["rounds"]["fraction"]


@pytest.mark.parametrize(("clients", "asked", "share"), [(12, 12, 1.0), (51, 10, 10 / 51)])
def test_a_run_without_a_share_asks_enough_clients_and_records_the_share(
    clients: int, asked: int, share: float, tmp_path: Path
) -> None:
    folder = run(build(of(clients)), out=tmp_path / "run")
    assert History(folder).rounds["answered"].tolist()[1:] == [asked] * 3
    assert recorded(folder) == share
    assert Result(folder).comparison.weighed_one == ()


def test_the_fewest_clients_of_all_seeds_decide(tmp_path: Path) -> None:
    """Owners are drawn by the seed here: the seeds have 50 and 51 clients, and one share holds for both."""
    counts = {0: 50, 1: 51}

    experiment = build(of(51))

    def assemble() -> Any:
        clients, server = experiment.assemble()
        names = clients.names
        clients.names = lambda seed: names(seed)[: counts[seed]]
        return clients, server

    folder = run(experiment, out=tmp_path / "run", seeds=[1, 0], assemble=assemble)
    assert recorded(folder) == 1.0


def test_the_share_that_came_of_it_is_what_is_accounted(tmp_path: Path) -> None:
    weighing = {"criteria": ["EQ"], "max_shares": 2.0}
    privacy = {"central": {"clip": 1.0, "noise": 2.0}}
    folder = run(build({**of(60, sampling="poisson"), "weighing": weighing, "privacy": privacy}), out=tmp_path / "run")
    release = Release(2.0, "poisson", 10 / 60)
    assert recorded(folder) == 10 / 60
    assert [charge.release for charge in Ledger(folder / FILE).charges] == [release] * 3
    assert History(folder).rounds["epsilon"].iloc[-1] == pytest.approx(spent({release: 3}, 1e-5), abs=1e-6)


def test_rounds_of_one_client_are_said_once_and_counted(tmp_path: Path, messages: list[str]) -> None:
    result = Result(run(build(of(fraction=0.1)), out=tmp_path / "run"))
    assert sum("weighted one client only" in line for line in messages) == 1
    assert [dict(row) for row in result.comparison.weighed_one] == [{"rule": "DS>LD", "seed": 5, "rounds": 3, "of": 3}]
    assert result.comparison.tested().rule is None
