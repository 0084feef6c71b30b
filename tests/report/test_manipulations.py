"""A table of manipulations of finished runs, by three kinds of people, and what each look at the folder says of them.

careless: edits, and computes nothing again. forger: computes checksums, chain and closing record again, and strips the
signatures that no longer hold; he has no key. server: does the same, and signs with its own key.

Looks: V `verify`, H `verify --head` with the final hash that was kept elsewhere, K `verify --keys`, R what `resume`
goes on from, T `table` and `report`, D the verdict of `record`. The table names the looks that do NOT find a
manipulation; for each kind of person docs/reference/verifying.md has the sentence that allows it.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.contributions.test_replaying import experiment
from tests.experiment.test_private_runs import described
from tests.runs.contents import chain_again, change_fact, query
from tests.runs.signed_runs import signed_run

from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.experiment.resuming import changed_experiment
from steelyard.experiment.running import run
from steelyard.proof.signing import SigningKey
from steelyard.report.record import record
from steelyard.report.verification import verify
from steelyard.runs.facts import checksum
from steelyard.runs.history import History
from steelyard.runs.store import Store

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "verifying.md"
FOUND = ""
LAST_FILE = "checkpoints/round-000003.safetensors"
UNSIGNED = "key = NULL, signature = NULL"
FORGED, SERVED = "VTDR", "VTDRK"
"""What nobody can find without the final hash (server), and without that or trusted keys (forger)."""
UNDONE = "VHKRTD"
"""Who computes again what was changed has the run as it was."""
SENTENCES = {
    "careless": "The cost of a round (seconds, bytes), who writes the run, withdrawals and trackers are not covered.",
    "forger": "Whoever computes the chain and the closing record again passes every look but `--head` and `--keys`.",
    "server": "Whoever has the server's key passes every look but `--head`, as far as no node signed what was changed.",
}


class Case(NamedTuple):
    """SQL to run or a function of the folder, and the looks that do not find it, by who did it."""

    edit: str | Callable[[Path], object]
    careless: str = FOUND
    forger: str = FORGED
    server: str = SERVED


def swapped(table: str, column: str) -> str:
    """Give a the number of b and b that of a, in round 2."""
    value = f"CAST(substr({column}, length({column}) / 2 + 1) || substr({column}, 1, length({column}) / 2) AS BLOB)"
    return f"UPDATE {table} SET {column} = {value} WHERE round = 2"


def fact(name: str, value: str) -> str:
    return f"INSERT OR REPLACE INTO info VALUES ('{name}', '{value}')"


def of_round(column: str, value: str) -> str:
    return f"UPDATE rounds SET {column} = {value} WHERE round = 2"


def file(name: str, change: Callable[[bytes], bytes] | None) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / name
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(path.read_bytes()))

    return edit


def copied_round(to: int, *, chained: bool) -> Callable[[Path], None]:
    """A round that never was, with 99.9 %, after the last one."""

    def edit(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "run.sqlite")) as db, db:
            for table in ("rounds", "updates", "evaluations", "digests", *(("chain",) if chained else ())):
                db.execute(f"CREATE TEMP TABLE copy AS SELECT * FROM {table} WHERE round = 3")
                db.execute(f"UPDATE copy SET round = {to}")
                db.execute(f"INSERT INTO {table} SELECT * FROM copy")
                db.execute("DROP TABLE copy")
            db.execute(f"UPDATE rounds SET accuracy = 0.999 WHERE round = {to}")

    return edit


def without(text: str) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(text.encode(), b"")


NAMES = ("status", "stopped", "notes", "engine_notes", "measure", "measured_by", "trust", "report_rows", "rounds")
VALUES = ("", "none", "none", "none", "f1", "{}", "{}", "{}", "3")
STATES = "UPDATE checkpoints SET states = replace(states, '0.5', '0.75')"
LAST = "WHERE round = (SELECT MAX(round) FROM chain)"
CASES: dict[str, Case] = {
    **{f"fact {name}": Case(fact(name, value)) for name, value in zip(NAMES, VALUES, strict=True)},
    "accuracy": Case(of_round("accuracy", "0.99")),
    "every accuracy": Case("UPDATE rounds SET accuracy = 0.99"),
    "server accuracy": Case(of_round("server_accuracy", "0.99")),
    "server metrics": Case(of_round("server_metrics", "'{\"mae\": 0.1}'")),
    "epsilon of a round": Case(of_round("epsilon", "0.05")),
    "order": Case(of_round("priority", "'LD>DS'"), forger="TR", server="TR"),
    "orders tried": Case(of_round("tried", "'[]'")),
    "tests": Case(of_round("tests", "7")),
    "cohort": Case(of_round("cohort", "9")),
    "answered": Case(of_round("answered", "9")),
    "kept old": Case(of_round("kept_old", "1")),
    "loss": Case(of_round("loss", "'{}'")),
    "simulated time": Case(of_round("simulated", "0.5")),
    "cost": Case("UPDATE rounds SET seconds = 0.001", careless="VHKRTD", server="VHKRTD"),
    "writer": Case(fact("writer", "{}"), careless="VHKRTD", server="VHKRTD"),
    "withdrawals": Case(fact("withdrawals", "[]"), careless="VHKRTD", server="VHKRTD"),
    "where it is tracked": Case(fact("tracked_as", "{}"), careless="VHKRTD", server="VHKRTD"),
    "weights": Case(swapped("updates", "weight"), forger="TR", server="TR"),
    "scores": Case(swapped("updates", "score")),
    "criteria": Case(swapped("updates", "raw"), forger="TR", server="TR"),
    "normalised criteria": Case(swapped("updates", "normalised")),
    "samples": Case(swapped("updates", "samples")),
    "local losses": Case(swapped("updates", "loss")),
    "who sent": Case(swapped("updates", "clients"), server="T"),
    "scores of clients": Case(swapped("evaluations", "score")),
    "tested samples": Case(swapped("evaluations", "samples")),
    "figures of clients": Case(swapped("evaluations", "figures")),
    "right and wrong": Case("UPDATE samples SET hits = X'F0'"),
    "an end": Case("INSERT INTO ended VALUES (1, 3, 'exploded')"),
    "a reason": Case("UPDATE failures SET reason = 'late' WHERE round = 2"),
    "a failure": Case("DELETE FROM failures WHERE round = 2"),
    "an untested client": Case("DELETE FROM untested WHERE round = 2"),
    "what a client added": Case("UPDATE contributions SET after = 0.99 WHERE round = 2"),
    "digest of a model": Case("UPDATE digests SET model = upper(model) WHERE round = 2"),
    "digest of the last model": Case(f"UPDATE digests SET model = upper(model) {LAST}", forger="T", server="T"),
    "task": Case("UPDATE digests SET task = upper(task) WHERE round = 2", server="T"),
    "digests of updates": Case(swapped("digests", "updates"), server="T"),
    "salts": Case(swapped("digests", "salts")),
    "seed": Case("UPDATE federations SET seed = 5"),
    "name of the rule": Case("UPDATE federations SET rule = 'LD'"),
    "settings of the rule": Case(
        "UPDATE federations SET settings = replace(settings, 'LD', 'MD')", forger="TR", server="TR"
    ),
    "algorithm": Case("UPDATE federations SET algorithm = 'fedadam'"),
    "name of a client": Case("UPDATE clients SET name = 'z' WHERE name = 'a'", server="T"),
    "states of a checkpoint": Case(STATES),
    "head of a checkpoint": Case("UPDATE checkpoints SET head = upper(head)", server=UNDONE),
    "size of a checkpoint": Case("UPDATE checkpoints SET size = size + 1", server=UNDONE),
    "bytes of a checkpoint": Case(file(LAST_FILE, lambda content: content[:-1] + b"\1"), "", "T", "T"),
    "a longer checkpoint": Case(file(LAST_FILE, lambda content: content + b"\0"), "", "T", "T"),
    "no checkpoint": Case("DELETE FROM checkpoints", forger="", server=""),
    "no file of a checkpoint": Case(file(LAST_FILE, None), "", "", ""),
    "a round that never was": Case(copied_round(4, chained=False), forger="", server=""),
    "one on top of the chain": Case(copied_round(4, chained=True), forger="", server=""),
    "a round far away": Case(copied_round(900, chained=False), forger="", server=""),
    "a round of no number": Case("UPDATE rounds SET round = 'x' WHERE round = 3", forger="", server=""),
    "a round between": Case("UPDATE rounds SET round = 2.5 WHERE round = 3", forger="", server=""),
    "a round before the first": Case("UPDATE rounds SET round = -7 WHERE round = 3", forger="", server=""),
    "rows of no rule": Case("UPDATE failures SET federation = 99 WHERE round = 2", forger="", server=""),
    "a gap": Case("DELETE FROM rounds WHERE round = 2", forger="TV", server="KTV"),
    "no link": Case("DELETE FROM chain WHERE round = 2", forger="", server=""),
    "no chain": Case("DELETE FROM chain", forger="", server=""),
    "no closing record": Case("DELETE FROM closing", server=UNDONE),
    "another hash": Case("UPDATE closing SET hash = upper(hash)", server=UNDONE),
    "two closing records": Case("INSERT INTO closing SELECT 1, hash, key, signature FROM closing", server=UNDONE),
    "no signature of a head": Case(f"UPDATE chain SET {UNSIGNED} WHERE round = 2", "VHTDR", server=UNDONE),
    "no signature of any head": Case(f"UPDATE chain SET {UNSIGNED}", "VHTDR", server=UNDONE),
    "no signature of the end": Case(f"UPDATE closing SET {UNSIGNED}", "VHTDR", server=UNDONE),
    "a signature of a head": Case("UPDATE chain SET signature = zeroblob(96) WHERE round = 1", "T", server=UNDONE),
    "no statement of a node": Case("DELETE FROM signatures WHERE round = 2", server="VTDR"),
    "no statements": Case("DELETE FROM signatures", server="VTDR"),
    "no statements of one": Case("DELETE FROM signatures WHERE before IS NULL AND round > 1", server="VTDR"),
    "a signature of a node": Case("UPDATE signatures SET signature = zeroblob(96) WHERE round = 2", "T", server="T"),
    "a statement before": Case("UPDATE signatures SET before = NULL WHERE round = 2", server="T"),
    "no keys": Case("DELETE FROM keys", "T", server="T"),
    "another key": Case("UPDATE keys SET line = (SELECT line FROM keys ORDER BY key DESC LIMIT 1)", "T", server="T"),
    "the experiment": Case(file("experiment.toml", without('source = "digits"\n')), "T", "T", "T"),
}
KINDS = ("careless", "forger", "server")
LOOKS = "VHKRTD"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return signed_run(folder / "run", folder / "keys")


def refused(look: Callable[[], object]) -> bool:
    """Whether a look finds something: it says so, or ends in an error of one line, as `resume` does."""
    try:
        return bool(look())
    except UserError as error:
        return "\n" not in str(error)


def goes_on(folder: Path) -> None:
    changed_experiment(folder, History(folder).facts, accept=False)
    with closing(Store(folder)) as store:
        store.resume()


def look_at(folder: Path, keys: Path, kept: str) -> str:
    """Return the looks that find nothing. `resume` comes last: it may forget what it goes on without."""
    seen: dict[str, Callable[[], object]] = {
        "V": lambda: verify(folder).code,
        "H": lambda: verify(folder, head=kept).code,
        "K": lambda: verify(folder, keys).code,
        "T": lambda: History(folder).chain.problem,
        "D": lambda: record(folder)["verified"]["verdict"] != "whole",
        "R": lambda: goes_on(folder),
    }
    return "".join(name for name in LOOKS if not refused(seen[name]))


def edited(folder: Path, edit: str | Callable[[Path], object]) -> None:
    if callable(edit):
        edit(folder)
        return
    with closing(sqlite3.connect(folder / "run.sqlite")) as db, db:
        assert db.execute(edit).rowcount > 0


def covered_up(folder: Path, key: SigningKey | None) -> None:
    """Compute checksums, heads and the closing record again; without a key, strip what would not hold any more."""
    with closing(sqlite3.connect(folder / "run.sqlite")) as db, db:
        for round, name, states in db.execute("SELECT round, file, states FROM checkpoints").fetchall():
            path = folder / "checkpoints" / name
            if path.is_file():
                content = path.read_bytes()
                row = (len(content), checksum(content, states), round)
                db.execute("UPDATE checkpoints SET size = ?, checksum = ? WHERE round = ?", row)
        if key is None:
            for table in ("chain", "closing"):
                db.execute(f"UPDATE {table} SET {UNSIGNED}")
            db.execute("DELETE FROM signatures")
            db.execute("DELETE FROM keys")
    if query(folder, "SELECT 1 FROM chain WHERE head IS NOT NULL"):
        chain_again(folder, key)


def every_case() -> Iterator[Any]:
    """Every second case by one kind of person in the default suite, in turn; all by all three where slow tests run."""
    for number, what in enumerate(CASES):
        for at, kind in enumerate(KINDS):
            slow = () if number % (2 * len(KINDS)) == 2 * at else pytest.mark.slow
            yield pytest.param(what, kind, marks=slow, id=f"{what}-{kind}")


@pytest.mark.parametrize(("what", "kind"), list(every_case()))
def test_what_each_look_finds(whole: Path, tmp_path: Path, what: str, kind: str) -> None:
    folder, keys = Path(shutil.copytree(whole, tmp_path / "run")), whole.parent / "keys"
    kept = History(whole).chain.closing
    edited(folder, CASES[what].edit)
    if kind != "careless":
        covered_up(folder, SigningKey.read(keys / "server") if kind == "server" else None)
    missed = look_at(folder, keys, kept)
    assert sorted(missed) == sorted(getattr(CASES[what], kind)), f"{kind}: {what}"
    assert not missed or SENTENCES[kind] in PAGE.read_text()


def changes(folder: Path) -> list[str]:
    return [finding.line() for finding in verify(folder).found.changed]


def test_what_was_promised_is_added_up_again_from_the_ledger(tmp_path: Path) -> None:
    folder = run(described(), out=tmp_path / "run")
    assert (changes(folder), "ε" in verify(folder).found.checked) == ([], True)
    promise = json.loads(History(folder).info["privacy"])
    (name,) = promise["epsilon"]
    for field, value in (("epsilon", {name: 0.05}), ("together", 0.05), ("delta", 0.01)):
        change_fact(folder, "privacy", json.dumps({**promise, field: value}))
        assert any(line.startswith("ε ") for line in changes(folder)), field
        assert record(folder)["verified"]["verdict"] == "CHANGED"
    change_fact(folder, "privacy", json.dumps(promise))
    (folder / files.LEDGER).unlink()
    assert any("privacy.jsonl is gone" in line for line in changes(folder))


def test_kept_updates_that_are_gone_are_missed(tmp_path: Path) -> None:
    folder = run(experiment(store={"keep": "updates"}), out=tmp_path / "run")
    assert changes(folder) == []
    shutil.rmtree(folder / files.UPDATES)
    assert {finding.round for finding in verify(folder).found.changed} == {0, 1, 2, 3}


def test_an_older_copy_is_shown_by_the_final_hash_alone(whole: Path, tmp_path: Path) -> None:
    """A genuine copy of the folder from before is whole; who kept the hash of the later one sees that it is older."""
    older = signed_run(tmp_path / "older", tmp_path / "keys", rounds=2)
    assert verify(older, tmp_path / "keys").code == 0
    found = verify(older, head=History(whole).chain.closing)
    assert found.code == 1
    assert "A folder that is replaced by an older genuine copy" in PAGE.read_text()


def test_a_run_that_goes_on_is_held_to_the_head_of_a_round(whole: Path) -> None:
    heads = dict(query(whole, "SELECT round, head FROM chain"))
    for round, head in heads.items():
        found = verify(whole, prefix=head)
        assert (found.code, found.found.checked["--prefix"].startswith(f"rounds 0 to {round}")) == (0, True)
    assert [verify(whole, head=heads[round]).code for round in (2, 3)] == [1, 1]  # a head is not the end


def test_rounds_after_the_end_that_was_kept_are_found_in_a_run_that_stopped(whole: Path, tmp_path: Path) -> None:
    """Rounds may follow the last checkpoint of a run that did not finish; the record does not show them."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    change_fact(folder, "status", "stopped")
    kept, before = History(folder).chain.closing, record(folder)
    copied_round(4, chained=False)(folder)
    assert verify(folder).found.checked["rounds after the last checkpoint"].startswith("up to 4,")
    assert verify(folder, head=kept).code == 1
    after = record(folder)
    assert (after["rounds"], after["result"]) == (before["rounds"], before["result"]) == (3, before["result"])


def test_the_table_is_large_enough() -> None:
    assert len(CASES) * len(KINDS) >= 120
