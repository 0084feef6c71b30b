"""Lists of runs in the terminal: `ls`, one frame of `top`, small curves; narrow terminals, hostile names, no runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.conftest import CommandLine
from tests.runs.records import federation, record, state
from tests.warm import command_environment, warm_command

from steelyard.cli.lists import age, plain, score_of, sparkline
from steelyard.cli.top import Board
from steelyard.files import in_bytes
from steelyard.runs.glance import glance
from steelyard.runs.process import this_process
from steelyard.runs.store import Store


def make_run(folder: Path, name: str = "DS>LD", clients: tuple[str, str] = ("a", "b")) -> None:
    store = Store(folder)
    store.register([federation(name)])
    store.note(status="finished", rounds=3, measure="accuracy", writer=this_process().text())
    for round in range(3):
        from_clients = record(name, round, accuracy=0.25 * (round + 1))
        assert from_clients.updates is not None
        object.__setattr__(from_clients.updates, "clients", clients)
        store.commit(round, [from_clients], {name: state(round)}, dict, last=False)
    store.close()


def narrow(*arguments: str, cwd: Path, columns: int = 60) -> str:
    done = warm_command(*arguments, folder=cwd, environment=command_environment(COLUMNS=str(columns)))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lists_fit_sixty_columns(tmp_path: Path) -> None:
    """Names from files are shown as they are: neither markup nor control characters do anything."""
    make_run(
        tmp_path / "runs" / "a-run-with-a-rather-long-name-that-must-be-folded-somewhere",
        "[bold]x" * 9,
        ("\x1b[2Jc", "d"),
    )
    for command in (("ls",), ("top", "--once")):
        shown = narrow(*command, cwd=tmp_path)
        assert max(map(len, shown.splitlines())) <= 60, shown
        assert "\x1b" not in shown
        assert "finished" in shown
        assert "75.00%" in shown
    assert "[bold]x" in shown
    assert "heaviest of 2 in round 2: �[2Jc 75%, d 25%" in shown
    assert "▁" in shown
    assert "█" in shown


@pytest.mark.parametrize("measure", ["mean Dice", "C-index", "macro F1"])
def test_only_accuracies_are_in_per_cent(measure: str, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "run")
    store = Store(tmp_path / "runs" / "run")
    store.note(measure=measure)
    store.close()
    assert f"0.75 {measure}" in score_of(glance(tmp_path / "runs", "run"))
    console = Console(width=60, file=StringIO())
    console.print(Board(tmp_path / "runs").frame(60))
    assert isinstance(console.file, StringIO)
    assert " 0.75 " in console.file.getvalue()


def test_a_folder_that_is_the_run_itself_is_shown_by_its_name(tmp_path: Path) -> None:
    make_run(tmp_path / "mine")
    console = Console(width=60, file=StringIO())
    console.print(Board(tmp_path / "mine").frame(60))
    assert isinstance(console.file, StringIO)
    assert " mine finished" in console.file.getvalue().replace("  ", " ")


def test_no_fact_about_a_run_steers_the_terminal(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "run")
    store = Store(tmp_path / "runs" / "run")
    store.note(status="\x1b[2Js", measure="\x1b[2Jm\u202e")
    store.close()
    for command in (("ls",), ("ls", "--format", "json"), ("top", "--once")):
        shown = narrow(*command, cwd=tmp_path, columns=200)
        assert shown.replace("\n", "").isprintable(), shown


def test_ls_for_programs(tmp_path: Path, steelyard: CommandLine) -> None:
    make_run(tmp_path / "mine" / "one")
    (found,) = json.loads(steelyard("ls", "mine", "--format", "json").stdout)
    assert (found["name"], found["state"], found["round"], found["rounds"]) == ("one", "finished", 2, 3)
    assert found["accuracy"] == 0.75


def test_an_empty_folder_says_what_to_do(tmp_path: Path, steelyard: CommandLine, refused: Callable[..., str]) -> None:
    (tmp_path / "none").mkdir()
    for command in (("ls", "none"), ("top", "none", "--once")):
        assert "steelyard run quickstart --out none/first" in steelyard(*command).stdout
    assert "missing: no such folder" in refused("ls", "missing")


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 5, ""),
        ([0.5], 5, "▁"),
        ([0.0, 1.0], 5, "▁█"),
        ([0.0, 0.0, 1.0, 1.0], 2, "▁█"),
        ([0.0, 0.5, 1.0], 3, "▁▅█"),
        ([1.0, 2.0], 0, ""),
    ],
)
def test_small_curves(values: list[float], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn


def test_short_words_for_ages_and_sizes() -> None:
    now = time.time()
    assert [age(now - passed) for passed in (-5, 40, 300, 7300, 200000)] == ["0 s", "40 s", "5 min", "2 h", "2 d"]
    assert [in_bytes(count) for count in (12, 1234, 3_400_000, 5 * 10**9)] == ["12 B", "1.23 kB", "3.4 MB", "5 GB"]
    assert plain("a\x07[red]b").plain == "a�[red]b"


def test_top_leaves_on_q(tmp_path: Path) -> None:
    """In a terminal of its own: the view is drawn, q ends it, and the terminal is as before."""
    import pty
    import select

    make_run(tmp_path / "runs" / "one")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "steelyard", "top", "--every", "0.2"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        env={**command_environment(), "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    seen, asked, deadline = b"", False, time.monotonic() + 60
    try:
        while time.monotonic() < deadline and process.poll() is None:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    seen += os.read(ours, 65536)
                except OSError:
                    break
            if b"DS>LD" in seen and not asked:
                os.write(ours, b"q")
                asked = True
        assert process.wait(10) == 0, seen[-500:]
    finally:
        process.kill()
        os.close(ours)
    assert b"\x1b[?1049l" in seen, "the alternate screen was left"
