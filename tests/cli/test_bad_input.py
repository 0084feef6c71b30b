"""Bad input of every kind ends in one plain line and exit code 2, before a folder is made; never in a traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.cli.bad_cases import BASE, CASES, Case
from tests.conftest import CommandLine

import steelyard.api  # noqa: F401  (torch is read here: a time limit in the first case would cut an import short)
from steelyard.cli.main import main

LIBRARY_WORDS = ("constrained", "instance of", "pathlib", "pickle", "pydantic", "dtype", "ndarray", "unable to parse")


def _lay_out(case: Case, folder: Path) -> set[str]:
    for name, content in {**BASE, **case.files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return {path.name for path in folder.iterdir()}


def _check(case: Case, line: str) -> None:
    assert line.startswith("steelyard: ")
    assert line.isprintable()
    assert len(line) < 1100
    for word in case.words:
        assert word in line
    for word in LIBRARY_WORDS:
        assert word not in line


def test_there_are_many_cases() -> None:
    assert len({case.arguments + tuple(map(str, case.files.items())) for case in CASES}) >= 350


@pytest.mark.timeout(30)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_in_one_line(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _lay_out(case, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["steelyard", *case.arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    lines = printed.err.strip().splitlines()
    assert ended.value.code == 2, printed
    # On a slow machine, what takes long is named before the answer.
    assert sum(line.startswith("steelyard: ") for line in lines) == 1, printed.err
    assert "Traceback" not in printed.err
    _check(case, lines[-1])
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("case", CASES[::60], ids=lambda case: case.name)
def test_the_same_in_a_process_of_its_own(case: Case, tmp_path: Path, steelyard: CommandLine) -> None:
    _lay_out(case, tmp_path)
    done = steelyard(*case.arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    _check(case, done.stderr.strip().splitlines()[-1])
