"""What a database may cost whoever reads it: steps and bytes by its size, by hand, and files that are plain ones."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steelyard import files
from steelyard.errors import UserError
from steelyard.runs.checks import bound, check_files, size_of_database, unbound


class Noted(sqlite3.Connection):
    """A connection that keeps what is called back."""

    begin: Callable[[str], None] | None
    step: Callable[[], int] | None
    every: int

    def set_trace_callback(self, called: Any) -> None:
        self.begin = called
        super().set_trace_callback(called)

    def set_progress_handler(self, called: Any, every: int) -> None:
        self.step, self.every = called, every
        super().set_progress_handler(called, every)


def test_a_question_has_fifty_steps_for_each_byte_of_the_database_and_the_next_one_as_many() -> None:
    connection = sqlite3.connect(":memory:", factory=Noted)
    bound(connection, 1 << 20)
    assert connection.every == 10_000
    assert connection.step is not None
    assert connection.begin is not None
    connection.begin("SELECT 1")
    # 50 · 2^20 steps are 5,242 times 10,000 and some.
    assert [connection.step() for _ in range(5244)] == [0] * 5242 + [1, 1]
    connection.execute("SELECT 1").fetchall()
    assert connection.step() == 0
    assert connection.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) == 1 << 20
    assert connection.execute("PRAGMA trusted_schema").fetchone() == (0,)
    assert connection.execute("PRAGMA cell_size_check").fetchone() == (1,)
    bound(connection, 1 << 40)
    assert connection.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) == 1_000_000_000
    unbound(connection)
    assert (connection.begin, connection.step) == (None, None)
    connection.close()


def test_a_question_is_bounded_before_the_first_is_asked() -> None:
    connection = sqlite3.connect(":memory:", factory=Noted)
    connection.execute("CREATE TABLE t (x)")
    bound(connection, 400)  # two times 10,000 steps
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        connection.execute(endless).fetchall()
    with pytest.raises(sqlite3.DataError, match="too big"):
        connection.execute("INSERT INTO t VALUES (zeroblob(401))")
    unbound(connection)
    connection.execute("INSERT INTO t VALUES (zeroblob(401))")
    connection.close()


def test_a_database_has_the_bytes_of_its_files_and_small_ones_have_a_megabyte(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    assert size_of_database(path) == 1 << 20
    path.write_bytes(bytes(1_000_000))
    assert size_of_database(path) == 1 << 20
    (tmp_path / "run.sqlite-wal").write_bytes(bytes(50_000))
    (tmp_path / "run.sqlite-journal").write_bytes(bytes(3))
    assert size_of_database(path) == 1_050_003


def test_a_journal_names_no_other_file(tmp_path: Path) -> None:
    path, journal = tmp_path / "run.sqlite", tmp_path / "run.sqlite-journal"
    assert not check_files(path, write=True)
    path.touch()
    journal.write_bytes(b"\0" * 20)
    assert check_files(path, write=True)
    journal.write_bytes(b"\0" * 20 + bytes.fromhex("d9d505f920a163d7"))
    with pytest.raises(UserError) as found:
        check_files(path, write=False)
    assert str(found.value) == f"{journal}: names another file; allowed: the file as the run wrote it"


def test_a_journal_may_vanish_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, journal = tmp_path / "run.sqlite", tmp_path / "run.sqlite-journal"
    path.touch()
    journal.write_bytes(b"\0" * 20)
    read = files.read_bytes

    def vanish(path: Path) -> bytes:
        path.unlink()
        return read(path)

    monkeypatch.setattr(files, "read_bytes", vanish)
    assert check_files(path, write=False)
    assert not journal.exists()


def test_a_database_that_is_written_has_one_name_and_one_that_is_read_may_have_two(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    path.touch()
    (tmp_path / "second").hardlink_to(path)
    assert check_files(path, write=False)
    with pytest.raises(UserError, match="has 2 names"):
        check_files(path, write=True)
