"""A quick look at runs: states, progress, names that lead nowhere else, and what cannot be read."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runs.records import federation, record, state

from steelyard.errors import UserError
from steelyard.runs.glance import RuleGlance, accuracies, find_runs, glance, glances, run_folder, signature
from steelyard.runs.heaviest import heaviest
from steelyard.runs.process import Writer, read_writer, started, this_process
from steelyard.runs.store import Store


def make_run(folder: Path, status: str = "finished", rounds: int = 2, writer: str | None = None) -> Path:
    """A run of hand-made rounds: round 0 without clients, then `rounds` with two clients of weights 3/4 and 1/4."""
    store = Store(folder)
    store.register([federation()])
    note = {"status": status, "rounds": 5, "measure": "accuracy", "writer": writer or this_process().text()}
    store.note(**note)
    nobody = record(round=0, updates=None, weighing=None, accuracy=0.125, order=(), tried=())
    store.commit(0, [nobody], {"DS>LD": state(0)}, dict, last=False)
    for round in range(1, rounds + 1):
        store.commit(round, [record(round=round)], {"DS>LD": state(round)}, dict, last=False)
    store.close()
    return folder


def test_one_look_tells_state_progress_and_accuracy(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    seen = glance(tmp_path, "a")
    assert (seen.state, seen.round, seen.rounds, seen.accuracy) == ("finished", 2, 5, 0.625)
    assert [(line.rule, line.seed, line.round) for line in seen.rules] == [("DS>LD", 0, 2)]
    assert seen.bytes > 1000
    assert seen.document()["rules"] == [{"rule": "DS>LD", "seed": 0, "round": 2, "accuracy": 0.625, "ended": ""}]
    assert accuracies(tmp_path / "a") == {("DS>LD", 0): [(0, 0.125), (1, 0.625), (2, 0.625)]}


def test_states_come_from_the_process_that_writes(tmp_path: Path) -> None:
    """A run is running while its very process lives: the same id with another start is another process."""
    me = this_process()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = Writer(me.host, ended.pid, "long ago")
    cases = {
        "running": me,
        "killed": gone,
        "killed again": replace(me, started="at another time"),
        "unknown": replace(me, host="elsewhere"),
    }
    for name, writer in cases.items():
        make_run(tmp_path / name, "running", writer=writer.text())
        assert glance(tmp_path, name).state == name.split()[0]
    make_run(tmp_path / "stopped", "stopped")
    assert glance(tmp_path, "stopped").state == "stopped"
    make_run(tmp_path / "nobody", "running", writer="nonsense")
    assert glance(tmp_path, "nobody").state == "unknown"


def test_a_process_is_known_by_its_start() -> None:
    me = this_process()
    assert me.pid == os.getpid()
    assert me.host == socket.gethostname()
    assert me.alive
    assert read_writer(me.text()) == me
    assert read_writer('{"pid": "x"}') is None
    assert started(0) == ""
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    one = Writer(me.host, sleeping.pid, started(sleeping.pid))
    assert one.alive
    sleeping.kill()
    # Not waited for yet: a zombie has ended all the same.
    for _ in range(100):
        if not one.alive:
            break
        os.sched_yield()
        subprocess.run(["sleep", "0.02"], check=True)
    assert not one.alive
    sleeping.wait()


def test_runs_are_found_newest_first_and_never_by_a_link(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for name, when in (("old", 1000), ("deep/er/new", 2000)):
        make_run(root / name)
        for file in (root / name).glob("run.sqlite*"):
            os.utime(file, (when, when))
    make_run(outside)
    (root / "link").symlink_to(outside)
    (root / "half").mkdir()
    (root / "half" / "run.sqlite").symlink_to(outside / "run.sqlite")
    (root / "empty").mkdir()
    assert find_runs(root) == ["deep/er/new", "old"]
    assert find_runs(root / "old") == ["."]
    assert [seen.name for seen in glances(root)] == ["deep/er/new", "old"]
    with pytest.raises(UserError, match="no such folder"):
        find_runs(root / "missing")


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "link",
        "half",
        "empty",
        "",
        "/etc",
        "a/../../outside",
        "old/..",
        "..",
        "a\0b",
        "old\\..",
        "x" * 2000,
    ],
)
def test_no_name_leads_outside(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    make_run(root / "old")
    make_run(tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "half").mkdir()
    (root / "half" / "run.sqlite").symlink_to(tmp_path / "outside" / "run.sqlite")
    (root / "empty").mkdir()
    assert run_folder(root, "old") == root / "old"
    assert run_folder(root / "old", ".") == root / "old"
    with pytest.raises(UserError, match="no run of this name"):
        run_folder(root, name)


def test_a_damaged_run_does_not_stop_the_list(tmp_path: Path) -> None:
    make_run(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.sqlite").write_bytes(b"not a database at all" * 100)
    found = {seen.name: seen for seen in glances(tmp_path)}
    assert found["bad"].state == "unreadable"
    assert found["bad"].problem == "bad: cannot be read: file is not a database"
    assert found["good"].state == "finished"


def test_the_signature_changes_with_every_commit(tmp_path: Path) -> None:
    store = Store(tmp_path / "a")
    store.register([federation()])
    before = signature(tmp_path / "a")
    assert signature(tmp_path / "a") == before
    store.commit(1, [record()], {"DS>LD": state(1)}, dict, last=False)
    assert signature(tmp_path / "a") != before
    store.close()


def test_who_counts_most_is_of_the_last_round(tmp_path: Path) -> None:
    found = heaviest(make_run(tmp_path / "a"), shown=1)
    assert found is not None
    assert (found.round, found.cohort) == (2, 2)
    assert found.clients == (("a", 0.75),)
    assert heaviest(make_run(tmp_path / "b", rounds=0)) is None


def test_all_that_a_look_tells(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    store = Store(folder)
    store.note(measure="ndcg", clients="flower")
    store.close()
    os.utime(folder / "run.sqlite", (1000, 1000))
    seen = glance(tmp_path, "a")
    assert (seen.name, seen.folder, seen.changed, seen.measure) == ("a", folder, 1000.0, "ndcg")
    assert (seen.flower, seen.problem, seen.ended) == (True, "", "")
    assert seen.writer == this_process()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert seen.document() == {
        "name": "a",
        "state": "finished",
        "round": 2,
        "rounds": 5,
        "measure": "ndcg",
        "accuracy": 0.625,
        "rules": [{"rule": "DS>LD", "seed": 0, "round": 2, "accuracy": 0.625, "ended": ""}],
        "changed": 1000.0,
        "bytes": size,
        "problem": "",
        "ended": "",
        "flower": True,
    }


def test_a_run_that_cannot_be_read_is_shown_with_all_that_can(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "run.sqlite").write_bytes(b"no database" * 100)
    os.utime(folder / "run.sqlite", (1000, 1000))
    seen = glance(tmp_path, "a")
    assert (seen.name, seen.folder, seen.state, seen.round, seen.rounds) == ("a", folder, "unreadable", 0, None)
    assert (seen.measure, seen.rules, seen.changed, seen.writer) == ("accuracy", (), 1000.0, None)
    assert seen.accuracy is None
    assert seen.bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert seen.problem.startswith("a: cannot be read: ")


def test_rules_that_ended_are_named_the_first_with_how_many_more(tmp_path: Path) -> None:
    rules = tuple(
        RuleGlance(name, seed, 3, None, why) for name, seed, why in (("x", 1, ""), ("y", 2, "why"), ("z", 3, "too"))
    )
    seen = replace(glance(tmp_path, make_run(tmp_path / "a").name), rules=rules)
    assert seen.ended == "y, seed 2, why (and 1 more)"
    assert replace(seen, rules=rules[:2]).ended == "y, seed 2, why"
    assert replace(seen, rules=()).accuracy is None


def test_a_process_without_proc_is_asked_of_ps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(0) == started(-1) == ""
    assert started(2**22 + 1) == ""
    asked: list[list[str]] = []

    def shown(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert options == {"capture_output": True, "text": True, "check": False}
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, " Tue Nov 17 02:00:00 2026\n", "")

    monkeypatch.setattr(Path, "exists", lambda path: path != Path("/proc/self/stat"))
    monkeypatch.setattr(subprocess, "run", shown)
    assert started(77) == "Tue Nov 17 02:00:00 2026"
    assert asked == [["ps", "-o", "lstart=", "-p", "77"]]
    assert started(0) == ""
    assert len(asked) == 1


def test_a_run_that_does_not_say_what_it_measures_measures_accuracy(tmp_path: Path) -> None:
    Store(tmp_path / "a").close()
    seen = glance(tmp_path, "a")
    assert (seen.measure, seen.rounds, seen.round, seen.rules, seen.state) == ("accuracy", None, 0, (), "unknown")
    assert not seen.flower
