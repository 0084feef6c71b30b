"""Data named in an experiment file are found beside it, from any working folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import CommandLine

from steelyard.experiment.loading import load
from steelyard.experiment.paths import resolve_paths

TABLE = "x,y\n" + "\n".join(f"{row},{row % 2}" for row in range(40)) + "\n"
EXPERIMENT = """
[data]
source = "csv"
path = "rows.csv"
labels = "y"
[partition]
clients = 2
[model]
name = "logistic"
[rounds]
count = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "study"
    inner.mkdir()
    (inner / "rows.csv").write_text(TABLE)
    (inner / "mine.toml").write_text(EXPERIMENT)
    return inner


def test_a_file_beside_the_experiment_is_found_from_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    (folder.parent / "rows.csv").write_text("other")
    assert load("study/mine.toml").model_dump()["data"]["path"] == folder / "rows.csv"


def test_other_paths_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    paths = ("nowhere.csv", "included/heart_disease.csv", "/x/rows.csv", "x" * 5000, "nul\0", 3)
    for path in paths:
        document = {"data": {"path": path}, "store": {"folder": "rows.csv"}, "items": "no section"}
        resolve_paths(document, folder)
        assert document == {"data": {"path": path}, "store": {"folder": "rows.csv"}, "items": "no section"}
    # what is set on the command line is relative to the working folder, and the flag keeps a file's own words
    assert load(folder / "mine.toml", ["data.path=rows.csv"]).model_dump()["data"]["path"] == Path("rows.csv")
    assert load(folder / "mine.toml", whole_paths=False).model_dump()["data"]["path"] == Path("rows.csv")


def test_patterns_and_lists_of_files_too(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("x")
    document = {"data": {"path": "*.csv", "files": ["a.csv", "none.csv", 3]}}
    resolve_paths(document, tmp_path)
    whole = [str(tmp_path / "a.csv"), "none.csv", 3]
    assert document == {"data": {"path": str(tmp_path / "*.csv"), "files": whole}}
    document = {"data": {"path": "*.txt"}}
    resolve_paths(document, tmp_path)
    assert document == {"data": {"path": "*.txt"}}


def test_interactions_too(tmp_path: Path) -> None:
    (tmp_path / "likes.csv").write_text("x")
    document = {"interactions": {"path": "likes.csv", "catalogue": "all.csv"}, "items": {"path": "likes.csv"}}
    resolve_paths(document, tmp_path)
    whole = str(tmp_path / "likes.csv")
    assert document == {"interactions": {"path": whole, "catalogue": "all.csv"}, "items": {"path": whole}}


def test_it_runs_from_elsewhere(folder: Path, steelyard: CommandLine) -> None:
    done = steelyard("run", "study/mine.toml", "--format", "json", cwd=folder.parent)
    assert done.returncode == 0, done.stderr


def test_each_source_of_knowledge(tmp_path: Path) -> None:
    (tmp_path / "g.tsv").write_text("x")
    whole = str(tmp_path / "g.tsv")
    document = {"knowledge": {"sources": [{"path": "g.tsv", "links": "no.tsv"}, {"predicates": "g.tsv"}, "no table"]}}
    resolve_paths(document, tmp_path)
    assert document["knowledge"]["sources"] == [{"path": whole, "links": "no.tsv"}, {"predicates": whole}, "no table"]


def test_a_trace_of_who_is_there_is_looked_for_beside_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace.csv").write_text("client,from,to\nclient-000,1,2\n")
    (tmp_path / "own.toml").write_text('[rounds.select]\npath = "trace.csv"\n')
    monkeypatch.chdir("/")
    select = load(tmp_path / "own.toml").rounds.select
    assert select.available == {"client-000": ((1.0, 2.0),)}
    assert select.path is None
