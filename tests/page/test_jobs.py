"""Starting, stopping and resuming from the page, with real processes; the server of a federation; what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.kit import assert_refused, wait_until
from tests.page.page_server import Page, Written, finished, serving, warm_job
from tests.warm import await_warmth, command_environment

from steelyard.federate.queue import ServerFolder, new_run, note_outcome, runs_of, server_folder
from steelyard.page.form import assignments, command, form, list_recipes
from steelyard.page.jobs import Jobs, own_code
from steelyard.runs.facts import RunFacts
from steelyard.runs.glance import glance, this_process


def state_of(page: Page, run: str) -> str:
    found = {entry["name"]: entry["state"] for entry in page.get("/api/runs").json()}
    return str(found.get(run, "missing"))


def round_of(page: Page, run: str) -> int:
    return next((int(entry["round"]) for entry in page.get("/api/runs").json() if entry["name"] == run), -1)


def test_the_form_offers_a_field_of_a_section_of_several_kinds() -> None:
    found = {field["name"]: field for field in form("quickstart")}
    assert (found["partition.clients"]["type"], found["partition.clients"]["minimum"]) == ("integer", 1)
    assert found["partition.clients"]["value"] == 20


def test_the_form_says_what_a_recipe_takes_where_it_names_nothing() -> None:
    """The four hospitals are all that the data have: no number of clients is named, and none is sent."""
    (clients,) = (field for field in form("hospitals") if field["name"] == "partition.clients")
    assert clients["value"] is None
    assert assignments("hospitals", {"partition.clients": None}) == []
    assert assignments("hospitals", {"partition.clients": 3}) == ["partition.clients=3"]


def test_an_experiment_file_of_the_folder_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the page was started: experiments, and neither a node's file nor another tool's."""
    monkeypatch.chdir(tmp_path)
    files = {"my": "[rounds]\ncount = 2\n", "node": 'server = "h:1"\n[data]\n', "tool": "[tool.x]\n", "broken": "["}
    for name, text in files.items():
        Path(f"{name}.toml").write_text(text)
    assert [each["name"] for each in list_recipes()][:2] == ["my.toml", "adafed-1"]
    assert command("my.toml", {"rounds.count": 3, "rules": ""}, None) == ["run", "./my.toml", "--set", "rounds.count=3"]
    chosen = {"rules": "fedavg, LD>DS", "seeds": 2}
    assert command("my.toml", chosen, None) == ["compare", "./my.toml", "--rules", "fedavg, LD>DS", "--seeds", "2"]
    for fields, told in (({"rules": "nope"}, "nope"), ({"seeds": 0}, "seeds"), ({"rules": "choquet(DS;x)"}, "file")):
        assert_refused(lambda fields=fields: command("my.toml", fields, None), told)
    Path("my.toml").write_text('[model]\nname = "mine.py:build"\n[rounds]\ncount = 1\n')
    assert_refused(lambda: Jobs(tmp_path).start("my.toml", "a", {}), "model.name = ", "steelyard watch --trust")


def test_start_stop_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run started by the page is a process of its own, stopped cleanly, and resumed from its last round."""
    await_warmth()
    with serving(tmp_path) as page:
        fields = {"rounds.count": 3000, "training.epochs": 1, "weighing.priority": "LD>VP>DS"}
        started = page.post("/api/start", {"recipe": "quickstart", "name": "mine", "fields": fields})
        assert started.json() == {"run": "mine"}
        assert state_of(page, "mine") in ("starting", "running")
        wait_until(lambda: round_of(page, "mine") >= 2, 60)
        assert state_of(page, "mine") == "running"
        assert page.post("/api/stop", {"run": "mine"}).status_code == 200
        wait_until(lambda: state_of(page, "mine") == "stopped")
        job = page.jobs.of("mine")
        assert job is not None
        before = round_of(page, "mine")
        monkeypatch.setattr(subprocess, "Popen", warm_job)  # the first one started from nothing
        # At once, while the process that was stopped may still be ending.
        assert page.post("/api/resume", {"run": "mine"}).status_code == 200
        assert job.ended == 130
        wait_until(lambda: round_of(page, "mine") > before, 60)
        # Also a process that another page started: found by what the run noted of it.
        page.jobs._jobs.clear()
        assert page.post("/api/stop", {"run": "mine"}).status_code == 200
        wait_until(lambda: glance(tmp_path, "mine").state == "stopped")


def test_own_code_is_not_resumed_without_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await_warmth()  # a request is answered when its process has started
    monkeypatch.setattr(subprocess, "Popen", warm_job)
    run = Written(tmp_path / "a")
    run.round()
    run.end("stopped")
    (tmp_path / "a" / "experiment.toml").write_text('[model]\nname = "mine.py:build"\n')
    with serving(tmp_path) as page:
        problem = page.post("/api/resume", {"run": "a"}).json()["problem"]
        assert ("model.name = mine.py:build" in problem, "--trust" in problem) == (True, True)
        assert page.jobs.going() == []
    with serving(tmp_path, trust=True) as page:
        assert page.post("/api/resume", {"run": "a"}).status_code == 200
        wait_until(lambda: page.jobs.going() == [], 60)


def test_only_the_recorded_process_is_stopped(tmp_path: Path) -> None:
    """An id that passed on to another process is left alone; a run that has ended has nothing to stop."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        me = this_process()
        run = Written(tmp_path / "a")
        run.store.note(RunFacts(writer=f'{{"host": "{me.host}", "pid": {other.pid}, "started": "at another time"}}'))
        with serving(tmp_path) as page:
            assert "is killed" in page.post("/api/stop", {"run": "a"}).json()["problem"]
            run.end()
            for verb in ("stop", "resume"):
                assert "is finished" in page.post(f"/api/{verb}", {"run": "a"}).json()["problem"]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


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


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Generator[Page]:
    root = tmp_path_factory.mktemp("taken")
    (root / "taken").mkdir()
    with serving(root) as page:
        yield page


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"recipe": "nonsense"}, "recipe: got 'nonsense'"),
        ({"recipe": "../../etc"}, "recipe: got"),
        *(({"name": name}, f"name: got '{name}'") for name in ("a/b", "", ".hidden", "--out")),
        ({"fields": {"model.name": "evil.py:build"}}, "not a field of this form"),
        ({"fields": {"rounds.count": "1\n[model]"}}, "rounds.count: got"),
        ({"fields": {"rounds.count": 0}}, "rounds.count"),
        ({"fields": {"seeds": 1001}}, "seeds"),
        ({"fields": {"weighing.priority": 'x"\nplugins=["e.py"]'}}, "a short text"),
        ({"fields": None}, "fields"),
        (None, ""),
    ],
)
def test_what_cannot_be_started(taken: Page, changes: Any, problem: str) -> None:
    body = [] if changes is None else {"recipe": "quickstart", "name": "a", "fields": {}, **changes}
    answer = taken.post("/api/start", body)
    assert answer.status_code == 400
    assert problem in answer.json()["problem"]
    assert taken.jobs.going() == []
    assert [path.name for path in taken.root.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("toml", "code"),
    [
        ('[model]\nname = "package.module:Net"', ["model.name = package.module:Net"]),
        ('[beside.x]\ncriteria = ["DS"]\nplugins = ["criteria"]', ["beside.x.plugins = criteria"]),
        ('description = "see mine.py"\n[weighing]\npriority = "DS>LD"\n[data]\npath = "a/b.csv"', []),
    ],
)
def test_code_is_found_in_the_text(tmp_path: Path, toml: str, code: list[str]) -> None:
    (tmp_path / "experiment.toml").write_text(toml)
    assert own_code(tmp_path) == code


def test_what_is_linked_into_a_run_is_neither_read_nor_resumed(tmp_path: Path) -> None:
    run = Written(tmp_path / "root" / "a")
    run.round()
    run.end("stopped")
    for name in ("experiment.toml", "checkpoints"):
        theirs = (run.store.folder / name).rename(tmp_path / name)
        (run.store.folder / name).symlink_to(theirs)
    with serving(tmp_path / "root") as page:
        read = page.get("/api/experiment?run=a")
        resumed = page.post("/api/resume", {"run": "a"})
        assert (read.status_code, resumed.status_code, page.jobs.going()) == (400, 400, [])
    assert "made" not in read.text
    assert "is a link" in resumed.json()["problem"]


REFUSAL = "raised an error: NotAllowed: data.labels: got 'target', but this node's own configuration decides"


def server_with_three_runs(root: Path) -> ServerFolder:
    """Return a server's folder with three nodes and three runs: one ended, one goes on, one waits."""
    home = ServerFolder(root / "server")
    home.make()
    names = ("hospital-a", "hospital-b", "hospital-c")
    entries = [{"name": name, "key": f"key {name}", "clients": [f"{name}-{i}" for i in (1, 2)]} for name in names]
    home.register.write_text(json.dumps({"nodes": [{**entry, "most": 1} for entry in entries]}))
    now = datetime.now(UTC)
    lasts = {"key hospital-a": (now + timedelta(days=1), 0.0), "key hospital-b": (now - timedelta(hours=3), -6.0)}
    contacts = {key: {"last": last.isoformat(), "clock": clock} for key, (last, clock) in lasts.items()}
    home.contacts.write_text(json.dumps(contacts))
    for name in ("first", "second", "third"):
        out = finished(root / "runs" / "first") if name == "first" else root / "elsewhere" / name
        new_run(home).note_submitted(name, out, 40)
    first, second, _ = runs_of(home)
    first.note_started("mark", 1, 1)
    note_outcome(first.folder, "stopped", "the ServerApp was killed")
    second.note_started("mark", 1, 2)
    note_outcome(second.folder, "running", pid=1)
    second.log.write_text(f"steelyard: node hospital-b was not admitted: {REFUSAL}\n")
    return home


def test_what_is_shown_and_who_may_stop(tmp_path: Path) -> None:
    home = server_with_three_runs(tmp_path)
    with home.held(), serving(tmp_path / "runs", server=home) as page:
        found = page.get("/api/server").json()
        shown = [(run["run"], run["status"], run["open"], run["shown"]) for run in found["runs"]]
        assert shown == [
            (3, "queued", True, None),
            (2, "running", True, None),
            (1, "stopped", False, "first"),
        ]
        assert [(node["status"], node["refused"]) for node in found["nodes"]] == [
            ("connected", None),
            ("away", f"node hospital-b was not admitted: {REFUSAL}"),
            ("away", None),
        ]
        for run in (1, 7):  # one that has ended, and none
            assert page.post("/api/server/stop", {"run": run}).status_code == 400
        assert not any(run.is_to_stop for run in runs_of(home))
        assert page.post("/api/server/stop", {"run": 2}).status_code == 200
        assert [run.status() for run in runs_of(home)] == ["stopped", "stopping", "queued"]


def test_a_page_that_only_shows_changes_nothing_and_one_without_a_server_shows_none(tmp_path: Path) -> None:
    home = server_with_three_runs(tmp_path)
    start = {"recipe": "quickstart", "name": "a", "fields": {}}
    with serving(tmp_path / "runs", server=home, read_only=True) as page:
        asked = {"start": start, "stop": {"run": "a"}, "resume": {"run": "a"}, "server/stop": {"run": 2}}
        for path, body in asked.items():
            assert "only shows runs" in page.post(f"/api/{path}", body).json()["problem"]
        assert not page.get("/api/server").json()["served"]
    with serving(tmp_path / "runs") as page:
        assert page.get("/api/server").status_code == 404
    assert_refused(lambda: server_folder(tmp_path / "runs"), "runs", "no server's folder")
