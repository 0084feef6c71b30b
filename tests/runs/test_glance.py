"""A quick look at runs: states, progress, names that lead nowhere else, and what cannot be read."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.kit import assert_refused
from tests.runs.contents import change
from tests.runs.records import CRITERIA, add, begun, record, state, updates

from steelyard.runs.facts import RunFacts
from steelyard.runs.glance import (
    Glances,
    Writer,
    accuracies,
    find_runs,
    glance,
    read_writer,
    run_folder,
    started,
    this_process,
)
from steelyard.runs.history import History
from steelyard.runs.store import Store
from steelyard.weighing.rule import Rule, WeighingSettings


def make_run(folder: Path, status: str = "finished", rounds: int = 2, writer: str | None = None) -> Path:
    """A run of hand-made rounds: round 0 without clients, then `rounds` with two clients of weights 3/4 and 1/4."""
    store = begun(folder)
    store.note(RunFacts(status=status, rounds=5, measure="accuracy", writer=writer or this_process().text()))
    nobody = record(round=0, updates=None, weighing=None, accuracy=0.125, order=(), tried=())
    store.commit(0, [nobody], {"DS>LD": state(0)}, dict, last=False)
    for round in range(1, rounds + 1):
        add(store, record(round=round))
    store.close()
    return folder


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


def test_a_process_is_known_by_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    me = this_process()
    assert (me.pid, me.host, me.alive) == (os.getpid(), socket.gethostname(), True)
    assert read_writer(me.text()) == me
    assert read_writer('{"pid": "x"}') is None
    assert [started(number) for number in (0, -1, 2**22 + 1)] == [""] * 3
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    one = Writer(me.host, child.pid, started(child.pid))
    assert one.alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    # Not waited for yet: a zombie has ended all the same.
    assert not one.alive
    child.communicate()
    # Without /proc it is asked of ps.
    asked: list[list[str]] = []

    def shown(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert options == {"capture_output": True, "text": True, "check": False}
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, " Tue Nov 17 02:00:00 2026\n", "")

    monkeypatch.setattr(Path, "exists", lambda path: path != Path("/proc/self/stat"))
    monkeypatch.setattr(subprocess, "run", shown)
    assert [started(77), started(0)] == ["Tue Nov 17 02:00:00 2026", ""]
    assert asked == [["ps", "-o", "lstart=", "-p", "77"]]


@pytest.fixture
def links(tmp_path: Path) -> Path:
    """A folder with a run, and with links to one outside."""
    root, outside = tmp_path / "root", make_run(tmp_path / "outside")
    make_run(root / "old")
    (root / "link").symlink_to(outside)
    (root / "half").mkdir()
    (root / "half" / "run.sqlite").symlink_to(outside / "run.sqlite")
    (root / "empty").mkdir()
    for ending in ("wal", "shm", "journal"):
        (make_run(root / ending) / f"run.sqlite-{ending}").symlink_to(outside / "run.sqlite")
    return root


def test_runs_are_found_newest_first_and_never_by_a_link(links: Path) -> None:
    make_run(links / "deep/er/new")
    for unseen in ("old/inside", ".hidden/run", "a/b/c/d/e"):
        make_run(links / unseen)
    for name, when in (("old", 1000), ("deep/er/new", 2000)):
        for file in (links / name).glob("run.sqlite*"):
            os.utime(file, (when, when))
    assert find_runs(links) == [seen.name for seen in Glances(links).look()] == ["deep/er/new", "old"]
    assert find_runs(links / "old") == ["."]
    assert_refused(lambda: find_runs(links / "missing"), "no such folder")


def test_no_name_leads_outside(links: Path) -> None:
    assert run_folder(links, "old") == run_folder(links / "old", ".") == links / "old"
    outside = ["../outside", str(links.parent / "outside"), "link", "half", "empty", "missing", "", "old/../../outside"]
    make_run(links / "old\\one")
    for name in (*outside, "old/..", "..", "a\0b", "old\\one", "x" * 2000):
        assert_refused(partial(run_folder, links, name), "no run of this name")


def test_who_counts_most_is_of_the_last_round(tmp_path: Path) -> None:
    assert History(make_run(tmp_path / "a")).heaviest() == (2, [("a", 0.75), ("b", 0.25)])
    assert History(make_run(tmp_path / "b", rounds=0)).heaviest() is None
    # Of equal weights those of the first names, also where more are sorted than a sort takes one by one.
    store, names = begun(tmp_path / "c"), tuple("abcdefghijklmnopqrstuvwxyz")
    raw = np.tile([1.0, 2.0], 13)
    sent = updates(clients=names, criteria=dict.fromkeys(CRITERIA, raw), samples=raw, losses=raw)
    weighing = Rule(WeighingSettings(criteria=CRITERIA)).weigh(np.stack([raw, raw], axis=1))
    add(store, record(updates=sent, weighing=weighing), last=True)
    store.close()
    ties = History(tmp_path / "c").heaviest()
    assert ties is not None
    assert [name for name, _ in ties[1][:3]] == ["b", "d", "f"]


def test_all_that_a_look_tells(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    assert accuracies(folder) == {("DS>LD", 0): [(0, 0.125), (1, 0.625), (2, 0.625)]}
    store = Store(folder)
    store.note(RunFacts(measure="ndcg", clients="flower"))
    store.close()
    os.utime(folder / "run.sqlite", (1000, 1000))
    (folder / "run.sqlite-shm").touch()  # readers write it, too
    seen = glance(tmp_path, "a")
    assert (seen.folder, seen.writer) == (folder, this_process())
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
    change(folder, "INSERT INTO failures VALUES (1, 7, 1, 'late')")
    assert glance(tmp_path, "a").problem.endswith("round 7 stands after its end, which is round 2")
    (folder / "run.sqlite").write_bytes(b"no database")
    bad = glance(tmp_path, "a")
    assert (bad.state, bad.measure, bad.rules, bad.writer) == ("unreadable", "accuracy", (), None)
    assert bad.problem.startswith("a: cannot be read: ")
