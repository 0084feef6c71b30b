"""At a prompt and in a notebook: names, texts of fields, a result that prints itself, mistakes in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from tests.kit import assert_refused, named, small
from tests.warm import command_environment

import steelyard
from steelyard import Experiment, Result, in_memory
from steelyard.cache import cache_folder
from steelyard.field_texts import field_texts, schema_with_texts
from steelyard.settings import Section


def test_all_names_are_shown_before_they_are_loaded() -> None:
    code = "import sys, steelyard; assert 'in_memory' in dir(steelyard); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=command_environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert [name for name in steelyard.__all__ if getattr(steelyard, name) is None] == []


def test_a_result_prints_as_a_table_and_progress_where_it_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    experiment = small(rounds={"count": 1}, beside={"EQ": {"criteria": ["EQ"]}})
    result = experiment.run(tmp_path / "silent")
    assert capfd.readouterr().err == ""
    experiment.run(tmp_path / "told", progress=True)
    assert "round 1/1: " in capfd.readouterr().err
    lines = repr(result).splitlines()
    for row, rule in zip(lines[3:], result.summary["rules"], strict=False):
        assert row.split()[0] == rule["rule"]
        assert f"{rule['accuracy']:.2%}" in row
    assert lines[-1] == f"run stored in {result.folder}"
    gone = Result(tmp_path / "nowhere")
    assert repr(gone).startswith(f"Result('{tmp_path / 'nowhere'}')")


ROWS = in_memory([[0.0], [1.0]] * 20, [0, 1] * 20)


@pytest.mark.parametrize(
    ("call", "parts"),
    named(
        [
            ("no section", lambda out: Experiment(rounds=3), ["rounds", 3, "a section"]),
            ("a bound", lambda out: Experiment(rounds={"count": -1}), ["rounds.count", -1, 1]),
            ("no integer", lambda out: Experiment(rounds={"count": 1e300}), ["rounds.count", 1e300, "a whole number"]),
            ("a slip", lambda out: Experiment(runds={}), ["runds", "'rounds'"]),
            ("data as a section", lambda out: Experiment(data=ROWS), ["data", "Dataset", "[data]"]),
            ("changes as text", lambda out: Experiment.load("quickstart", "rounds.count=2"), ["changes", "a list"]),
            (
                "a frame",
                lambda out: Experiment(data={"source": "memory"}).run(out, dataset=pd.DataFrame({"a": [1]})),
                ["dataset", "DataFrame"],
            ),
            ("two data sets", lambda out: Experiment().run(out, dataset=ROWS), ["data.source", "'digits'", "'memory'"]),
        ]
    ),
)
def test_a_mistake_in_python_is_one_line(call: Callable[[Path], object], parts: list[object], tmp_path: Path) -> None:
    assert_refused(lambda: call(tmp_path / "out"), *parts)
    assert not (tmp_path / "out").exists()


class Inner(Section):
    """A section inside another."""

    depth: int = 1
    """How deep
    it lies."""
    bare: int = 2


class Outer(Inner):
    """A section that derives from another and holds one."""

    inner: Inner = Inner()
    """What it holds."""
    depth: int = 3
    """How deep this one lies."""


def test_the_text_of_a_field_is_the_string_right_under_it_and_the_nearest_class_decides() -> None:
    assert field_texts(Inner) == {"depth": "How deep\nit lies."}
    schema = schema_with_texts(Outer)
    assert schema["properties"]["inner"]["description"] == "What it holds."
    assert schema["properties"]["depth"]["description"] == "How deep this one lies."
    assert schema["$defs"]["Inner"]["properties"]["depth"]["description"] == "How deep\nit lies."
    assert "description" not in schema["$defs"]["Inner"]["properties"]["bare"]


def test_the_first_that_is_set_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("STEELYARD_CACHE", "/ours")
    assert cache_folder() == Path("/ours")
    monkeypatch.setenv("STEELYARD_CACHE", "")
    assert cache_folder() == Path("/xdg/steelyard")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/someone/.cache/steelyard")
