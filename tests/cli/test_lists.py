"""What the terminal shows of runs: `ls`, one frame of `top`, summaries; narrow terminals, hostile names, no runs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.conftest import CommandLine
from tests.kit import small
from tests.runs.records import federation, record, state
from tests.warm import command_environment, warm_command

from steelyard.base.files import in_bytes
from steelyard.cli.printing import show_result
from steelyard.cli.watching import Board, age, score_of
from steelyard.runs.facts import RunFacts
from steelyard.runs.glance import glance, this_process
from steelyard.runs.store import Store


def make_run(folder: Path, name: str = "DS>LD", clients: tuple[str, str] = ("a", "b")) -> None:
    store = Store(folder)
    store.register([federation(name)])
    store.note(RunFacts(status="finished", rounds=3, measure="accuracy", writer=this_process().text()))
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
    for words in (("ls",), ("top", "--once")):
        shown = narrow(*words, cwd=tmp_path)
        assert max(map(len, shown.splitlines())) <= 60, shown
        assert "\x1b" not in shown
        assert "finished" in shown
        assert "75.00%" in shown
    assert "[bold]x" in shown
    assert "heaviest of 2 in round 2: �[2Jc 75%, d 25%" in shown


def test_only_accuracies_are_in_per_cent(tmp_path: Path) -> None:
    measure = "C-index"
    make_run(tmp_path / "mine")
    store = Store(tmp_path / "mine")
    store.note(RunFacts(measure=measure))
    store.close()
    assert f"0.75 {measure}" in score_of(glance(tmp_path, "mine"))
    shown = StringIO()
    Console(width=60, file=shown).print(Board(tmp_path / "mine").frame(60))
    assert " 0.75 " in shown.getvalue()


def test_no_fact_about_a_run_steers_the_terminal(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "run")
    store = Store(tmp_path / "runs" / "run")
    store.note(RunFacts(status="\x1b[2Js", measure="\x1b[2Jm\u202e"))
    store.close()
    for words in (("ls",), ("ls", "--format", "json"), ("top", "--once")):
        shown = narrow(*words, cwd=tmp_path, columns=200)
        assert shown.replace("\n", "").isprintable(), shown


def test_ls_for_programs(tmp_path: Path, command: CommandLine) -> None:
    make_run(tmp_path / "mine" / "one")
    (found,) = json.loads(command("ls", "mine", "--format", "json").stdout)
    assert (found["name"], found["state"], found["round"], found["rounds"]) == ("one", "finished", 2, 3)
    assert found["accuracy"] == 0.75


def test_an_empty_folder_says_what_to_do(tmp_path: Path, command: CommandLine) -> None:
    (tmp_path / "none").mkdir()
    for words in (("ls", "none"), ("top", "none", "--once")):
        assert "steelyard run quickstart --out none/first" in command(*words).stdout


def test_short_words_for_ages_and_sizes() -> None:
    now = time.time()
    assert [age(now - passed) for passed in (-5, 40, 300, 7300, 200000)] == ["0 s", "40 s", "5 min", "2 h", "2 d"]
    assert [in_bytes(count) for count in (12, 1234, 3_400_000, 5 * 10**9)] == ["12 B", "1.23 kB", "3.4 MB", "5 GB"]


@pytest.mark.timeout(60)
def test_top_leaves_on_q(tmp_path: Path) -> None:
    """In a terminal of its own: the view is drawn, q ends it, and the terminal is as before."""
    import pty

    make_run(tmp_path / "runs" / "one")
    ours, theirs = pty.openpty()
    environment = {**command_environment(), "TERM": "xterm"}
    command = [sys.executable, "-m", "steelyard", "top", "--every", "0.2"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, cwd=tmp_path, env=environment)
    os.close(theirs)
    seen = b""
    while b"DS>LD" not in seen:
        seen += os.read(ours, 65536)
    os.write(ours, b"q")
    with contextlib.suppress(OSError):  # of a terminal that nobody holds any more
        while True:
            seen += os.read(ours, 65536)
    os.close(ours)
    assert process.wait(10) == 0, seen[-500:]
    assert b"\x1b[?1049l" in seen, "the alternate screen was left"


@pytest.mark.parametrize("width", [50, 120])
def test_summaries_fit_the_terminal(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = {"fedavg": {"criteria": ["DS"], "name": "fedavg"}}
    flaws = [{"kind": "noisy", "clients": ["client-002"]}]
    document = small(beside=beside, flaws=flaws, partition={"server": "fraction"}).run(tmp_path / "run").comparison
    monkeypatch.setenv("COLUMNS", str(width))
    show_result(document)
    lines = capsys.readouterr().out.splitlines()
    broken = [line for line in lines if not line.startswith("more seeds: ")]
    assert [line for line in broken if " " in line[width:]] == []  # the digest and the folder are not broken
    for rule in document.rules:
        first = rule.seeds[0].heaviest_clients[0]
        (value,) = [row.value for row in document.tested().rules if row.rule == rule.rule]
        found = (100 * each.mean for each in (value, rule.figures["flawed_weight"]))
        cells = (*(f"{value:.1f}" for value in found), f"{first.client} {first.share:.1%}")
        assert [cell for cell in cells if cell not in " ".join(lines)] == []
