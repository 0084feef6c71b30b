"""Reading experiments: mistakes are named with field and value, files are found beside it, and runs get new folders."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import assert_refused

from steelyard.base.settings import change, parse, read_value
from steelyard.experiment import loading
from steelyard.experiment.loading import build, load, recipes, resolve_paths, to_toml, unnamed_folder


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["weighing.priority=DS>LD"], ["weighing.priority", "DS>LD", "VP, LD, DS"]),
        (['weighing.criteria=["DS","IS"]', "weighing.priority=DS>IS"], ["IS", "sharp"]),
        (["partition.scheme=table", "partition.table=[[5, 5, 5]]", "partition.clients=1"], ["partition.table"]),
    ],
)
def test_mistakes_are_named_before_any_work(assignments: list[str], words: list[str]) -> None:
    assert_refused(lambda: load("quickstart", assignments), *words)


def test_every_recipe_loads_and_survives_writing_and_reading() -> None:
    assert "quickstart" in recipes()
    for name in recipes():
        described = load(name)
        assert described.name == name
        assert described.description
        assert build(parse(to_toml(described), name)) == described


@given(st.one_of(st.integers(-(2**40), 2**40), st.booleans(), st.floats(-1e9, 1e9), st.lists(st.integers(0, 9))))
def test_values_are_read_as_toml(value: object) -> None:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    assert read_value(text) == value


def test_reading_every_recipe_needs_no_torch() -> None:
    """`steelyard show` and `steelyard list recipes` answer at once: torch and pandas take seconds to import."""
    code = (
        "import sys; from steelyard.experiment.loading import load, recipes; [load(name) for name in recipes()];"
        "print(sorted({'torch', 'pandas', 'scipy', 'sklearn', 'flwr'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_change_reaches_one_of_several_sections() -> None:
    document: dict[str, Any] = {"flaws": [{"kind": "noisy"}, {"kind": "stale"}]}
    change(document, "flaws.1.amount=3")
    assert document == {"flaws": [{"kind": "noisy"}, {"kind": "stale", "amount": 3}]}
    for wrong in ("flaws.2.amount=3", "flaws.first.amount=3", "flaws.1.kind.more=3"):
        assert_refused(partial(change, document, wrong), wrong.partition("=")[0])


def test_other_paths_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = ("nowhere.csv", "included/heart_disease.csv", "/x/rows.csv", "x" * 5000, "nul\0", 3)
    for path in paths:
        document = {"data": {"path": path}, "store": {"folder": "a.csv"}, "items": "no section"}
        resolve_paths(document, tmp_path)
        assert document == {"data": {"path": path}, "store": {"folder": "a.csv"}, "items": "no section"}


def test_patterns_lists_and_each_source_of_knowledge_too(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("x")
    whole = str(tmp_path / "a.csv")
    for before, after in (
        ({"data": {"path": "*.csv"}}, {"data": {"path": str(tmp_path / "*.csv")}}),
        ({"data": {"files": ["a.csv", "none.csv", 3]}}, {"data": {"files": [whole, "none.csv", 3]}}),
        (
            {"kind": "recommend", "knowledge": {"sources": [{"path": "a.csv", "entities": "a.csv"}, "no table"]}},
            {"kind": "recommend", "knowledge": {"sources": [{"path": whole, "entities": whole}, "no table"]}},
        ),
    ):
        resolve_paths(before, tmp_path)
        assert before == after


def test_a_trace_of_who_is_there_is_looked_for_beside_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace.csv").write_text("client,from,to\nclient-000,1,2\n")
    (tmp_path / "own.toml").write_text('[rounds.select]\npath = "trace.csv"\n')
    monkeypatch.chdir("/")
    select = load(tmp_path / "own.toml").rounds.select
    assert select.available == {"client-000": ((1.0, 2.0),)}
    assert select.path is None


@pytest.fixture
def mine(tmp_path: Path) -> Any:
    return build({"name": "mine", "data": {"source": "digits"}, "store": {"folder": str(tmp_path)}})


def test_two_of_the_same_second_are_counted(mine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noon(loading.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Noon:
            return cls(2026, 1, 2, 12, 0, 0, tzinfo=tz)

    monkeypatch.setattr(loading, "datetime", Noon)
    for expected in ("x-20260102-120000", "x-20260102-120000-2", "x-20260102-120000-3"):
        found = unnamed_folder(mine, "x")
        assert found == tmp_path / expected
        found.mkdir()
