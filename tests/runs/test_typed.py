"""The one reader of the database: what is not of its column's type, shape or size is one line in every list."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import CommandLine
from tests.report.made_run import make_run
from tests.runs.damaged_folders import run_cases

from steelyard.errors import UserError
from steelyard.report.summary import summarise
from steelyard.rounds.settings import RoundSettings
from steelyard.runs.export import export_run
from steelyard.runs.opening import reading
from steelyard.runs.reader import History
from steelyard.runs.store import Store

SAMPLE, ALL, PART = 15, 10_000, 500


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "run", rounds=3, clients=4, seeds=(0,), rules=("fedavg",))


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """A folder with two runs, of which `bad` is going to be changed."""
    for name in ("good", "bad"):
        shutil.copytree(made, tmp_path / "runs" / name)
    return tmp_path / "runs"


def change(folder: Path, *statements: str) -> None:
    with sqlite3.connect(folder / "run.sqlite") as writer:
        for statement in statements:
            writer.execute(statement)
    writer.close()


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS round, 1 AS federation FROM n"
BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "an accuracy of text": (("UPDATE rounds SET accuracy = 'abc'",), "rounds, accuracy: 'abc' is no number"),
    "an absurd accuracy": (("UPDATE rounds SET accuracy = 1e308",), "rounds, accuracy: holds a number beyond 1e+200"),
    "a seed of text": (("UPDATE federations SET seed = 'x'",), "federations, seed: 'x' is no whole number from 0 on"),
    "a rule of bytes": (("UPDATE federations SET rule = x'00'",), "federations, rule: b'\\x00' is no text"),
    "a fact of another shape": (("INSERT INTO info VALUES ('labels', '[1]')",), "info, labels: Input should be"),
    "a view": (("DROP TABLE rounds", f"CREATE VIEW rounds AS {ENDLESS}"), "the view 'rounds' is not one of a run's"),
    "a trigger": (
        ("CREATE TRIGGER t AFTER INSERT ON info BEGIN DELETE FROM rounds; END",),
        "the trigger 't' is not one of a run's",
    ),
    "a column more": (("ALTER TABLE clients ADD COLUMN more TEXT",), "the table 'clients' is not one of a run's"),
    "a table less": (("DROP TABLE untested",), "the table 'untested' is missing"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_run_is_one_line_in_every_list(runs: Path, steelyard: CommandLine, kind: str) -> None:
    statements, why = BAD[kind]
    change(runs / "bad", *statements)
    for command in (("ls", runs), ("top", runs, "--once")):
        done = steelyard(*command)
        assert (done.returncode, done.stderr) == (0, "")
        lines = [line for line in done.stdout.splitlines() if "cannot be read" in line]
        assert len(lines) == 1
        assert f"bad: cannot be read: {why}" in lines[0]
        assert "finished" in done.stdout


@pytest.mark.parametrize("kind", ["an accuracy of text", "a seed of text", "a view"])
@pytest.mark.parametrize("command", ["table", "report", "export"])
def test_a_bad_run_is_refused_in_one_line(runs: Path, refused: Callable[..., str], kind: str, command: str) -> None:
    statements, why = BAD[kind]
    change(runs / "bad", *statements)
    assert why in refused(command, runs / "bad")


def test_a_trigger_does_not_run(runs: Path) -> None:
    change(runs / "bad", "CREATE TRIGGER t AFTER INSERT ON info BEGIN DELETE FROM rounds; END")
    with pytest.raises(UserError, match="the trigger 't' is not one of a run's database"):
        Store(runs / "bad")
    with sqlite3.connect(runs / "bad" / "run.sqlite") as reader:
        assert reader.execute("SELECT COUNT(*) FROM rounds").fetchone() == (3,)
    reader.close()


def test_a_table_without_end_is_ended(runs: Path) -> None:
    """Four levels of pages, of which every entry points at the same page below: rows by the billion."""
    path = runs / "bad" / "run.sqlite"
    change(runs / "bad", *(f"INSERT INTO clients (name) VALUES ('{number:0900d}')" for number in range(300)))
    reader = sqlite3.connect(path)
    ((root,),) = reader.execute("SELECT rootpage FROM sqlite_master WHERE name = 'clients'").fetchall()
    reader.close()
    content = bytearray(path.read_bytes())
    begin, pages = (root - 1) * 4096, len(content) // 4096
    assert content[begin] == 5  # a page of a table that points at others
    above = content[begin : begin + 4096]
    places = [int.from_bytes(above[at : at + 2], "big") for at in range(12, 12 + 2 * above[4] + 512 * above[3], 2)]
    leaf = bytes(above[places[0] : places[0] + 4])

    def pointing(target: bytes) -> bytes:
        page = bytearray(above)
        for place in (8, *places):
            page[place : place + 4] = target
        return bytes(page)

    for level in range(3):
        content += pointing(leaf if level == 0 else (pages + level).to_bytes(4, "big"))
    content[begin : begin + 4096] = pointing((pages + 3).to_bytes(4, "big"))
    content[28:32] = (pages + 3).to_bytes(4, "big")
    path.write_bytes(bytes(content))
    history = History(runs / "bad")
    with pytest.raises(UserError, match="clients holds more than its file does"):
        history._rows("clients", ("id", "name"))
    with pytest.raises(UserError, match="a query of it does not end"), reading(runs / "bad") as connection:
        connection.execute("SELECT COUNT(*) FROM clients NOT INDEXED WHERE name > 'x'").fetchall()
    with pytest.raises(UserError, match=r"bad/run.sqlite: not a readable run database: damaged: .* page"):
        Store(runs / "bad")


@pytest.mark.parametrize("name", ["'a' || char(10) || 'b'", "CAST(x'619d' AS TEXT)"], ids=["two lines", "no text"])
def test_what_sqlite_quotes_of_a_damaged_schema_is_one_line(runs: Path, steelyard: CommandLine, name: str) -> None:
    change(
        runs / "bad",
        "PRAGMA writable_schema=1",
        f"UPDATE sqlite_master SET name = {name}, sql = 'CREATE TABLE (' WHERE name = 'rounds'",
    )
    done = steelyard("ls", runs, "--format", "json")
    (bad,) = [run for run in json.loads(done.stdout) if run["name"] == "bad"]
    assert bad["state"] == "unreadable"
    assert bad["problem"].isprintable(), bad
    with pytest.raises(UserError, match="not a readable run database"):
        Store(runs / "bad")


def test_figures_whose_sum_would_be_no_number_are_damage(runs: Path) -> None:
    change(runs / "bad", """UPDATE rounds SET server_metrics = '{"rmse": 1e308}'""")
    with pytest.raises(UserError, match=r"rounds, server_metrics: .*rmse is beyond 1e\+200"):
        len(History(runs / "bad").rounds)


def test_rounds_without_their_evaluations_are_one_line(runs: Path, refused: Callable[..., str]) -> None:
    change(runs / "bad", "DELETE FROM evaluations WHERE round = 2")
    expected = "fedavg, seed 0: 3 rounds with an accuracy and 2 with evaluations"
    assert expected in refused("table", runs / "bad")


def test_a_rule_without_rounds_has_none(runs: Path) -> None:
    change(runs / "bad", *(f"DELETE FROM {table}" for table in ("rounds", "evaluations", "updates", "samples")))
    (rule,) = summarise(runs / "bad", RoundSettings(count=3))["rules"]
    assert rule["rounds"] == 0
    assert rule["accuracy"] is None
    change(runs / "bad", *(f"DELETE FROM {table}" for table in ("federations", "chain", "digests", "checkpoints")))
    with pytest.raises(UserError, match="it names no rule"):
        summarise(runs / "bad", RoundSettings(count=3))


@pytest.mark.parametrize(("column", "value"), [("ledger", "x'00'"), ("ledger_bytes", "'many'"), ("head", "x'00'")])
def test_a_writer_takes_over_no_value_of_another_type(runs: Path, column: str, value: str) -> None:
    change(runs / "bad", f"UPDATE chain SET {column} = {value}")
    with pytest.raises(UserError, match=rf"cannot be read: chain, {column}: .* is no (text|whole number)"):
        Store(runs / "bad")


def test_names_from_a_database_do_not_reach_the_terminal(runs: Path, steelyard: CommandLine) -> None:
    """Neither the old control characters nor the newer ones, which terminals take for the same."""
    odd = "red\x1b[31m\x9b2J\x07"
    change(
        runs / "bad",
        f"UPDATE federations SET rule = '{odd}', name = '{odd}'",
        f"UPDATE clients SET name = name || '{odd}'",
    )
    for command in (("table",), ("table", "--format", "csv"), ("table", "--format", "json"), ("table", "--groups")):
        done = steelyard(command[0], runs / "bad", *command[1:])
        assert done.returncode == 0, done.stderr
        assert "red" in done.stdout
        assert done.stdout.replace("\n", "").isprintable()
    for command in (("ls", runs), ("top", runs, "--once")):
        assert steelyard(*command).stdout.replace("\n", "").isprintable()


def test_a_name_that_is_a_formula_is_none_in_any_csv(runs: Path, steelyard: CommandLine) -> None:
    change(runs / "bad", "UPDATE federations SET rule = '=1+1'")
    assert ",'=1+1," in steelyard("table", runs / "bad", "--format", "csv").stdout
    assert steelyard("table", runs / "bad", "--curves", "c.csv").returncode == 0
    assert "\n'=1+1," in (runs.parent / "c.csv").read_text(encoding="utf-8")
    change(runs / "bad", "UPDATE federations SET rule = char(9) || '=1+1'")
    assert "\n'\\t=1+1," in export_run(runs / "bad", "csv")[1].read_text(encoding="utf-8")


def test_damaged_folders_give_one_line_and_touch_nothing() -> None:
    assert run_cases(SAMPLE, every=80) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ALL, PART))
def test_many_damaged_folders(first: int) -> None:
    """In parts of some minutes each, so that one can be run alone: `-k 2500`."""
    assert run_cases(PART, first, every=10) == []
