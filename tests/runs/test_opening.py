"""Opening a run's database: made once, never by a reader, and only of the version that is understood."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from tests.report.made_run import make_run

from steelyard.errors import UserError
from steelyard.files import DATABASE
from steelyard.runs.opening import connect
from steelyard.runs.reader import History
from steelyard.runs.store import Store


def test_a_writer_makes_the_tables_once_and_readers_do_not_block_it(tmp_path: Path) -> None:
    writer = connect(tmp_path, write=True)
    tables = {name for (name,) in writer.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    wanted = {
        "info",
        "federations",
        "clients",
        "rounds",
        "updates",
        "failures",
        "untested",
        "evaluations",
        "samples",
        "ended",
        "contributions",
        "digests",
        "signatures",
        "keys",
        "chain",
        "checkpoints",
    }
    assert tables == wanted
    assert writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert writer.execute("PRAGMA synchronous").fetchone() == (1,)  # NORMAL
    reader = connect(tmp_path, write=False)
    reader.execute("BEGIN")
    assert reader.execute("SELECT * FROM info").fetchall() == [("schema", "9")]
    with writer:
        writer.execute("INSERT INTO info VALUES ('status', 'running')")
    assert reader.execute("SELECT COUNT(*) FROM info").fetchone() == (1,)  # whole transactions only
    reader.close()
    writer.close()
    again = connect(tmp_path, write=True)
    assert again.execute("SELECT value FROM info WHERE key = 'status'").fetchall() == [("running",)]
    again.close()


@pytest.mark.parametrize(
    ("name", "says"), [("sweep.toml", "holds a sweep"), ("attack.toml", "attacks"), ("arena.toml", "an arena")]
)
def test_a_folder_of_several_runs_says_so(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(
        UserError, match=f"{tmp_path}: .*{says}, which is several runs; allowed: a run in it, {tmp_path}/"
    ):
        connect(tmp_path, write=False)


def test_a_folder_with_runs_in_it_names_one(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    connect(tmp_path / "runs" / "first", write=True).close()
    with pytest.raises(UserError, match=f"allowed: one of the runs in it, such as {tmp_path}/runs/first"):
        connect(tmp_path / "runs", write=False)


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}: no run here"):
        connect(tmp_path, write=False)
    assert not (tmp_path / DATABASE).exists()
    connect(tmp_path, write=True).close()
    reader = connect(tmp_path, write=False)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("INSERT INTO info VALUES ('status', 'lies')")
    reader.close()


@pytest.mark.parametrize("write", [True, False])
def test_what_is_no_database_is_named(tmp_path: Path, write: bool) -> None:
    (tmp_path / DATABASE).write_text("this is not a database, it is only some text that is long enough to be read")
    with pytest.raises(UserError, match=r"run\.sqlite: not a readable run database: .*not a database"):
        connect(tmp_path, write=write)


@pytest.mark.parametrize("write", [True, False])
def test_another_version_is_named(tmp_path: Path, write: bool) -> None:
    writer = connect(tmp_path, write=True)
    with writer:
        writer.execute("UPDATE info SET value = '1' WHERE key = 'schema'")
    writer.close()
    with pytest.raises(UserError, match=r"run\.sqlite: schema 1; this version reads schema 9$"):
        connect(tmp_path, write=write)


def test_a_database_without_a_version_is_named(tmp_path: Path) -> None:
    writer = connect(tmp_path, write=True)
    with writer:
        writer.execute("DELETE FROM info")
    writer.close()
    with pytest.raises(UserError, match="schema None; this version reads schema 9"):
        connect(tmp_path, write=False)


def test_a_row_has_one_meaning(tmp_path: Path) -> None:
    """A second row of the same round, client or name is refused by the database itself."""
    writer = connect(tmp_path, write=True)
    writer.execute("INSERT INTO federations VALUES (1, 'a', 'a', 0, '{}', 'fedavg')")
    writer.execute("INSERT INTO samples VALUES (1, 1, x'00', 8)")
    writer.execute("INSERT INTO evaluations VALUES (1, 1, x'', x'', x'', x'', '[]', NULL)")
    for text in (
        "INSERT INTO federations VALUES (2, 'a', 'b', 0, '{}', 'fedavg')",
        "INSERT INTO samples VALUES (1, 1, x'ff', 8)",
        "INSERT INTO evaluations VALUES (1, 1, x'00', x'', x'', x'', '[]', NULL)",
    ):
        with pytest.raises(sqlite3.IntegrityError):
            writer.execute(text)
    writer.close()


def test_a_reader_that_stays_does_not_hold_up_the_end_of_a_run(tmp_path: Path) -> None:
    """Each attempt to put the database to rest waited half a minute for a page that was left open."""
    folder = make_run(tmp_path / "run", rounds=2, clients=5, seeds=(0,), rules=("fedavg",))
    store = Store(folder)
    reader = sqlite3.connect(folder / "run.sqlite")
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM rounds").fetchone()
    store.note(status="stopped")
    begun = time.monotonic()
    store.close()
    assert time.monotonic() - begun < 25
    reader.close()
    assert History(folder).info["status"] == "stopped"
