"""`steelyard arena` as users call it: the sentence first, JSON for programs, archives checked, mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import CommandLine

from steelyard.files import ARENA_FILE

QUICK = (
    "--scenes",
    "hospitals",
    "--seeds",
    "1",
    "--set",
    "rounds.count=1",
    "--set",
    "compute.engine=stacked",
    "--quiet",
)
MINE = """
from steelyard import server_criterion
@server_criterion("MINE", description="{what}")
def mine(view):
    return {what}
"""


def test_an_own_rule_is_judged_checked_and_found_again(steelyard: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.format(what="[1.0] * len(view.clients)"))
    done = steelyard("arena", "mine.py", "--trust", *QUICK, "--out", "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("MINE cannot be told from fedavg by one seed: over 1 scene it is ")
    assert (tmp_path / "out" / "code" / "mine.py").exists()
    (tmp_path / "mine.py").unlink()
    again = steelyard("resume", "out", "--trust", "--format", "json", "--quiet")
    assert again.returncode == 0, again.stderr
    document = json.loads(again.stdout)
    assert document["sentence"] == done.stdout.splitlines()[0]
    shown = steelyard("table", "out")
    assert (shown.returncode, shown.stdout.splitlines()[0]) == (0, document["sentence"])
    (tmp_path / "out" / "report.html").unlink()
    page = steelyard("report", "out")
    assert (page.returncode, page.stdout) == (0, "report to open: out/report.html\n")
    assert "MINE cannot be told from fedavg" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    alike = {row["rule"]: row["value"]["values"] for row in document["scenes"][0]["rules"]}
    assert alike["MINE"] == alike["EQ"], "an equal say is an equal say"
    checked = steelyard("arena", "--check", "out/arena.json", "--quiet")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.splitlines()[-1].endswith("the same model, bit for bit")


def test_a_rule_that_fails_everywhere_has_no_verdict(steelyard: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.format(what="1 / 0"))
    done = steelyard("arena", "mine.py", "--trust", *QUICK, "--out", "out")
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stdout.splitlines()[0]
    (line,) = done.stderr.splitlines()
    assert "no verdict: MINE failed in 1 of 1 scene: " in line
    again = steelyard("arena", "mine.py", "--trust", *QUICK, "--out", "out", "--format", "json")
    assert (again.returncode, json.loads(again.stdout)["scenes"][0]["verdict"]) == (2, "failed")


def test_the_best_of_several_settings_is_chosen_and_held_out_seeds_open(
    steelyard: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_STATE", str(tmp_path / "state"))
    words = ("arena", "LD,MD", *QUICK, "--until-decided", "--out", "out", "--format", "json")
    done = steelyard(*words)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    tried = document["tried"]
    assert set(tried) == {"LD", "MD"}
    assert document["candidate"] == max(tried, key=lambda rule: (tried[rule], rule == "LD"))
    assert (document["opened"], document["seeds"], document["level"]) == (1, [201], 0.025)
    assert {row["rule"] for row in document["scenes"][0]["rules"]} == {"fedavg", document["candidate"]}
    assert json.loads(steelyard(*words).stdout) == document
    assert (tmp_path / "out" / "report.html").read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("NOPE",), "arena: 'NOPE' names no rule or criterion 'NOPE'"),
        (("--retune", "--seeds", "1", "--draft"), "arena: got --draft, --seeds with --retune; allowed: without"),
        (("--retune", "--seeds", "0"), "arena: got --seeds with --retune; allowed: without"),
        (("--check", "x.json", "--jobs", "2", "--suite", "full"), "arena: got --suite, --jobs with --check; allowed:"),
        (("--check", "x.json", "--out", "x"), "arena: got --out with --check; allowed: without"),
        (("EQ", "--scenes", ","), "--scenes: got ','; allowed: clean, "),
        (("EQ", "--jobs", "0"), "--jobs: got 0"),
        (("none.py", "--trust"), "there is no file 'none.py'"),
        (("there.py",), "allowed: with --trust"),
        (("EQ", "--suite", "huge"), "--suite: got 'huge'"),
        (("EQ", "--scenes", "moon"), "--scenes: got 'moon'"),
        ((), "allowed: one of them"),
        (("EQ", "--check", "x.json"), "allowed: one of them"),
        (("EQ", "--retune"), "allowed: one of them"),
        (("EQ", "--part", "3/2"), "--part: got '3/2'"),
        (("EQ", "--draft", "--until-decided"), "--until-decided: got it with --draft"),
        (("--check", "none.json"), "there is no file none.json"),
        (("--check", "."), "there is no file arena.json"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], says: str, steelyard: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "there.py").write_text(MINE.format(what="1 / 0"))
    done = steelyard("arena", *words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert says in line
    assert not (tmp_path / "runs").exists()


def test_parts_of_different_kinds_are_not_joined(steelyard: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / ARENA_FILE).write_text("")
    done = steelyard("join", "one", "two", "--out", "whole")
    assert done.returncode == 2
    assert done.stderr.strip() == "steelyard: join: one holds a part of an arena, two none; allowed: parts of one"
