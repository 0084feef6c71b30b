"""`steelyard compare`, `sweep` and `arena` as users run them on digits, and the tables they leave."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
from tests.conftest import CommandLine
from tests.kit import SMALL, changed

Refused = Callable[..., str]
QUICK = ("--set", "rounds.count=1", "--set", "compute.engine=stacked", "--quiet")
TESTED = {"test": "local", "server": "fraction", "server_report": "apart"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "small.toml"
    rounds = {"count": 4, "fraction": 0.5, "targets": [0.3, 0.5], "shares": [0.5, 1.0]}
    document = changed(SMALL, partition=TESTED, rounds=rounds, weighing={"criteria": ["DS", "LD", "MD"]})
    path.write_text(tomli_w.dumps(document))
    return path


def test_compare_then_table_in_every_format(command: CommandLine, small: Path, tmp_path: Path) -> None:
    rules = ("--rules", "DS,LD>DS>MD,online", "--rules", "adafed", "--seeds", "2")
    done = command("compare", small, *rules, "--out", "run", "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["baseline"] == "DS"
    assert [rule["rule"] for rule in document["rules"]] == ["DS", "LD>DS>MD", "online(DS>LD>MD)", "adafed"]
    assert document["seeds"] == [5, 6]
    assert [bool(rule["in_words"]) for rule in document["rules"]] == [False, True, True, True]
    assert all(len(rule["figures"]["final"]["values"]) == 2 for rule in document["rules"])
    # The run folder is an ordinary one: table, export and resume work on it.
    text = command("table", "run").stdout
    assert " ".join(text.split()).startswith(document["recommendation"]["sentence"])
    full = "online(DS>LD>MD) against DS"
    assert full not in text
    assert full in command("table", "run", "--full").stdout
    assert r"\toprule" in command("table", "run", "--format", "latex").stdout
    rows = list(csv.DictReader(io.StringIO(command("table", "run", "--format", "csv").stdout)))
    assert len(rows) == 2 * 4 * 4
    assert "| MCA | LD>DS>MD |" in command("table", "run", "--groups", "--format", "markdown").stdout
    other = command("table", "run", "--baseline", "adafed", "--format", "json", "--curves", "curves.svg")
    assert json.loads(other.stdout)["baseline"] == "adafed"
    assert (tmp_path / "curves.svg").read_text().startswith("<svg")
    again = json.loads(command("resume", "run", "--report", "--format", "json").stdout)
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")
    assert len(again["rules"]) == 4


def test_without_tests_at_clients_the_servers_rows_make_the_tables(
    command: CommandLine, small: Path, tmp_path: Path
) -> None:
    rules = ("--rules", "DS,LD", "--set", "partition.test=none", "--set", "rounds.count=2")
    done = command("compare", small, *rules, "--out", "untested", "-q", "--report", "--baseline", "LD")
    assert done.returncode == 0, done.stderr
    sentence = done.stdout.split(" on the server", 1)[0]  # of LD, not of FedAvg, and the report begins with it too
    assert "LD" in sentence
    assert sentence in (tmp_path / "untested" / "report.html").read_text()
    table = command("table", "untested").stdout
    assert "Accuracy over all test samples" in table
    assert "Rounds until a share of the devices" not in table


@pytest.mark.parametrize("words", [("run",), ("attack", "--attack", "sign-flip", "--rules", "fedavg,EQ")])
def test_what_is_printed_for_more_seeds_runs_when_pasted(
    command: CommandLine, small: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    fields = ("--set", 'beside.EQ.criteria=["EQ"]', *QUICK)
    first = command(*words, small, *fields, "--out", "one seed")
    (line,) = [line for line in first.stdout.splitlines() if line.startswith("more seeds: ")]
    name, *pasted = shlex.split(line.removeprefix("more seeds: "))
    assert name == "steelyard"
    found = json.loads(command(*pasted, "--format", "json").stdout)["recommendation"]
    assert found["seeds"] == int(pasted[-1]) > 3
    rules = {row["rule"] for row in found["rules"]}
    assert rules == ({"EQ", "DS>LD>MD"} if words == ("run",) else {"fedavg", "EQ"})


def test_a_run_that_nobody_tests_says_so_once_and_points_to_no_table(command: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "untested.toml").write_text(
        'name = "untested"\n[data]\nsource = "digits"\n[partition]\nclients = 5\ntest = "none"\n[model]\n'
        'name = "logistic"\n[rounds]\ncount = 1\n[weighing]\ncriteria = ["EQ"]\n'
    )
    done = command("run", "untested.toml", "--out", "untested", "-q")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no accuracy is known") == 1
    assert "next: steelyard table" not in done.stdout  # it would refuse the run


def test_all_rules_run_and_those_that_cannot_are_named(command: CommandLine, small: Path) -> None:
    """Each once with its defaults; half of the clients take part, which three policies refuse: exit 0 all the same."""
    done = command("compare", small, "--rules", "all", *QUICK, "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rules = {rule["rule"] for rule in document["rules"]}
    assert {"afl", "cgsv", "feddg-ga", "fedbn"} <= set(document["left_out"])
    assert {"fedavg", "SV", "fedlaw", "q-fedavg", "apfl", "fedala", "ditto"} <= rules
    assert not set(document["left_out"]) & rules


# sweep ----------------------------------------------------------------------------------------------------------------


def test_a_sweep_on_digits(command: CommandLine, tmp_path: Path) -> None:
    words = ("sweep", "quickstart", *QUICK, "--set", "rounds.count=2", "--rules", "DS")
    words += ("--over", "training.learning_rate=0.01,0.3")
    done = command(*words, "--out", "one", "--test")
    assert done.returncode == 0, done.stderr
    assert "the best on the test set: accuracy" in done.stdout
    runs = {"1-learning_rate=0.01", "2-learning_rate=0.3", "test"}
    files = {"sweep.toml", "results.csv", "best.toml", "sweep.svg", "lock"}
    assert {path.name for path in (tmp_path / "one").iterdir()} == runs | files
    document = json.loads(command("resume", "one", "--format", "json").stdout)
    assert document["best"]["values"] == {"training.learning_rate": 0.3}
    assert command("table", "one", "--format", "csv").stdout == (tmp_path / "one" / "results.csv").read_text()
    refusal = command("table", "one", "--baseline", "DS", "--curves", "curves.svg")
    assert refusal.returncode == 2
    assert (
        "--baseline and --curves: got with one, which holds a sweep; allowed: a run in it, such as one/1-"
        in refusal.stderr
    )


# arena ----------------------------------------------------------------------------------------------------------------

HOSPITALS = ("--scenes", "hospitals", "--seeds", "1", *QUICK)
MINE = """
from steelyard import server_criterion
@server_criterion("MINE", description="{what}")
def mine(view):
    return {what}
"""


def test_an_own_rule_is_judged_checked_and_found_again(command: CommandLine, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.format(what="[1.0] * len(view.clients)"))
    assert "add --trust" in refused("arena", "mine.py", *HOSPITALS)
    done = command("arena", "mine.py", "--trust", *HOSPITALS, "--out", "out")
    assert done.returncode == 0, done.stderr
    sentence = done.stdout.splitlines()[0]
    assert sentence.startswith("One seed is too few to compare MINE with fedavg: over 1 task it is ")
    assert (tmp_path / "out" / "code" / "mine.py").exists()
    (tmp_path / "mine.py").unlink()
    document = json.loads(command("resume", "out", "--trust", "--format", "json", "--quiet").stdout)
    assert document["sentence"] == sentence == command("table", "out").stdout.splitlines()[0]
    (tmp_path / "out" / "report.html").unlink()
    assert "out/report.html" in command("report", "out").stdout
    alike = {row["rule"]: row["value"]["values"] for row in document["scenes"][0]["rules"]}
    assert alike["MINE"] == alike["EQ"], "an equal say is an equal say"
    checked = command("arena", "--check", "out/arena.json", "--quiet")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.splitlines()[-1].endswith("the same model, bit for bit")


def test_a_rule_that_fails_everywhere_has_no_verdict(command: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.format(what="1 / 0"))
    done = command("arena", "mine.py", "--trust", *HOSPITALS, "--out", "out")
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stdout.splitlines()[0]
    (line,) = done.stderr.splitlines()
    assert "no verdict: MINE failed in 1 of 1 task: " in line
