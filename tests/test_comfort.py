"""At a prompt and in a notebook: names, texts of fields, a result that prints itself, mistakes in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit import small
from tests.warm import command_environment

import steelyard
from steelyard import Result
from steelyard.base.files import cache_folder


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
    for row, rule in zip(lines[4:], result.comparison.rules, strict=False):
        assert row.split()[0] == rule.rule
        assert f"{100 * rule.figures['final'].mean:.1f}" in row
    assert lines[-2:] == [f"run stored in {result.folder}", result.comparison.tested().sentence]
    last = result.history.rounds.query("round == 1").set_index("rule")
    assert last["accuracy"].tolist() == pytest.approx(result.summary.loc[last.index, "final"].tolist())
    assert last["loss"].between(0.5, 3).all()
    assert "finished, round 1, 2 rules: DS, EQ" in repr(result.history)
    gone = Result(tmp_path / "nowhere")
    assert repr(gone).startswith(f"Result('{tmp_path / 'nowhere'}')")


def test_the_first_that_is_set_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("STEELYARD_CACHE", "/ours")
    assert cache_folder() == Path("/ours")
    monkeypatch.setenv("STEELYARD_CACHE", "")
    assert cache_folder() == Path("/xdg/steelyard")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/someone/.cache/steelyard")


@pytest.mark.slow  # `.ci/package` runs the main job in an environment that has none of them
def test_the_main_job_needs_no_extra(tmp_path: Path) -> None:
    extras = (
        "cryptography",
        "dp_accounting",
        "flwr",
        "httpx",
        "uvicorn",
        "fastapi",
        "numba",
        "implicit",
        "pyarrow",
        "PIL",
    )
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({extras}))\n"
        "from steelyard.cli.main import main\n"
        "sys.argv = ['steelyard', 'run', 'quickstart', '--set', 'rounds.count=1', '--out', 'run', '--report']\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=command_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").is_file()
