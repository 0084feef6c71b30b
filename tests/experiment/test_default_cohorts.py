"""Who takes part where no share is given: what is run, recorded, accounted and shown; and rounds of one client."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import CommandLine

from steelyard.errors import UserError
from steelyard.experiment.description import Description
from steelyard.experiment.loading import build, load, recipes
from steelyard.experiment.running import resume, run
from steelyard.privacy.accounting import Release, spent
from steelyard.privacy.ledger import Ledger
from steelyard.privacy.ledger_marks import FILE
from steelyard.report.answer import write_comparison
from steelyard.result import Result
from steelyard.runs.reader import History
from steelyard.settings import parse

FILE_TEXT = """
name = "small"
[data]
source = "digits"
[partition]
scheme = "iid"
clients = 12
[model]
name = "logistic"
[training]
batch_size = 60
[rounds]
count = 3
[weighing]
criteria = ["DS", "LD"]
[compute]
engine = "loop"
"""


def small(clients: int = 12, **rounds: Any) -> Description:
    document = tomllib.loads(FILE_TEXT)
    document["partition"]["clients"] = clients
    document["rounds"] |= rounds
    return build(document)


def recorded(folder: Path) -> float:
    """The share that a run's folder names."""
    return tomllib.loads((folder / "experiment.toml").read_text())["rounds"]["fraction"]


@pytest.mark.parametrize(("clients", "asked", "share"), [(12, 12, 1.0), (50, 50, 1.0), (51, 10, 10 / 51)])
def test_a_run_without_a_share_asks_enough_clients_and_records_the_share(
    clients: int, asked: int, share: float, tmp_path: Path
) -> None:
    folder = run(small(clients), out=tmp_path / "run")
    assert History(folder).rounds["answered"].tolist()[1:] == [asked] * 3
    assert recorded(folder) == share


def test_a_share_that_is_given_stays(tmp_path: Path) -> None:
    folder = run(small(fraction=0.25), out=tmp_path / "run")
    assert History(folder).rounds["answered"].tolist()[1:] == [3] * 3
    assert recorded(folder) == 0.25


def test_the_fewest_clients_of_all_seeds_decide(tmp_path: Path) -> None:
    """Owners are drawn by the seed here: the seeds have 50 and 51 clients, and one share holds for both."""
    counts = {0: 50, 1: 51}

    class Counted:
        def __init__(self, clients: Any) -> None:
            self.clients = clients

        def names(self, seed: int) -> tuple[str, ...]:
            return self.clients.names(seed)[: counts[seed]]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.clients, name)

    experiment = small(51)

    def assemble() -> Any:
        clients, server = experiment.assemble()
        return Counted(clients), server

    folder = run(experiment, out=tmp_path / "run", seeds=[1, 0], assemble=assemble)
    assert recorded(folder) == 1.0


def test_a_resumed_run_goes_on_with_the_share_that_it_began_with(tmp_path: Path) -> None:
    whole = run(small(51, count=4), out=tmp_path / "whole")

    def stop(round: int, _: object) -> None:
        if round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small(51, count=4), out=tmp_path / "run", progress=stop)
    resume(tmp_path / "run")
    assert recorded(tmp_path / "run") == recorded(whole)
    assert History(tmp_path / "run").rounds["accuracy"].tolist() == History(whole).rounds["accuracy"].tolist()


@pytest.mark.parametrize(("clients", "share"), [(12, 1.0), (60, 10 / 60)])
def test_the_share_that_came_of_it_is_what_is_accounted(clients: int, share: float, tmp_path: Path) -> None:
    document = small(clients, sampling="poisson").model_dump(mode="json", exclude_none=True)
    document["weighing"] = {"criteria": ["EQ"], "max_shares": 2.0}
    document["privacy"] = {"central": {"clip": 1.0, "noise": 2.0}}
    folder = run(build(document), out=tmp_path / "run")
    release = Release(2.0, "poisson", share)
    assert recorded(folder) == share
    assert [charge.release for charge in Ledger(folder / FILE).charges] == [release] * 3
    assert History(folder).rounds["epsilon"].iloc[-1] == pytest.approx(spent({release: 3}, 1e-5), abs=1e-6)


def test_hidden_updates_have_all_of_few_clients_to_hide_among() -> None:
    document = small(5).model_dump(mode="json", exclude_none=True)
    document["weighing"] = {"criteria": ["EQ"]}
    document["privacy"] = {"aggregation": {"kind": "secure"}}
    build(document)
    document["rounds"]["fraction"] = 0.1
    with pytest.raises(UserError, match="a cohort has 1 client"):
        build(document)


def test_every_ready_experiment_names_its_share_or_trains_all_users() -> None:
    for name, entry in recipes().items():
        given = parse(entry.read_text(encoding="utf-8"), name)["rounds"]
        if "fraction" not in given:
            described: Any = load(name)
            assert described.fpl.flags is not None, name


def test_show_resolved_fills_the_share_in_where_the_clients_are_known(steelyard: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(FILE_TEXT, encoding="utf-8")
    shown = tomllib.loads(steelyard("show", "small.toml", "--resolved").stdout)
    assert shown["rounds"]["fraction"] == 1.0
    more = tomllib.loads(steelyard("show", "small.toml", "--resolved", "--set", "partition.clients=200").stdout)
    assert more["rounds"]["fraction"] == 0.1


def test_the_best_of_a_sweep_is_known_again_by_the_run_on_the_test_set(steelyard: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(FILE_TEXT, encoding="utf-8")
    command = ("sweep", "small.toml", "--set", "rounds.count=1", "--over", "training.learning_rate=0.1", "--test", "-q")
    first, again = (steelyard(*command, "--out", "swept") for _ in range(2))
    assert (first.returncode, again.returncode) == (0, 0), again.stderr
    assert again.stdout == first.stdout
    assert recorded(tmp_path / "swept" / "test") == 1.0


def test_rounds_of_one_client_are_said_once_and_stand_in_table_report_and_json(
    tmp_path: Path, messages: list[str]
) -> None:
    result = Result(run(small(fraction=0.1), out=tmp_path / "run"))
    said = [line for line in messages if "weighed one client only" in line]
    assert len(said) == 1
    assert said[0].startswith("warning: round 1 of ")
    assert "rounds.fraction" in said[0]
    found = [{"rule": "DS>LD", "seed": 0, "rounds": 3, "of": 3}]
    assert result.summary["weighed_one"] == found
    assert result.table["weighed_one"] == found
    assert json.loads(json.dumps(result.table))["weighed_one"] == found
    text = write_comparison(result.table, "text")
    assert "Warning: rounds that weighed one client only" in text
    assert result.table["recommendation"]["rule"] is None
    line = "Warning: 3 of 3 rounds of DS&gt;LD, seed 0, weighed one client only"
    assert line in result.report().read_text(encoding="utf-8")
    assert "weighed one client only" in repr(result)


def test_a_run_that_weighed_several_clients_says_nothing_of_it(tmp_path: Path, messages: list[str]) -> None:
    result = Result(run(small(), out=tmp_path / "run"))
    assert not any("one client" in line for line in messages)
    assert result.summary["weighed_one"] == result.table["weighed_one"] == []
    assert "one client" not in write_comparison(result.table, "text")
    assert "one client only" not in result.report().read_text(encoding="utf-8")


def test_the_terminal_shows_the_warning_with_the_result(steelyard: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(FILE_TEXT, encoding="utf-8")
    done = steelyard("run", "small.toml", "--out", "run", "--quiet", "--set", "rounds.fraction=0.01")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("weighed one client only") == 1
    assert "Warning: 3 of 3 rounds of DS>LD, seed 0, weighed one client only" in " ".join(done.stdout.split())
