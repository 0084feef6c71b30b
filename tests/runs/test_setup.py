"""Setting up a run: a folder is a run, whole, or none; what a killed or failed set-up leaves blocks nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.runs.contents import query
from tests.runs.records import federation

from steelyard.errors import UserError
from steelyard.runs.reader import History
from steelyard.runs.setup import discard, set_up
from steelyard.runs.store import Store, exists

FILES = {"experiment.toml": "name = 'x'\n"}


def made(folder: Path) -> None:
    set_up(folder, FILES, {"seeds": [1, 2], "status": "running"}, [federation("a#1", 1), federation("a#2", 2)])


def test_a_run_has_its_files_facts_and_rules_and_nothing_else(tmp_path: Path) -> None:
    made(tmp_path / "deep" / "run")
    folder = tmp_path / "deep" / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "experiment.toml", "lock", "run.sqlite"]
    assert (folder / "experiment.toml").read_text() == "name = 'x'\n"
    assert History(folder).info == {"schema": "9", "seeds": "[1, 2]", "status": "running"}
    assert query(folder, "SELECT name FROM federations") == [("a#1",), ("a#2",)]


@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
def test_a_set_up_that_fails_at_any_step_leaves_no_run_and_the_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("of the user")
    real = {"os.fsync": os.fsync, "os.replace": os.replace}[step]
    failed = 0
    for broken in range(1, 20):
        count = 0

        def fail(*arguments: object, at: int = broken, **options: object) -> object:
            nonlocal count
            count += 1
            if count == at:
                raise OSError(28, "No space left on device")
            return real(*arguments, **options)  # type: ignore[operator]

        with monkeypatch.context() as patch:
            patch.setattr(step, fail)
            said = ""
            try:
                made(tmp_path / "run")
            except UserError as error:
                said = str(error)
        if count < broken:
            break
        assert "cannot be written: No space left on device" in said
        failed += 1
        if exists(tmp_path / "run"):
            # The last flush failed after the rename: the run is whole.
            assert History(tmp_path / "run").info["seeds"] == "[1, 2]"
            discard(tmp_path / "run", FILES)
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]
    assert failed >= 2
    assert exists(tmp_path / "run")


def test_what_a_killed_set_up_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".setup" / "checkpoints").mkdir(parents=True)
    (tmp_path / ".setup" / "run.sqlite").write_text("half a database")
    (tmp_path / "experiment.toml").write_text("")
    (tmp_path / "run.sqlite-wal").write_text("of another database")
    assert not exists(tmp_path)
    with pytest.raises(UserError, match="no run here"):
        History(tmp_path)
    made(tmp_path)
    assert History(tmp_path).info["seeds"] == "[1, 2]"
    assert not (tmp_path / ".setup").exists()
    assert not (tmp_path / "run.sqlite-wal").exists()


def test_a_run_that_is_there_is_left_alone(tmp_path: Path) -> None:
    made(tmp_path)
    before = (tmp_path / "run.sqlite").read_bytes()
    with pytest.raises(UserError, match="holds a run already; allowed: a new folder, or `steelyard resume"):
        made(tmp_path)
    assert (tmp_path / "run.sqlite").read_bytes() == before
    store = Store(tmp_path)
    with pytest.raises(UserError, match="another process is writing this run"):
        made(tmp_path)
    store.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.run: cannot be written: Not a directory; allowed: a writable folder"):
        made(tmp_path / "file" / "run")
