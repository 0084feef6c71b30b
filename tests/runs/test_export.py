"""A run's tables as files: the numbers of the database, in forms that any tool reads."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import assert_refused
from tests.runs.records import add, begun, record

from steelyard.base.errors import UserError, printable
from steelyard.runs.export import csv_lines, export_run, no_formula
from steelyard.runs.history import History


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run that still goes on: its writer holds it."""
    store = begun(tmp_path / "run")
    add(store, record(accuracy=1 / 3))
    yield tmp_path / "run"
    store.close()


def test_parquet_files_hold_the_same_tables(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    history = History(run)
    for path in export_run(History(run), "parquet"):
        found, expected = pd.read_parquet(path), getattr(history, path.stem)
        assert parquet.read_schema(path).names == list(found.columns) == list(expected.columns)
        rows = [frame.astype(object).where(frame.notna(), None).to_numpy().tolist() for frame in (found, expected)]
        assert rows[0] == rows[1]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs pyarrow: pip install 'steelyard\[parquet\]'; allowed: csv, json"):
        export_run(History(run), "parquet", force=True)


ODD = st.text(st.sampled_from('a,"\n\r ü;'), max_size=6)


@given(
    st.lists(st.tuples(st.floats() | st.just(0.1), st.integers(-(2**63), 2**63 - 1), st.none() | ODD), max_size=9),
    st.lists(ODD, min_size=3, max_size=3, unique=True),
)
def test_any_table_is_read_back_from_csv_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, int, str | None]], names: list[str]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    kinds = (np.float64, np.int64, object)
    frame = pd.DataFrame({k: pd.Series(v, dtype=t) for k, v, t in zip(names, columns, kinds, strict=True)})
    path.write_bytes(b"".join(csv_lines(frame)))
    with path.open(encoding="utf-8", newline="") as file:
        found = list(csv.reader(file))
    assert found[0] == [printable(no_formula(name)) for name in names]
    for (number, whole, text), row in zip(rows, found[1:], strict=True):
        assert (float(row[0]) == number) if math.isfinite(number) else row[0] == ""
        assert row[1:] == [str(whole), printable(no_formula(text or ""))]


def test_files_are_written_again_only_where_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    written = export_run(History(run), "csv")
    tables = ("federations", "rounds", "clients", "evaluations", "untested", "listening")
    assert written == [run / "export" / f"{name}.csv" for name in tables]
    written[0].write_text("edited")
    assert_refused(
        partial(export_run, History(run), "csv"), "federations.csv: exists already", "another --out, or --force"
    )
    assert written[0].read_text() == "edited"
    assert export_run(History(run), "csv", force=True) == written
    (run / "export" / "clients.csv.part").touch()  # As an export leaves it that is killed at its end.
    assert export_run(History(run), "csv") == written
    assert not [path for path in (run / "export").iterdir() if path.suffix == ".part"]
    assert written[0].read_text() != "edited"
    (row,) = json.loads(export_run(History(run), "json", tmp_path / "out")[1].read_text())
    assert row["accuracy"] == 0.333333333333333  # 15 digits
    (tmp_path / "file").write_text("")
    words = ("--out: ", "file/x cannot be made: Not a directory", "a writable folder")
    assert_refused(partial(export_run, History(run), "csv", tmp_path / "file" / "x"), *words)


def test_only_what_needs_quotes_or_marks_has_them() -> None:
    frame = pd.DataFrame({"X": ["X", "a,b", 'say "x"', None, "\x1b[2J\x9b31m\u202ea"]})
    expected = ["X", "X", '"a,b"', '"say ""x"""', "", "\\x1b[2J\\x9b31m\\u202ea"]
    assert b"".join(csv_lines(frame)).decode().splitlines() == expected
    assert [no_formula(text) for text in ("a=b", "", "ü-1", " a", "1-2")] == ["a=b", "", "ü-1", " a", "1-2"]
