"""Run folders of federations that somebody else runs: written round by round or from a file, and gone on with."""

from __future__ import annotations

import json
import math
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import CommandLine
from tests.kit import assert_refused, small
from tests.warm import warm_script

import steelyard as package
from steelyard.adapters import ClientTest, Recorder, Reply, WeighedRounds
from steelyard.adapters.importing import import_files
from steelyard.adapters.recorder import Journal, Model
from steelyard.adapters.rounds import Combined
from steelyard.messages.updates import MOST_SAMPLES
from steelyard.report.verification import verify
from steelyard.runs.glance import glance
from steelyard.runs.history import History
from steelyard.weighing.rule import Rule

CLIENTS = ("north", "south", "west")


def rule_of(words: str = "quality>DS/max") -> Rule:
    return WeighedRounds(words, metrics=["quality"]).rule


def measures_of(number: int) -> dict[str, dict[str, float]]:
    return {name: {"DS": 10.0 * i, "quality": 0.1 * (i + number)} for i, name in enumerate(CLIENTS, 1)}


def write_round(recorder: Recorder, rule: Rule) -> int:
    """Write a round as an adapter does: weights by the rule, one client left out, tests at the others."""
    number = recorder.round + 1
    measures = measures_of(number)
    raw = np.array([[measures[name][criterion] for criterion in rule.names] for name in CLIENTS])
    return recorder.write(
        dict(zip(CLIENTS, rule.weigh(raw).weights.tolist(), strict=True)),
        measures,
        reasons={"east": "model holds NaN or infinity"},
        tests={name: ClientTest(0.1 * number, 10 * i, 0.5, {"f1": 0.3}) for i, name in enumerate(CLIENTS, 1)},
        server={"accuracy": 0.2 * number, "loss": 1.5},
        model={"w": np.full((100, 200), number, np.float32), "steps": np.array(number)},
        memory={"AG": [1.0 * number]},
    )


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
    last = history.rounds.iloc[-1]
    assert (last["round"], last["cohort"], last["answered"], last["priority"]) == (3, 4, 3, "quality>DS")
    assert 0 <= last["seconds"] < 60
    assert (last["accuracy"], last["server_accuracy"]) == pytest.approx((0.3, 0.6))
    assert history.tested("quality>DS/max", 0).metrics["f1"] == pytest.approx(np.full(9, 0.3))
    assert (history.chain.round, history.chain.problem) == (3, "")
    seen = glance(folder.parent, folder.name)
    assert (seen.state, seen.round, seen.rounds, seen.measure, seen.flower) == ("finished", 3, 3, "accuracy", True)


_APP = """
import os, signal
from tests.adapters.test_recorder import Recorder, rule_of, write_round
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


def test_a_folder_that_does_not_go_with_the_recorder_is_refused(folder: Path, tmp_path: Path) -> None:
    own = small(rounds={"count": 1}).run(tmp_path / "own").folder
    for place, rule, options, parts in (
        (folder, "DS>quality/max", {}, ("quality>DS/max", "DS>quality/max")),
        (folder, "quality>DS/max", {"framework": "NVFlare"}, ("folder", folder, "framework")),
        (own, "quality>DS/max", {}, ("folder", own)),
        (tmp_path / "new", "quality>DS/max", {"rounds": -1}, ("folder: rounds.count", -1)),
        ("", "quality>DS/max", {}, ("folder", "the working folder")),
    ):
        given: dict[str, Any] = {"framework": "Flower", **options}
        assert_refused(lambda p=place, r=rule, g=given: Recorder(p, rule_of(r), **g), *parts)
    assert History(folder).last_round == 3
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    with sqlite3.connect(changed / "run.sqlite") as db:
        assert db.execute("UPDATE rounds SET accuracy = 0.99 WHERE round = 1").rowcount == 1
    db.close()
    assert_refused(lambda: Recorder(changed, rule_of(), framework="Flower"), "folder", "round 1")


def test_a_round_in_which_nobody_could_be_weighed(tmp_path: Path) -> None:
    Recorder(tmp_path / "run", rule_of(), framework="Flower").stop()
    recorder = Recorder(tmp_path / "run", rule_of(), framework="Flower")
    assert (recorder.round, glance(tmp_path, "run").state) == (0, "running")
    assert recorder.write({}, {}, reasons={"north": "answered with an error", "a": "b"}) == 1
    recorder.stop(RuntimeError("the server went away"))
    history = History(tmp_path / "run")
    assert history.rounds["round"].tolist() == [0, 1]
    assert bool(history.rounds.iloc[-1]["kept_old"])
    assert list(history.failures_after()["client"]) == ["a", "north"]
    assert history.info["stopped"] == "RuntimeError: the server went away"
    again = Recorder(tmp_path / "run", rule_of(), framework="Flower", rounds=4)
    assert again.round == 1
    again.stop()
    assert (History(tmp_path / "run").info["stopped"], glance(tmp_path, "run").rounds) == ("", 5)


def test_what_is_not_given_follows_from_the_rest(tmp_path: Path) -> None:
    """Samples from DS, accuracy from the tests by samples, memory from the round before; figures that are none go."""
    recorder = Recorder(tmp_path / "run", rule_of(), framework="loop", keep_models=True)
    weights, measures = {"b": 0.25, "a": 0.75}, {"b": {"DS": 7.4, "quality": 1.0}, "a": {"DS": 3.6, "quality": 0.5}}
    tests = {"a": ClientTest(0.5, 30, metrics={"f1": 0.25}), "b": ClientTest(0.9, 10, 2.0), "c": ClientTest(1e300)}
    recorder.write(weights, measures, tests=tests, memory={"AG": [1.0]}, server={"f1": 0.5, "loss": 1e300})
    recorder.write(weights, measures, accuracy=math.inf, samples={"a": 1, "b": 2}, model=torch.ones(2, 3))
    assert recorder.memory == {"AG": [1.0]}
    model = {"w": np.ones((2, 2), np.float32), "d": np.ones(3), "steps": np.array(9)}
    assert recorder.write(weights, measures, scores={"a": 2.0, "b": 3.0}, accuracy=0.125, model=model) == 3
    recorder.finish()
    history = History(tmp_path / "run")
    states, _ = history.last_checkpoint()
    parameters = states["quality>DS/max"].parameters
    assert (parameters.tolist(), parameters.dtype) == ([1.0] * 7, torch.float64)
    assert history.chain.problem == ""
    cohorts = history.cohorts("quality>DS/max", 0)
    assert (cohorts.clients, cohorts.weight.tolist()) == (("a", "b"), [0.75, 0.25] * 3)
    assert (cohorts.samples.tolist(), cohorts.score.tolist()[4:]) == ([4, 7, 1, 2, 4, 7], [2.0, 3.0])
    assert history.rounds["accuracy"].tolist()[1:] == pytest.approx([0.6, math.nan, 0.125], nan_ok=True)
    found = json.loads(history.rounds["server_metrics"].iloc[1])
    assert [found["macro_f1"], found["loss"]] == pytest.approx([0.5, math.nan], nan_ok=True)
    tested = history.tested("quality>DS/max", 0)
    assert (tested.clients, tested.metrics["f1"]) == (("a", "b"), pytest.approx([0.25, math.nan], nan_ok=True))
    assert json.loads(history.info["measured_by"]) == {"quality": "client", "DS": "client"}
    assert json.loads(history.info["trust"])["quality>DS/max"] == {"quality": "self-reported", "DS": "self-reported"}


@pytest.mark.parametrize("rule", ["fedscs", "cgsv(length=0.3)", "fedawa"])
def test_a_rule_that_remembers_weighs_with_a_folder_as_without(rule: str, tmp_path: Path) -> None:
    """The folder hands on the model and what criteria remember; policies look at updates, which it does not hold."""
    replies = [Reply(name, {"w": np.array(step, np.float32)}, 1.0) for name, step in (("a", [1, 2]), ("b", [3, 1]))]
    sent, without = {"w": np.zeros(2, np.float32)}, WeighedRounds(rule)
    for number in (1, 2):  # each as an app of its own
        weighing = WeighedRounds(rule)
        journal = Journal(weighing, tmp_path / "run", "loop", "accuracy", keep_models=True)
        journal.open(lambda: Model(sent))
        expected = without.combine(sent, replies)
        combined: Any = weighing.combine(sent, replies)
        journal.end_round(combined, Model(combined.arrays))
        journal.close()
        assert (combined.weights, weighing.memory) == (expected.weights, without.memory)
        history = History(tmp_path / "run")
        state = history.last_checkpoint()[0][weighing.name]
        assert (state.parameters.tolist(), state.memory) == (combined.arrays["w"].tolist(), weighing.memory)
        assert state.parameters.dtype == torch.float32
        found = history.cohorts(weighing.name, 0, after=number - 1)
        assert found.weight.tolist() == list(combined.weights.values())
        assert found.score.tolist() == list(combined.scores.values())
    assert weighing.memory
    recorder = Recorder(tmp_path / "run", weighing.rule, framework="loop", keep_models=True)
    recorder.write(combined.weights, combined.measures)  # no scores: those of such a policy are its weights
    recorder.finish()
    last = History(tmp_path / "run").cohorts(weighing.name, 0, after=2)
    assert last.weight.tolist() == last.score.tolist() == list(combined.weights.values())


@pytest.mark.parametrize(("framework", "code"), [("Flower", 1), ("NVFlare", 1), ("ours", 0)])
def test_weights_that_the_rule_does_not_give_are_found_where_our_adapter_weighed(
    framework: str, code: int, tmp_path: Path
) -> None:
    recorder = Recorder(tmp_path / "run", WeighedRounds("DS").rule, framework=framework)
    recorder.write({"ann": 0.75, "bob": 0.25}, {"ann": {"DS": 30}, "bob": {"DS": 10}})
    recorder.write({"ann": 0.5, "bob": 0.5}, {"ann": {"DS": 30}, "bob": {"DS": 10}})
    recorder.finish()
    found = verify(tmp_path / "run")
    assert found.code == code
    assert {(one.round, one.client) for one in found.found.changed} == ({(2, "ann"), (2, "bob")} if code else set())
    if not code:
        assert "followed elsewhere" in found.found.checked["weights of DS"]


def test_a_round_that_cannot_be_is_refused_and_not_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", rule_of(), framework="loop")
    for measures, parts in (
        ({}, ("north", "quality")),
        ({"north": {"DS": 3.0}}, ("north", "quality")),
        ({"north": {"DS": 1e19, "quality": 1}}, ("samples", "1e+19")),
    ):
        assert_refused(lambda given=measures: recorder.write({"north": 1.0}, given), *parts)
    assert recorder.write({"a": 1.0}, {"a": {"DS": MOST_SAMPLES, "quality": 1}}) == 1
    recorder.finish()


def test_what_went_wrong_first_is_what_a_folder_says(tmp_path: Path) -> None:
    journal = Journal(WeighedRounds("DS"), tmp_path / "run", "loop", "accuracy", keep_models=False)
    journal.open(lambda: Model({}), rounds=5)
    journal.end_round(
        Combined(None, {"a": 1.0}, {}, {}, {}), Model({})
    )  # a round that cannot be written: a has no measures
    journal.stop(RuntimeError("no GPU left"))
    history = History(tmp_path / "run")
    assert (history.last_round, history.info["status"]) == (0, "stopped")
    assert history.info["stopped"] == "RuntimeError: no GPU left"


HEADER = "round,client,DS,quality,weight,reason,accuracy,loss"


ROWS = (
    "1,north,100,0.9,0.7,,0.5,1.2",
    "1,south,50,0.5,0.3,,0.4,",
    "1,east,,,,model holds NaN,,",
    "2,north,100,0.8,2,,0.7,1.0",
    "2,south,50,0.6,2,,0.5,1.1",
)


def written(folder: Path, *lines: str, name: str = "log.csv") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_csv_becomes_a_run_that_commands_read(tmp_path: Path, command: CommandLine) -> None:
    file = written(tmp_path, HEADER, *ROWS)
    done = command("import", file, "--out", tmp_path / "run")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"2 rounds stored in {tmp_path / 'run'}"), done.stderr
    history = History(tmp_path / "run")
    assert history.cohorts("as imported", 0).weight.tolist() == [0.7, 0.3, 0.5, 0.5]
    assert list(history.failures_after()["failure"]) == ["model holds NaN"]
    assert history.rounds["accuracy"].tolist()[1:] == [pytest.approx(0.45), pytest.approx(0.6)]
    assert history.chain.problem == ""
    again = command("weigh", tmp_path / "run", "--by", "quality>DS", "--format", "json")
    assert json.loads(again.stdout)["rounds"] == 2, again.stderr
    assert "was imported from a file" in command("resume", tmp_path / "run").stderr


def test_a_rule_weighs_where_the_file_does_not(tmp_path: Path) -> None:
    rows = [{"round": n, "client": c, "DS": 10 * n, "VP": v} for n in (0, 1) for c, v in (("a", 0.2), ("b", 0.8))]
    file = written(tmp_path, json.dumps(rows[0]), "", *map(json.dumps, rows[1:]), name="log.jsonl")
    found = imported(file, "VP>DS/max").cohorts("VP>DS/max", 0)
    expected = package.weigh({"a": {"VP": 0.2, "DS": 10}, "b": {"VP": 0.8, "DS": 10}}, "VP>DS/max").weights
    assert found.weight[2:] == pytest.approx(expected, abs=1e-12)
    assert (alike := imported(file, "EQ").cohorts("EQ", 0)).weight.tolist() == [0.5] * 4
    assert alike.raw[:, alike.criteria.index("EQ")].tolist() == [1.0] * 4
    given = written(tmp_path, "round,client,DS,q,weight", "1,a,1,1,3", "1,b,1,1,1")
    assert imported(given, "q>DS").cohorts("q>DS", 0).weight.tolist() == [0.75, 0.25]


def test_a_file_may_be_untidy(tmp_path: Path) -> None:
    """A mark at its begin, blanks and empty lines, rounds in any order and from 0 on, cells left empty."""
    lines = ("", " 1 , b ,30,,-0.5,", ",,,,,", "1,a,10,2.4,0.25,", f"0,a,,,0.75,{'n' * 600}", "0,b,7,,,")
    history = imported(written(tmp_path, "\ufeff round, client ,DS,samples,accuracy,reason", *lines), "DS")
    found = history.cohorts("DS", 0, after=1)
    assert (found.clients, found.weight.tolist(), found.samples.tolist()) == (("a", "b"), [0.25, 0.75], [2, 0])
    assert history.failures_after()["failure"].tolist() == ["n" * 500]
    assert history.rounds["accuracy"].tolist()[1:] == pytest.approx([0.75, (2 * 0.25 - 0.5) / 3])


JSON = '{"round": 1, "client": "a", "DS": 1, "weight": 1}'


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ((HEADER, "1,north,many,0.9,1,,,"), ("line 2, DS", "'many'", "1e12")),
        ((HEADER, ROWS[0], "1,south,5,nan,1,,,"), ("line 3, quality", "nan", "1e30")),
        ((HEADER, "1,north,1,0.9,,,,"), ("line 2, weight", "''")),
        ((HEADER, "1.5,north,1,0.9,1,,,"), ("line 2, round", "'1.5'")),
        ((HEADER, "10000000,north,1,0.9,1,,,"), ("line 2, round", "'10000000'")),
        ((HEADER, "9999999,north,1,0.9,1,,,"), ("begins with round 9999999",)),
        ((HEADER, "1,north,1,0.9,1,,inf,"), ("line 2, accuracy", "'inf'")),
        ((HEADER, "1,north,1,0.9,1,,0.5,low"), ("line 2, loss", "'low'")),
        ((HEADER, "1," + "n" * 140_000), ("cannot be read: field larger than",)),
        (("round,client,q,samples,weight", "1,a,1,1e19,1"), ("line 2, samples", "1e+19")),
        (("round,client,D\x1bS,weight", "1,a,1,1"), ("line 1", r"'D\x1bS'")),
        ((HEADER, "1,no\x1brth,1,0.9,1,,,"), ("line 2, client", r"'no\x1brth'")),
        ((JSON.replace('"a"', "null"),), ("line 1, client", "empty")),
        ((HEADER, ROWS[0], ROWS[0]), ("line 3, client", "'north'", "twice in round 1")),
        ((HEADER, ROWS[2], ROWS[2]), ("line 3, client", "'east'", "twice in round 1")),
        ((HEADER, "1,north,1"), ("line 2", "3 cells", 8)),
        ((HEADER, ROWS[0], "3,north,1,0.9,1,,,"), ("round 2 is missing", "1 to 3")),
        ((HEADER, "1,north,1,0.9,0,,,"), ("weights of round 1 are all 0",)),
        ((HEADER,), ("holds no rounds",)),
        (("client,DS", "a,1"), ("line 1", "no round among client, DS")),
        (("round,client,weight", "1,a,1"), ("no criteria",)),
        (("round,client,DS,DS", "1,a,1,1"), ("line 1", "round,client,DS,DS")),
        (("round,client,,DS", "1,a,1,1"), ("line 1", "each column named")),
        ((JSON, "{"), ("line 2", "no JSON")),
        ((JSON, "[7]"), ("line 2: got [7]",)),
        (('{"round": 1}',), ("line 1: has no client among round",)),
        ((JSON, '{"round": 1, "client": "b", "weight": 1}'), ("line 2, DS", "missing")),
        ((JSON, "", JSON.replace("}", ', "LD": 1}')), ("line 3, LD", "not in the lines before")),
    ],
)
def test_what_is_wrong_is_named_by_line_and_column(tmp_path: Path, lines: tuple[str, ...], parts: Any) -> None:
    file = written(tmp_path, *lines)
    assert_refused(lambda: import_files([file], tmp_path / "run"), file, *parts)
    assert not (tmp_path / "run").exists()


def test_options_that_are_wrong_are_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    file = written(tmp_path, "round,client,DS", "1,a,3")
    (tmp_path / "other.csv").write_bytes(b"\xff\xfe\x00round")
    for path, by, parts in (
        (file, None, ("--by: missing", "'DS'")),
        (file, "VP", ("--by: 'VP'",)),
        (file, "median(DS)", ("--by", "'median(DS)'")),
        (tmp_path / "none.csv", None, ("none.csv: cannot be read: No such file",)),
        (tmp_path / "other.csv", None, ("other.csv", "UTF-8")),
    ):
        assert_refused(lambda path=path, by=by: import_files([path], tmp_path / "run", by), *parts)
    assert not (tmp_path / "run").exists()
    assert_refused(lambda: import_files([file], Path(), "DS"), "--out")
    import_files([file], tmp_path / "run", "DS")
    assert "--out" in refused("import", file, "--by", "DS", "--out", tmp_path / "run")


@settings(max_examples=30)
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_file_is_imported_or_refused_in_one_line(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "log").write_bytes(content)
    assert_refused(lambda: import_files([folder / "log"], folder / "run", "DS"), folder / "log")


def imported(file: Path, by: str) -> History:
    """Import a file beside itself."""
    folder = file.with_suffix(f".{by.replace('/', '-')}")
    assert import_files([file], folder, by) == History(folder).last_round
    return History(folder)
