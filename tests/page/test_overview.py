"""Following a run: new rounds are added to what was read, rounds taken back forgotten, nothing is read twice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tests.page.page_server import Written, finished, serving

from steelyard.page.overview import Figures, LiveHistory
from steelyard.runs.history import History


def same(live: LiveHistory, folder: Path) -> None:
    """What was followed is what a fresh reader finds."""
    fresh = History(folder)
    for name in ("rounds", "clients", "evaluations"):
        pd.testing.assert_frame_equal(getattr(live, name), getattr(fresh, name))
    for rule, seed in fresh._keys:
        for found, wanted in zip(live.scores(rule, seed), fresh.scores(rule, seed), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_new_rounds_are_added_and_only_those_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Written(tmp_path / "a")
    for _ in range(3):
        run.round()
    live = LiveHistory(tmp_path / "a")
    same(live, tmp_path / "a")
    asked: list[int] = []
    for name in ("cohorts", "tested"):
        read = getattr(History, name)
        monkeypatch.setattr(History, name, lambda self, r, s, n, read=read: asked.append(n) or read(self, r, s, n))
    assert not live.refresh()
    run.round(0.75)
    run.round(0.875)
    assert live.refresh()
    assert live.clients["round"].max() == live.evaluations["round"].max() == 4
    # Two kinds of tables, each of which asked for what came after round 2.
    assert asked == [2, 2]
    assert live.seen == 4
    monkeypatch.undo()
    same(live, tmp_path / "a")
    run.end()


def test_clients_that_come_later_find_their_rank(tmp_path: Path) -> None:
    """Names are counted in one sorted list, into which a later name may fall anywhere; some rounds may have metrics."""
    run = Written(tmp_path / "a", clients=("b", "d"))
    run.round()
    live = LiveHistory(tmp_path / "a")
    same(live, tmp_path / "a")
    run.clients = ("a", "c")
    run.round()
    run.clients = ("d", "a")
    run.round()
    live.refresh()
    same(live, tmp_path / "a")
    assert live.cohorts("DS>LD", 0).clients == ("a", "b", "c", "d")
    run.end()


def test_rounds_that_a_resume_took_back_are_forgotten(tmp_path: Path) -> None:
    run = Written(tmp_path / "a")
    for _ in range(4):
        run.round()
    live = LiveHistory(tmp_path / "a")
    same(live, tmp_path / "a")
    with run.store._db as database:
        for table in ("rounds", "updates", "failures", "evaluations"):
            database.execute(f"DELETE FROM {table} WHERE round > 1")
    assert live.refresh()
    assert live.seen == 1
    same(live, tmp_path / "a")
    run.end()


def test_what_is_drawn_fits_together_while_rounds_are_written(tmp_path: Path) -> None:
    """A round that is committed between two tables of one view belongs to the next view."""
    run = Written(tmp_path / "a")
    run.round()
    run.round()
    figures = Figures(tmp_path)
    view = figures.view(["a"])
    (history,) = view.histories
    run.round()
    assert list(history.rounds["round"]) == [0, 1]
    assert history.tested("DS>LD", 0).round.max() == 1
    assert history.failures_after()["round"].max() == 1
    assert figures.view(["a"]).histories[0].tested("DS>LD", 0).round.max() == 2
    run.end()


def test_the_stream_tells_of_new_rounds(tmp_path: Path) -> None:
    """Server-sent events: the list at once, then a word for every round of the run that is followed."""
    run = Written(tmp_path / "a")
    run.round(0.25)
    with serving(tmp_path) as page, page.streaming("/api/events?run=a") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()

        def next_event(wanted: str) -> object:
            for line in lines:
                if line == f"event: {wanted}":
                    return json.loads(next(lines).removeprefix("data: "))
            raise AssertionError("the stream ended")

        (first,) = next_event("runs")  # type: ignore[misc]
        assert (first["name"], first["state"], first["round"], first["accuracy"]) == ("a", "running", 0, 0.25)
        run.round(0.5)
        assert next_event("moved") == {"run": "a", "round": 1, "state": "running"}
        run.end()
        assert next_event("moved") == {"run": "a", "round": 1, "state": "finished"}


def test_looking_never_runs_code_of_an_experiment(tmp_path: Path) -> None:
    finished(tmp_path / "a")
    proof = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    toml = f'name = "made"\n[weighing]\ncriteria = ["DS"]\nplugins = ["{tmp_path}/mine.py"]\n'
    (tmp_path / "a" / "experiment.toml").write_text(toml)
    with serving(tmp_path) as page:
        for figure in page.get("/api/view?run=a").json()["figures"]:
            answer = page.get(f"/api/figure?run=a&kind={figure['name']}&client=a")
            assert answer.status_code == 200, answer.text
        assert "mine.py" in page.get("/api/experiment?run=a").text
    assert not proof.exists()
