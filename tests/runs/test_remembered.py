"""A chain that was found whole is remembered for reports, and for nothing that was written to since."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.runs.records import federation, record, state

from steelyard.report.notices import chain_of
from steelyard.runs import facts, remembered
from steelyard.runs.reader import History
from steelyard.runs.store import Store


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remembered, "WORTH", 0.0)
    monkeypatch.setattr(remembered, "FINE", -60.0)
    return tmp_path / "cache" / "chains"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = Store(tmp_path / "run", checkpoint_every=1)
    store.register([federation("both", 1, "both")])
    for round in range(3):
        store.commit(round, [record("both", round)], {"both": state(round)}, dict, last=round == 2)
    store.close()
    return tmp_path / "run"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every look that computes a chain."""
    found: list[Path] = []
    check = facts.check
    monkeypatch.setattr(facts, "check", lambda db, folder: (found.append(folder), check(db, folder))[1])
    return found


def changed(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "run.sqlite")) as db:
        db.execute(statement)
        db.commit()


def test_a_report_computes_the_chain_of_an_untouched_run_once(cache: Path, folder: Path, looks: list[Path]) -> None:
    first, again = chain_of(History(folder)), chain_of(History(folder))
    assert first == again
    assert (first["problem"], first["round"], len(first["head"])) == ("", 2, 64)
    assert looks == [folder]
    assert len(list(cache.iterdir())) == 1


def test_what_goes_on_from_a_run_always_computes(cache: Path, folder: Path, looks: list[Path]) -> None:
    assert History(folder).shown_chain == History(folder).chain == History(folder).chain
    assert looks == [folder] * 3


@pytest.mark.parametrize("times", [True, False], ids=["times set back", "as written"])
def test_a_changed_run_is_never_said_to_be_whole(cache: Path, folder: Path, times: bool) -> None:
    chain_of(History(folder))
    before = (folder / "run.sqlite").stat()
    changed(folder, "UPDATE rounds SET accuracy = 0.99 WHERE round = 1")
    if times:
        os.utime(folder / "run.sqlite", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (folder / "run.sqlite").stat().st_size == before.st_size
    for _ in range(2):  # what has a problem is not remembered either
        assert chain_of(History(folder))["problem"] == "round 1 is not as it was written"


def test_a_folder_put_in_the_place_of_another_is_looked_at(cache: Path, folder: Path, tmp_path: Path) -> None:
    chain_of(History(folder))
    changed(folder, "UPDATE rounds SET accuracy = 0.99 WHERE round = 1")
    data = (folder / "run.sqlite").read_bytes()
    (folder / "run.sqlite").rename(tmp_path / "old.sqlite")
    (folder / "run.sqlite").write_bytes(data)
    assert chain_of(History(folder))["problem"]


def test_a_ledger_that_came_or_grew_is_looked_at(cache: Path, folder: Path, looks: list[Path]) -> None:
    chain_of(History(folder))
    (folder / "privacy.jsonl").write_text("{}\n")
    chain_of(History(folder))
    assert looks == [folder] * 2


def test_a_run_in_writing_and_one_just_written_are_not_remembered(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(sqlite3.connect(folder / "run.sqlite")) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("UPDATE info SET value = value")
        db.execute("INSERT INTO info VALUES ('other', '1')")
        db.commit()
        assert remembered.stamp(folder) is None
        chain_of(History(folder))
    monkeypatch.setattr(remembered, "FINE", 1e9)
    chain_of(History(folder))
    assert not cache.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"stamp": []}', "STAMP_ONLY", "WRONG_KINDS"], ids=lambda text: text or "empty"
)
def test_a_damaged_memory_is_as_none(cache: Path, folder: Path, looks: list[Path], text: str) -> None:
    chain_of(History(folder))
    path = next(cache.iterdir())
    kept = json.loads(path.read_text())
    made = {"STAMP_ONLY": {"stamp": kept["stamp"]}, "WRONG_KINDS": {**kept, "head": 3}}
    path.write_text(json.dumps(made[text]) if text in made else text)
    assert chain_of(History(folder))["head"] == kept["head"]
    assert looks == [folder] * 2
