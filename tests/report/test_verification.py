"""A run is checked from its folder alone: every cell that is changed is named, in its round and by its client."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kit import assert_refused
from tests.runs.contents import chain_again, change, change_fact, query
from tests.runs.records import add, begun, record, values
from tests.runs.signed_runs import TEXT, a_key, signed_run

from steelyard.base.errors import UserError
from steelyard.report.verification import Verification, verify
from steelyard.runs.schema import SCHEMA
from steelyard.runs.store import add_values

COSTS = {("rounds", column) for column in ("seconds", "cpu", "gpu", "up", "down")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return signed_run(folder / "run", folder / "keys")


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def lines(found: Verification) -> str:
    return "\n".join(finding.line() for finding in (*found.found.changed, *found.found.unchecked))


def test_a_run_as_it_was_written_is_whole_with_and_without_trusted_keys(whole: Path) -> None:
    for keys in (None, whole.parent / "keys"):
        found = verify(whole, keys)
        assert (found.code, found.verdict, lines(found)) == (0, "intact", "")
        assert found.found.checked["signatures"].startswith("6 of nodes, 5 of the server")
        assert found.found.checked["weights"].startswith("3 rounds computed again")
    assert verify(whole, head=found.closing.upper()).code == 0
    assert verify(whole, prefix=query(whole, "SELECT head FROM chain WHERE round = 1")[0][0]).code == 0
    for wrong in ("", "zz", "0"):
        assert_refused(partial(verify, whole, head=wrong), "--head", "64 hexadecimal digits")
        assert_refused(partial(verify, whole, prefix=wrong), "--prefix", "64 hexadecimal digits")
    assert [verify(whole, head="0" * 64).code, verify(whole, prefix="0" * 64).code] == [1, 1]


# ---------------------------------------------------------------- every cell


def cells() -> list[tuple[str, str]]:
    model = sqlite3.connect(":memory:")
    model.executescript(SCHEMA)
    tables = [row[0] for row in model.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return [(table, row[1]) for table in tables for row in model.execute(f"PRAGMA table_info({table})")]


CHAINED = [cell for cell in cells() if cell not in COSTS]
"""All but what rounds cost: docs/reference/chain.md says so."""


def other(value: object) -> object:
    """Another value of the same kind and length."""
    if isinstance(value, bytes):
        return value[:-1] + bytes([value[-1] ^ 1])
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    return 0.25 if value is None else value + 1  # type: ignore[operator]


@pytest.mark.parametrize(("table", "column"), CHAINED)
def test_a_change_of_any_cell_is_found(run: Path, table: str, column: str) -> None:
    rows = query(run, f"SELECT {column} FROM {table}")
    if not rows:
        assert table == "ended"
        change(run, "INSERT INTO ended VALUES (1, 3, 'exploded')")
    else:
        connection = sqlite3.connect(run / "run.sqlite")
        with connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            (value,) = rows[-1]
            last = f"(SELECT MAX(round) FROM {table})"
            where = f"WHERE round = {last}" if (table, "round") in cells() else f"WHERE {column} IS ?"
            values = (other(value),) if "round" in where else (other(value), value)
            connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ? {where}", values)
            assert connection.total_changes
        connection.close()
    found = problem(run)
    assert found, f"{table}.{column}"
    assert "\n" not in found


def problem(folder: Path) -> str:
    """What is found first, also where the database can no longer be read at all."""
    try:
        found = verify(folder)
    except UserError as error:
        return str(error)
    return found.found.changed[0].line() if found.code == 1 else ""


COLUMNS = ("samples", "bytes", "loss", "score", "weight", "raw", "normalised")


@given(
    column=st.sampled_from(COLUMNS), round=st.integers(1, 3), client=st.sampled_from("ab"),
    at=st.integers(0, 7), bit=st.integers(0, 7),
)  # fmt: skip
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_bit_is_named_by_round_and_client(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, column: str, round: int, client: str, at: int, bit: int
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path_factory.mktemp("bit") / "run"))
    ((blob,),) = query(folder, f"SELECT {column} FROM updates WHERE round = {round}")
    each = len(blob) // 2
    changed = bytearray(blob)
    changed["ab".index(client) * each + at] ^= 1 << bit
    change(folder, f"UPDATE updates SET {column} = ? WHERE round = ?", bytes(changed), round)
    found = verify(folder)
    assert found.code == 1
    assert {(finding.round, finding.client) for finding in found.found.changed} == {(round, client)}


def test_values_found_out_after_the_run_leave_it_whole_and_are_said_not_to_be_checked(run: Path) -> None:
    assert "contributions" not in verify(run).found.checked
    assert not add_values(run, {("DS>LD", 2): [values(2)]}, "replay")
    found = verify(run)
    assert (found.code, found.found.checked["contributions"]) == (
        0,
        "rows found out after the run: 1; not in the chain, not checked",
    )


def test_a_changed_byte_of_each_checkpoint_that_a_run_keeps_is_named_by_its_round(tmp_path: Path) -> None:
    store = begun(tmp_path / "run")
    store.resume()
    for round in range(3):
        add(store, record(round=round))
    store.close()
    (tmp_path / "run" / "experiment.toml").write_text(TEXT)
    assert verify(tmp_path / "run").found.checked["models"].startswith("of the checkpoints after round 1 and 2,")
    for named, file in enumerate(sorted((tmp_path / "run" / "checkpoints").iterdir()), 1):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found = verify(tmp_path / "run")
        assert (found.code, [finding.round for finding in found.found.changed]) == (1, [named])
        file.write_bytes(content)


def test_a_changed_experiment_file_is_named(run: Path) -> None:
    change_fact(run, "experiment_text", TEXT)
    assert verify(run).code == 0
    for old, new, words in (
        ('"digits"', '"mnist"', "data.source: 'digits' when the run began, 'mnist' now"),
        ("[data]", "[data", "not valid TOML"),
    ):
        (run / "experiment.toml").write_text(TEXT.replace(old, new))
        found = verify(run)
        assert (found.code, words in lines(found)) == (1, True), lines(found)


# ---------------------------------------------------------------- what cannot be checked, each one line


def foreign(keys: Path) -> None:
    a_key(keys / "stranger")
    (keys / "stranger").unlink()
    for name in ("a.pub", "b.pub"):
        (keys / name).unlink()


UNCHECKED: dict[str, tuple[Callable[[Path], object], str]] = {
    "foreign keys": (foreign, "round 1, client a: its node's signature, here and later: signed by SHA256:"),
    "no key of the server": (lambda keys: (keys / "server.pub").unlink(), "the server's signature of the head"),
    "a client's own key is another's": (
        lambda keys: (keys / "a.pub").write_bytes((keys / "b.pub").read_bytes()), "not by a.pub",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNCHECKED)
def test_keys_that_do_not_fit_are_named(whole: Path, tmp_path: Path, what: str) -> None:
    keys = Path(shutil.copytree(whole.parent / "keys", tmp_path / "keys"))
    made, words = UNCHECKED[what]
    made(keys)
    found = verify(whole, keys)
    assert (found.code, words in lines(found)) == (2, True), lines(found)


def named(found: Verification) -> set[tuple[int | None, str | None]]:
    return {(finding.round, finding.client) for finding in found.found.changed}


# ---------------------------------------------------------------- signatures that stand for others


UNSIGNED = "UPDATE chain SET key = NULL, signature = NULL"
AGAIN: dict[str, tuple[tuple[str, ...], set[tuple[int, str | None]], tuple[str, ...]]] = {
    "weights": (
        ("UPDATE updates SET weight = CAST(substr(weight, 9) || substr(weight, 1, 8) AS BLOB) WHERE round = 2",),
        {(2, "a"), (2, "b"), (2, None), (3, None)},
        (
            "round 2, client a: weight 0.25 under DS>LD, where criteria and rule give 0.75",
            "round 2: the server's signature of the head does not hold",
        ),
    ),
    # A statement that another one leads to: its own signature is not the last.
    "a digest of a": (
        ("UPDATE digests SET updates = CAST(zeroblob(32) || substr(updates, 33) AS BLOB) WHERE round = 2", UNSIGNED),
        {(2, "a")},
        (),
    ),
    # Those before the ones that do not hold are still known to be their nodes' own.
    "signatures from round 2 on": (
        ("UPDATE signatures SET signature = zeroblob(96) WHERE round >= 2", UNSIGNED),
        {(round, client) for round in (2, 3) for client in "ab"},
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", AGAIN)
def test_who_computes_the_chain_again_is_named_by_signatures_and_by_the_rule(run: Path, what: str) -> None:
    statements, expected, words = AGAIN[what]
    for statement in statements:
        change(run, statement)
    chain_again(run)
    found = verify(run)
    assert (found.code, named(found)) == (1, expected)
    assert [each for each in words if each not in lines(found)] == []


def test_keys_and_runs_that_cannot_be_read_are_one_line(run: Path, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.pub").write_text("no key")
    for name, words in (("missing", "is no folder"), ("none", "no .pub file in"), ("bad", "not a public key")):
        assert_refused(partial(verify, whole, tmp_path / name), words)
    change(run, "UPDATE info SET value = '5' WHERE key = 'schema'")
    assert_refused(partial(verify, run), "schema 5; this version reads schema")
