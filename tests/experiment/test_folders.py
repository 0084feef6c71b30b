"""Folders of new runs: nothing that is there is written over, and two runs of one second get two folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import UserError
from steelyard.experiment import folders
from steelyard.experiment.folders import new_folder, unnamed_folder
from steelyard.experiment.loading import build
from steelyard.runs.store import Store


@pytest.fixture
def experiment(tmp_path: Path) -> Any:
    return build({"name": "mine", "data": {"source": "digits"}, "store": {"folder": str(tmp_path)}})


def test_a_folder_that_nobody_names_has_the_name_and_the_time(experiment: Any, tmp_path: Path) -> None:
    found = new_folder(experiment, None)
    assert found.parent == tmp_path
    assert re.fullmatch(r"mine-\d{8}-\d{6}", found.name)


def test_two_of_the_same_second_are_counted(experiment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noon(folders.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Noon:
            return cls(2026, 1, 2, 12, 0, 0, tzinfo=tz)

    monkeypatch.setattr(folders, "datetime", Noon)
    for expected in ("x-20260102-120000", "x-20260102-120000-2", "x-20260102-120000-3"):
        found = unnamed_folder(experiment, "x")
        assert found == tmp_path / expected
        found.mkdir()


def test_a_folder_that_holds_a_run_is_refused(experiment: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert new_folder(experiment, folder) == folder
    Store(folder).close()
    with pytest.raises(UserError, match=r"^--out: .*run holds a run already; allowed: a new folder, or `steelyard res"):
        new_folder(experiment, folder)


@pytest.mark.parametrize("out", ["", "."])
def test_the_folder_that_the_user_is_in_is_refused(experiment: Any, out: str) -> None:
    with pytest.raises(UserError, match=r"^--out: got nothing or the working folder; allowed: a folder of its"):
        new_folder(experiment, out)
