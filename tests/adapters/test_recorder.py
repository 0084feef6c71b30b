"""The run folder of somebody else's federation: written round by round, read by the real commands, gone on with."""

from __future__ import annotations

import csv
import json
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.adapters.recorded import CLIENTS, measures_of, rule_of, write_round
from tests.conftest import CommandLine
from tests.warm import warm_script

from steelyard.adapters import Recorder, WeighedRounds
from steelyard.errors import UserError
from steelyard.page.figures import Figures
from steelyard.runs.glance import glance
from steelyard.runs.reader import History


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished folder of three rounds."""
    found, rule = tmp_path_factory.mktemp("recorded") / "hospitals", rule_of()
    recorder = Recorder(found, rule, framework="Flower", rounds=3)
    for _ in range(3):
        write_round(recorder, rule)
    recorder.finish()
    return found


def test_all_of_a_round_is_kept(folder: Path) -> None:
    history, rule = History(folder), rule_of()
    found = history.cohorts("quality>DS/max", 0, after=2)
    assert found.clients == CLIENTS
    expected = rule.weigh(np.array([[m["quality"], m["DS"]] for m in measures_of(3).values()]))
    assert found.weight == pytest.approx(expected.weights, abs=1e-12)
    assert found.score == pytest.approx(expected.scores, abs=1e-12)
    assert found.samples.tolist() == [10, 20, 30]
    assert set(history.failures_after()["failure"]) == {"model holds NaN or infinity"}
    last = history.rounds.iloc[-1]
    assert (last["round"], last["cohort"], last["answered"]) == (3, 4, 3)
    assert last["accuracy"] == pytest.approx(0.3)
    assert last["server_accuracy"] == pytest.approx(0.6)
    assert history.tested("quality>DS/max", 0).metrics["f1"] == pytest.approx(np.full(9, 0.3))
    assert (history.chain.round, history.chain.problem) == (3, "")
    seen = glance(folder.parent, folder.name)
    assert (seen.state, seen.round, seen.rounds, seen.flower) == ("finished", 3, 3, True)


@pytest.mark.parametrize("keep", [False, True])
def test_models_are_kept_only_where_asked(tmp_path: Path, keep: bool) -> None:
    rule = rule_of()
    recorder = Recorder(tmp_path / "run", rule, framework="Flower", keep_models=keep)
    write_round(recorder, rule)
    recorder.finish()
    states, _ = History(tmp_path / "run").last_checkpoint()
    assert len(states["quality>DS/max"].parameters) == (20_000 if keep else 0)
    assert Recorder(tmp_path / "run", rule, framework="Flower", keep_models=keep).round == 1


def test_the_commands_that_look_at_runs_work(folder: Path, steelyard: CommandLine, tmp_path: Path) -> None:
    assert steelyard("report", folder, "--out", tmp_path / "report.html").returncode == 0
    assert "quality&gt;DS/max" in (tmp_path / "report.html").read_text(encoding="utf-8")
    done = steelyard("weigh", folder, "--by", "DS>quality", "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["rounds"] == 3
    assert [row["client"] for row in document["clients"]] == ["west", "south", "north"]
    assert steelyard("export", folder, "--out", tmp_path / "tables").returncode == 0
    with (tmp_path / "tables" / "clients.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert {row["failure"] for row in rows if row["client"] == "east"} == {"model holds NaN or infinity"}
    assert json.loads(steelyard("table", folder, "--format", "json").stdout)["chain"]["round"] == 3
    assert json.loads(steelyard("ls", folder.parent, "--format", "json").stdout)[0]["accuracy"] == pytest.approx(0.3)


def test_the_page_shows_it(folder: Path) -> None:
    figures = Figures(folder.parent)
    overview = figures.overview([folder.name])
    assert overview["rows"][0]["left_out"] == 3
    assert overview["clients"] == ["east", *CLIENTS]
    assert figures.figure([folder.name], "weights", None, None, None)["spec"] is not None
    assert figures.weighable([folder.name])


def test_what_needs_data_is_refused_in_one_line(folder: Path, refused: Callable[..., str]) -> None:
    line = "this run belongs to a Flower app: start it again there"
    assert refused("resume", folder) == f"steelyard: {folder}: {line}"
    for command in ("run", "compare", "show"):
        assert refused(command, folder / "experiment.toml").endswith(line)


_APP = """
import os, signal
from tests.adapters.recorded import Recorder, rule_of, write_round
recorder = Recorder("run", rule_of(), framework="Flower", rounds=5)
write_round(recorder, rule_of())
write_round(recorder, rule_of())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_app_leaves_whole_rounds_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "app.py").write_text(_APP, encoding="utf-8")
    done = warm_script(tmp_path / "app.py", folder=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert glance(tmp_path, "run").state == "killed"
    recorder = Recorder(folder, rule_of(), framework="Flower", rounds=3)
    assert (recorder.round, recorder.memory) == (2, {"AG": [2.0]})
    assert write_round(recorder, rule_of()) == 3
    history = History(folder)
    assert (history.last_round, history.chain.round, history.chain.problem) == (3, 3, "")
    assert (glance(tmp_path, "run").state, glance(tmp_path, "run").rounds) == ("running", 5)


def test_a_folder_of_another_rule_or_another_run_is_refused(folder: Path, tmp_path: Path) -> None:
    before = History(folder).last_round
    with pytest.raises(UserError, match=r"began with the rules and seeds quality>DS/max, now DS>quality/max; allowed"):
        Recorder(folder, rule_of("DS>quality/max"), framework="Flower")
    with pytest.raises(UserError, match="began with another framework; allowed: the same, or a new folder"):
        Recorder(folder, rule_of(), framework="NVFlare")
    with pytest.raises(UserError, match="got nothing or the working folder"):
        Recorder("", rule_of(), framework="Flower")
    assert History(folder).last_round == before


def test_a_folder_that_was_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    rule = rule_of()
    recorder = Recorder(tmp_path / "run", rule, framework="Flower")
    write_round(recorder, rule)
    recorder.finish()
    with sqlite3.connect(tmp_path / "run" / "run.sqlite") as db:
        assert db.execute("UPDATE rounds SET accuracy = 0.99 WHERE round = 1").rowcount == 1
    db.close()
    with pytest.raises(UserError, match="round 1 is not as it was written; allowed: as it was, or a new folder"):
        Recorder(tmp_path / "run", rule, framework="Flower")


def test_a_round_in_which_nobody_could_be_weighed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", rule_of(), framework="Flower")
    assert recorder.write({}, {}, reasons={"north": "answered with an error"}) == 1
    recorder.stop(RuntimeError("the server went away"))
    history = History(tmp_path / "run")
    assert bool(history.rounds.iloc[-1]["kept_old"])
    assert history.info["stopped"] == "RuntimeError: the server went away"
    assert glance(tmp_path, "run").state == "stopped"


def test_measures_that_are_missing_are_named(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", rule_of(), framework="Flower")
    with pytest.raises(UserError, match="measures: client north has no quality; allowed: quality, DS"):
        recorder.write({"north": 1.0}, {"north": {"DS": 3.0}})
    assert recorder.round == 0


def test_more_samples_than_there_are_anywhere_are_refused(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", WeighedRounds("DS").rule, framework="loop")
    with pytest.raises(UserError, match=r"^samples: client a has 1e\+19; allowed: 0 to 1000000000000$"):
        recorder.write({"a": 1.0}, {"a": {"DS": 1e19}})
    assert recorder.write({"a": 1.0}, {"a": {"DS": 3.0}}) == 1
    recorder.finish()
