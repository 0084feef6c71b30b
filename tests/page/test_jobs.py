"""Starting, stopping and resuming from the page, with real processes; what is refused; the form from the schema."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.page.page_server import Page, Written, finished, serving, until, warm_job
from tests.warm import await_warmth, command_environment

from steelyard.page.form import FIELDS, form
from steelyard.page.jobs import own_code
from steelyard.runs.glance import glance
from steelyard.runs.process import this_process


def state_of(page: Page, run: str) -> str:
    found = {entry["name"]: entry["state"] for entry in page.get("/api/runs").json()}
    return str(found.get(run, "missing"))


def round_of(page: Page, run: str) -> int:
    return next((int(entry["round"]) for entry in page.get("/api/runs").json() if entry["name"] == run), -1)


def test_start_stop_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run started by the page is a process of its own, stopped cleanly, and resumed from its last round."""
    await_warmth()
    with serving(tmp_path) as page:
        fields = {"rounds.count": 3000, "training.epochs": 1, "weighing.priority": "LD>VP>DS"}
        started = page.post("/api/start", {"recipe": "quickstart", "name": "mine", "fields": fields})
        assert started.json() == {"run": "mine"}
        assert state_of(page, "mine") in ("starting", "running")
        again = page.post("/api/start", {"recipe": "quickstart", "name": "mine", "fields": fields})
        assert "is taken already" in again.json()["problem"]
        until(lambda: round_of(page, "mine") >= 2, 60)
        assert state_of(page, "mine") == "running"
        assert "LD>VP>DS" in page.get("/api/experiment?run=mine").text
        assert page.post("/api/stop", {"run": "mine"}).status_code == 200
        until(lambda: state_of(page, "mine") == "stopped")
        job = page.jobs.of("mine")
        assert job is not None
        before = round_of(page, "mine")
        monkeypatch.setattr(subprocess, "Popen", warm_job)  # the first one started from nothing
        # At once, while the process that was stopped may still be ending.
        assert page.post("/api/resume", {"run": "mine"}).status_code == 200
        assert job.ended == 130
        until(lambda: round_of(page, "mine") > before, 60)
        # Also a process that another page started: found by what the run noted of it.
        page.jobs._jobs.clear()
        assert page.post("/api/stop", {"run": "mine"}).status_code == 200
        until(lambda: glance(tmp_path, "mine").state == "stopped")


def test_a_run_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that the command line prints stands in the list: the form cannot know what only the data tell."""
    await_warmth()  # a request is answered when its process has started
    monkeypatch.setattr(subprocess, "Popen", warm_job)
    with serving(tmp_path) as page:
        body: dict[str, Any] = {"recipe": "quickstart", "name": "crowded", "fields": {"partition.clients": 5000}}
        assert page.post("/api/start", body).status_code == 200
        until(lambda: page.get("/api/runs").json()[0]["problem"], 60)
        (entry,) = page.get("/api/runs").json()
        assert entry["problem"].startswith("steelyard: ")
        assert "clients" in entry["problem"]
        assert entry["state"] == "failed"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"recipe": "nonsense", "name": "a", "fields": {}}, "recipe: got 'nonsense'"),
        ({"recipe": "../../etc", "name": "a", "fields": {}}, "recipe: got"),
        ({"recipe": "quickstart", "name": "a/b", "fields": {}}, "name: got 'a/b'"),
        ({"recipe": "quickstart", "name": "", "fields": {}}, "name: got ''"),
        ({"recipe": "quickstart", "name": ".hidden", "fields": {}}, "name: got"),
        ({"recipe": "quickstart", "name": "--out", "fields": {}}, "name: got"),
        ({"recipe": "quickstart", "name": "taken", "fields": {}}, "is taken already"),
        ({"recipe": "quickstart", "name": "a", "fields": {"model.name": "evil.py:build"}}, "not a field of this form"),
        (
            {"recipe": "quickstart", "name": "a", "fields": {"weighing.plugins": ["evil.py"]}},
            "not a field of this form",
        ),
        ({"recipe": "quickstart", "name": "a", "fields": {"store.folder": "/tmp"}}, "not a field of this form"),
        ({"recipe": "quickstart", "name": "a", "fields": {"rounds.count": "1\n[model]"}}, "rounds.count: got"),
        ({"recipe": "quickstart", "name": "a", "fields": {"rounds.count": 0}}, "rounds.count"),
        ({"recipe": "quickstart", "name": "a", "fields": {"rounds.count": 1.5}}, "allowed: a whole number"),
        ({"recipe": "quickstart", "name": "a", "fields": {"rounds.fraction": 1e999}}, ""),
        ({"recipe": "quickstart", "name": "a", "fields": {"weighing.priority": "XX>DS"}}, "priority"),
        (
            {"recipe": "quickstart", "name": "a", "fields": {"weighing.priority": 'x"\nplugins=["e.py"]'}},
            "a short text",
        ),
        ({"recipe": "quickstart", "name": "a"}, "fields"),
        ([], ""),
    ],
)
def test_what_cannot_be_started(tmp_path: Path, body: Any, problem: str) -> None:
    (tmp_path / "taken").mkdir()
    with serving(tmp_path) as page:
        if problem or body == []:
            answer = page.post("/api/start", body)
            assert answer.status_code == 400
            assert problem in answer.json()["problem"]
        assert page.jobs.going() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]


def test_a_page_that_only_shows(tmp_path: Path) -> None:
    with serving(tmp_path, read_only=True) as page:
        for path, body in (
            ("start", {"recipe": "quickstart", "name": "a", "fields": {}}),
            ("stop", {"run": "a"}),
            ("resume", {"run": "a"}),
        ):
            assert "only shows runs" in page.post(f"/api/{path}", body).json()["problem"]


@pytest.mark.parametrize(
    ("toml", "code"),
    [
        ('[model]\nname = "mine.py:build"', ["model.name = mine.py:build"]),
        ('[model]\nname = "package.module:Net"', ["model.name = package.module:Net"]),
        ('[beside.x]\ncriteria = ["DS"]\nplugins = ["criteria"]', ["beside.x.plugins = criteria"]),
        ('description = "see mine.py"\n[weighing]\npriority = "DS>LD"\n[data]\npath = "a/b.csv"', []),
    ],
)
def test_code_is_found_in_the_text(tmp_path: Path, toml: str, code: list[str]) -> None:
    (tmp_path / "experiment.toml").write_text(toml)
    assert own_code(tmp_path) == code


def test_own_code_is_not_resumed_without_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await_warmth()  # a request is answered when its process has started
    monkeypatch.setattr(subprocess, "Popen", warm_job)
    run = Written(tmp_path / "a")
    run.round()
    run.end("stopped")
    (tmp_path / "a" / "experiment.toml").write_text('[model]\nname = "mine.py:build"\n')
    with serving(tmp_path) as page:
        problem = page.post("/api/resume", {"run": "a"}).json()["problem"]
        assert "model.name = mine.py:build" in problem
        assert "--trust" in problem
        assert page.jobs.going() == []
    with serving(tmp_path, trust=True) as page:
        assert page.post("/api/resume", {"run": "a"}).status_code == 200
        until(lambda: page.jobs.going() == [], 60)


def test_a_linked_experiment_is_not_read(tmp_path: Path) -> None:
    finished(tmp_path / "root" / "a")
    (tmp_path / "secret").write_text("name = 'secret'")
    (tmp_path / "root" / "a" / "experiment.toml").unlink()
    (tmp_path / "root" / "a" / "experiment.toml").symlink_to(tmp_path / "secret")
    with serving(tmp_path / "root") as page:
        answer = page.get("/api/experiment?run=a")
        assert answer.status_code == 400
        assert "'secret'" not in answer.text


def test_a_run_with_a_link_in_it_is_not_resumed(tmp_path: Path) -> None:
    run = Written(tmp_path / "root" / "a")
    run.round()
    run.end("stopped")
    theirs = (tmp_path / "root" / "a" / "checkpoints").rename(tmp_path / "theirs")
    (tmp_path / "root" / "a" / "checkpoints").symlink_to(theirs)
    with serving(tmp_path / "root") as page:
        answer = page.post("/api/resume", {"run": "a"})
        assert (answer.status_code, page.jobs.going()) == (400, [])
        assert "checkpoints: is a link" in answer.json()["problem"]


def test_a_run_that_cannot_be_read_is_listed_beside_the_others(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        finished(tmp_path / name)
    with sqlite3.connect(tmp_path / "bad" / "run.sqlite") as writer:
        writer.execute("UPDATE rounds SET accuracy = 'abc'")
    writer.close()
    with serving(tmp_path) as page:
        found = {run["name"]: run for run in page.get("/api/runs").json()}
        shown = page.get("/api/view?run=bad")
    assert found["bad"]["state"] == "unreadable"
    assert found["bad"]["problem"] == "bad: cannot be read: rounds, accuracy: 'abc' is no number"
    assert found["good"]["state"] == "finished"
    assert (shown.status_code, "is no number" in shown.json()["problem"]) == (400, True)


def test_only_the_recorded_process_is_stopped(tmp_path: Path) -> None:
    """An id that passed on to another process is left alone; a run that has ended has nothing to stop."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        me = this_process()
        run = Written(tmp_path / "a")
        run.store.note(writer=f'{{"host": "{me.host}", "pid": {other.pid}, "started": "at another time"}}')
        with serving(tmp_path) as page:
            problem = page.post("/api/stop", {"run": "a"}).json()["problem"]
            assert "is killed" in problem
            run.end()
            assert "is finished" in page.post("/api/stop", {"run": "a"}).json()["problem"]
            assert "is finished" in page.post("/api/resume", {"run": "a"}).json()["problem"]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_form_comes_from_the_schema() -> None:
    fields = {field["name"]: field for field in form("quickstart")}
    assert list(fields) == [name for name in FIELDS["learning"] if name in fields]
    count = {"name": "rounds.count", "label": "Rounds", "value": 20, "type": "integer", "minimum": 1}
    assert fields["rounds.count"].items() >= {**count, "help": "Number of rounds."}.items()
    assert fields["weighing.priority"]["value"] == "VP>LD>DS"
    assert fields["weighing.normalise"]["choices"] == ["share", "max", "rank"]
    assert fields["rounds.fraction"]["exclusiveMinimum"] == 0


def test_watch_serves_and_ends(tmp_path: Path) -> None:
    """The command itself: it prints where it is, answers there, and ends on SIGINT with code 0 and streams open."""
    finished(tmp_path / "runs" / "one")
    process = subprocess.Popen(
        [sys.executable, "-m", "steelyard", "watch", "runs", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=command_environment(),
    )
    try:
        assert process.stdout is not None
        found = re.search(r"(http://127\.0\.0\.1:\d+/)\?token=(\S{43})$", process.stdout.readline())
        assert found is not None
        url, token = found.groups()
        for path in ("", "api/runs", "assets/vega.js", "api/events"):
            assert httpx.get(f"{url}{path}", timeout=30, verify=False).status_code == 401
        with httpx.Client(timeout=60, follow_redirects=True, verify=False) as browser:
            assert browser.get(found[0]).url == url
            assert [run["name"] for run in browser.get(f"{url}api/runs").json()] == ["one"]
            assert b"vegaEmbed" in browser.get(f"{url}assets/vega.js").content
            with browser.stream("GET", f"{url}api/events") as answer:
                next(answer.iter_lines())
                os.kill(process.pid, signal.SIGINT)
                assert process.wait(15) == 0
        assert process.stderr is not None
        told = process.stdout.read() + process.stderr.read()
        assert "Traceback" not in told
        assert token not in told
    finally:
        process.kill()
        process.communicate()
