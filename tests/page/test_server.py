"""The server of a federation on the page: what is shown of runs and nodes, who may stop a run, and how it looks."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.page.page_server import finished, serving, until
from tests.page.test_browser import Tab

from steelyard.errors import UserError
from steelyard.federate.outcomes import note_outcome
from steelyard.federate.server_folder import ServerFolder, server_folder
from steelyard.federate.server_runs import new_run, runs_of

EVIL = "<img src=x onerror=window.hacked=1>"
REFUSAL = "raised an error: NotAllowed: data.labels: got 'target', but this node's own configuration decides"


def made(root: Path) -> ServerFolder:
    """Return a server's folder with three nodes and three runs: one ended, one goes on, one waits."""
    home = ServerFolder(root / "server")
    home.make()
    names = ("hospital-a", "hospital-b", EVIL)
    entries = [{"name": name, "key": f"key {name}", "clients": [f"{name}-{i}" for i in (1, 2)]} for name in names]
    home.register.write_text(json.dumps({"nodes": [{**entry, "most": 1} for entry in entries]}))
    now = datetime.now(UTC)
    lasts = {"key hospital-a": (now + timedelta(days=1), 0.0), "key hospital-b": (now - timedelta(hours=3), -6.0)}
    contacts = {
        key: {"last": last.isoformat(), "clock": clock, "steelyard": "0.2.0", "flower": "1.41.0"}
        for key, (last, clock) in lasts.items()
    }
    home.contacts.write_text(json.dumps(contacts))
    for number, name in enumerate(("first", EVIL, "third"), 1):
        out = finished(root / "runs" / "first") if name == "first" else root / "elsewhere" / str(number)
        new_run(home).note_submitted(name, out, 40)
    first, second, _ = runs_of(home)
    first.note_started("mark", 1, 1)
    note_outcome(first.folder, "stopped", "the ServerApp was killed; 3 rounds are whole, `steelyard federate submit`")
    second.note_started("mark", 1, 2)
    note_outcome(second.folder, "running", pid=1)
    second.log.write_text(f"steelyard: waiting for 3 nodes\nsteelyard: node hospital-b was not admitted: {REFUSAL}\n")
    return home


def test_what_is_shown_and_who_may_stop(tmp_path: Path) -> None:
    home = made(tmp_path)
    with home.held(), serving(tmp_path / "runs", server=home) as page:
        found = page.get("/api/server").json()
        assert found["served"]
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
        assert page.get("/api/server", {"authorization": "Bearer wrong"}).status_code == 401
        assert page.post("/api/server/stop", {"run": 2}, {"x-steelyard-page": "wrong"}).status_code == 403
        for run, why in {1: "run 1 has ended (stopped); allowed:", 7: "RUN: got 7; allowed: a run of"}.items():
            answer = page.post("/api/server/stop", {"run": run})
            assert (answer.status_code, why in answer.json()["problem"]) == (400, True), answer.text
        assert not any(run.is_to_stop for run in runs_of(home))
        assert page.post("/api/server/stop", {"run": 2}).status_code == 200
        assert [run.status() for run in runs_of(home)] == ["stopped", "stopping", "queued"]


def test_a_page_that_only_shows_stops_nothing_and_one_without_a_server_shows_none(tmp_path: Path) -> None:
    home = made(tmp_path)
    with serving(tmp_path / "runs", server=home, read_only=True) as page:
        assert "only shows runs" in page.post("/api/server/stop", {"run": 2}).json()["problem"]
        assert not page.get("/api/server").json()["served"]
    with serving(tmp_path / "runs") as page:
        assert page.get("/api/server").status_code == 404
        assert 'name="server"' not in page.get("/").text
    with pytest.raises(UserError, match="no server's folder; allowed: a folder of `steelyard federate serve`"):
        server_folder(tmp_path / "runs")


@pytest.mark.parametrize(("width", "look"), [(390, "dark"), (1280, "light")])
def test_the_operators_view_in_a_browser(tmp_path: Path, browser: Any, width: int, look: str) -> None:
    home = made(tmp_path)
    with home.held(), serving(tmp_path / "runs", server=home) as page, Tab(browser, page, "", width, look) as tab:
        tab.get_by_role("link", name="Server").click()
        tab.wait_for_selector("text=1 of 3 nodes connected")
        text = tab.locator("main").inner_text()
        for words in (
            "the ServerApp was killed",
            REFUSAL,
            "-6 s",
            "3 h ago",
            "0.2.0, flwr 1.41.0",
            EVIL,
            "1 run waits",
        ):
            assert words in text, words
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        tab.get_by_role("button", name="Stop run 2").press("Enter")
        tab.wait_for_selector("main .state >> text=stopping")
        assert runs_of(home)[1].is_to_stop
        # What others do is seen without a reload, and names are never markup.
        note_outcome(runs_of(home)[1].folder, "stopped", "stopped by the operator")
        tab.wait_for_selector("text=stopped by the operator", timeout=15000)
        assert tab.evaluate("window.hacked") is None
        assert tab.locator("main img").count() == 0
        tab.get_by_role("link", name="first", exact=True).click()
        tab.wait_for_selector("h1 >> text=first")
        until(lambda: tab.locator(".nodes").count() == 0)
