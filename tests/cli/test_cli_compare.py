"""`steelyard compare` and `steelyard table` as a user runs them, on digits."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import CommandLine

SMALL = """
name = "small"
seed = 3
[data]
source = "digits"
[partition]
scheme = "dirichlet"
clients = 6
alpha = 0.5
minimum = 12
test = "local"
server = "fraction"
server_report = "apart"
[model]
name = "logistic"
[training]
learning_rate = 0.2
epochs = 1
batch_size = 60
[rounds]
count = 4
fraction = 0.5
targets = [0.3, 0.5]
shares = [0.5, 1.0]
[compute]
engine = "loop"
device = "cpu"
[weighing]
criteria = ["DS", "LD", "MD"]
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "small.toml"
    path.write_text(SMALL)
    return path


def test_compare_then_table_in_every_format(steelyard: CommandLine, small: Path, tmp_path: Path) -> None:
    rules = ("--rules", "DS,LD>DS>MD,online", "--rules", "adafed", "--seeds", "2")
    done = steelyard("compare", small, *rules, "--out", "run", "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["baseline"] == "DS"
    assert document["rules"] == ["DS", "LD>DS>MD", "online(DS>LD>MD)", "adafed"]
    assert document["seeds"] == [3, 4]
    assert [section["target"] for section in document["rounds_to_target"]] == [0.3, 0.5]
    assert len(document["verdicts"]) == 3
    assert all(len(row["final"]["values"]) == 2 for row in document["devices"])
    for row in document["right_wrong"]:
        assert sum(value for value in row.values() if isinstance(value, int)) > 0
    assert set(document["server"][3]) == {"rule", "accuracy", "macro_f1"}
    # The run folder is an ordinary one: its rules are written down, and table, export and resume work on it.
    described = (tmp_path / "run" / "experiment.toml").read_text()
    assert "online(DS>LD>MD)" in described
    assert document["recommendation"]["rule"] is None
    text = steelyard("table", "run").stdout
    assert text.startswith(document["recommendation"]["sentence"])
    assert "two seeds cannot tell it from chance: steelyard compare --seeds" in text
    assert "online(DS>LD>MD) against DS" not in text
    assert "online(DS>LD>MD) against DS" in steelyard("table", "run", "--full").stdout
    assert "Rounds until a share of the devices reach 50%" in text
    assert steelyard("table", "run", "--format", "markdown").stdout.count("| --- |") >= 4
    assert r"\toprule" in steelyard("table", "run", "--format", "latex").stdout
    rows = list(csv.DictReader(io.StringIO(steelyard("table", "run", "--format", "csv").stdout)))
    assert len(rows) == 2 * 4 * 4
    groups = steelyard("table", "run", "--groups", "--format", "markdown").stdout
    assert "| Ind | DS |" in groups
    assert "| MCA | LD>DS>MD |" in groups
    assert "| Final | online(DS>LD>MD) |" in groups
    other = steelyard("table", "run", "--baseline", "adafed", "--format", "json", "--curves", "curves.svg")
    assert json.loads(other.stdout)["baseline"] == "adafed"
    assert (tmp_path / "curves.svg").read_text().startswith("<svg")
    again = json.loads(steelyard("resume", "run", "--report", "--format", "json").stdout)
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")
    assert len(again["rules"]) == 8
    assert again["rules"][2]["orders"]["last"]
    assert steelyard("export", "run").returncode == 0


def test_run_shows_orders_and_the_servers_figures(steelyard: CommandLine, small: Path) -> None:
    done = steelyard("run", small, "--set", "weighing.adjust.strategy=greedy", "--out", "greedy")
    assert done.returncode == 0, done.stderr
    assert "greedy(DS>LD>MD)" in done.stdout
    assert "Priority orders" in done.stdout
    assert "server's" in done.stdout
    assert "clean" not in done.stdout  # nobody knows whether these rows are


def test_without_tests_at_clients_the_servers_rows_make_the_tables(steelyard: CommandLine, small: Path) -> None:
    rules = ("--rules", "DS,LD", "--set", "partition.test=none", "--set", "rounds.count=2")
    done = steelyard("compare", small, *rules, "--out", "untested", "-q", "--report")
    assert done.returncode == 0, done.stderr
    assert "but one seed cannot tell it from chance" in done.stdout
    assert "worst tenth" not in done.stdout
    table = steelyard("table", "untested")
    assert table.returncode == 0, table.stderr
    assert "Accuracy over all test samples" in table.stdout
    assert "Rounds until a share of the devices" not in table.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rules", "onlin"), ("--rules", "did you mean 'online'")),
        (("--rules", "DS>QQ"), ("--rules", "QQ")),
        (("--rules", "DS", "--baseline", "LD"), ("--baseline", "LD")),
        (("--set", "weighing.adjust.strategy=lucky"), ("weighing.adjust.strategy", "lucky", "online")),
        (("--set", "weighing.loss.adapt=barron"), ("weighing.loss.adapt", "barron", "class-f1")),
        (("--set", "rounds.evaluate_every=2"), ("evaluate_every", "allowed: 1")),
    ],
)
def test_mistakes_are_one_line(refused: Callable[..., str], small: Path, arguments: tuple[str, ...], words) -> None:
    line = refused("compare", small, *arguments)
    for word in words:
        assert word in line


def test_a_folder_without_a_run_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "no run" in refused("table", tmp_path) or "experiment.toml" in refused("table", tmp_path)


def test_seeds_must_be_counted_from_one(steelyard: CommandLine, small: Path) -> None:
    done = steelyard("compare", small, "--seeds", "0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_all_rules_run_and_those_that_cannot_are_named(steelyard: CommandLine, tmp_path: Path) -> None:
    """Each once with its defaults; half of the clients take part, which three policies refuse: exit 0 all the same."""
    (tmp_path / "small.toml").write_text(SMALL)
    done = steelyard(
        "compare", "small.toml", "--rules", "all", "--set", "rounds.count=1", "--format", "json", "--quiet"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {"afl", "cgsv", "feddg-ga", "fedbn"} <= set(document["left_out"])
    assert {"fedavg", "SV", "fedlaw", "q-fedavg", "apfl", "fedala", "ditto"} <= set(document["rules"])
    assert not set(document["left_out"]) & set(document["rules"])
    named = [line.split("without ")[1].split(":")[0] for line in done.stderr.splitlines() if "--rules all" in line]
    assert named == list(document["left_out"])
    tables = steelyard("table", document["run"], "--full").stdout
    assert "Left out of all rules" in tables
    assert "needs full participation" in " ".join(tables.split())
