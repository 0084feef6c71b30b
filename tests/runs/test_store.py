"""Setting up, opening and writing a run: what stands in the tables, what a resume forgets, who may write."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.kit import assert_refused, named
from tests.runs import contents
from tests.runs.contents import query
from tests.runs.records import RAW, begun, evaluations, federation, record, state, updates
from tests.runs.signed_runs import a_key

from steelyard.base.errors import UserError
from steelyard.messages.updates import Failure
from steelyard.rounds.state import RoundRecord
from steelyard.runs.database import connect, exists
from steelyard.runs.facts import RunFacts
from steelyard.runs.history import History
from steelyard.runs.joining import discard, join_rounds, set_up
from steelyard.runs.store import Store
from steelyard.weighing.order import OrderState
from steelyard.weighing.rule import Rule, WeighingSettings

FILES = {"experiment.toml": "name = 'x'\n"}


def made(folder: Path) -> None:
    set_up(folder, FILES, RunFacts(seeds=[1, 2], status="running"), [federation("a#1", 1), federation("a#2", 2)])


@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
def test_a_set_up_that_fails_at_any_step_leaves_no_run_and_the_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("of the user")
    real = {"os.fsync": os.fsync, "os.replace": os.replace}[step]
    failed = 0
    for broken in range(1, 20):
        count = 0

        def fail(*arguments: object, at: int = broken, **options: object) -> object:
            nonlocal count
            count += 1
            if count == at:
                raise OSError(28, "No space left on device")
            return real(*arguments, **options)  # type: ignore[operator]

        with monkeypatch.context() as patch:
            patch.setattr(step, fail)
            said = ""
            try:
                made(tmp_path / "run")
            except UserError as error:
                said = str(error)
        if count < broken:
            break
        assert "cannot be written: No space left on device" in said
        failed += 1
        if exists(tmp_path / "run"):
            # The last flush failed after the rename: the run is whole.
            assert History(tmp_path / "run").info["seeds"] == "[1, 2]"
            discard(tmp_path / "run", FILES)
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]
    assert failed >= 2
    assert exists(tmp_path / "run")


def test_what_a_killed_set_up_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".setup" / "checkpoints").mkdir(parents=True)
    (tmp_path / ".setup" / "run.sqlite").write_text("half a database")
    (tmp_path / "experiment.toml").write_text("")
    (tmp_path / "run.sqlite-wal").write_text("of another database")
    assert not exists(tmp_path)
    assert_refused(lambda: History(tmp_path), "not a run folder")
    made(tmp_path)
    assert exists(tmp_path)
    assert History(tmp_path).info["seeds"] == "[1, 2]"
    assert not (tmp_path / ".setup").exists()
    assert not (tmp_path / "run.sqlite-wal").exists()


def test_a_draft_that_cannot_be_removed_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.rmdir", refuse)
    made(tmp_path)
    assert exists(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "file" / "run"
    folder.parent.write_text("")
    for make in (made, Store):
        assert_refused(
            lambda make=make: make(folder), folder, "cannot be written: Not a directory", "a writable folder"
        )


TABLES = ("rounds", "updates", "failures", "evaluations", "samples")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "run", checkpoint_every=3)
    opened.register([federation()])
    yield opened
    opened.close()


def commit(store: Store, *records: RoundRecord, last: bool = False, parameters: tuple[float, ...] = (1.0, 2.0)) -> None:
    round = records[0].round
    states = {one.federation: state(round, *parameters) for one in records}
    store.commit(round, records, states, dict, last=last)


def written_with(store: Store, work: Callable[[], object], change: str) -> list[str]:
    """Return how SQLite was told to wait for the disk when each statement of a kind was carried out."""
    seen: list[str] = []
    store._db.set_trace_callback(seen.append)
    work()
    store._db.set_trace_callback(None)
    found: list[str] = []
    waits = ""
    for statement in seen:
        if statement.startswith("PRAGMA synchronous="):
            waits = statement.partition("=")[2]
        found += [waits] if statement.startswith(change) else []
    return found


def test_a_round_with_a_checkpoint_is_on_the_disk_before_it_counts(store: Store) -> None:
    """A checkpoint's file is durable, and so must the rows be that name it; a round without one may be repeated."""
    rows = "INSERT OR REPLACE INTO rounds"
    made = {round: written_with(store, partial(commit, store, record(round=round)), rows) for round in (1, 2, 3, 4)}
    assert made == {1: ["NORMAL"], 2: ["NORMAL"], 3: ["FULL"], 4: ["NORMAL"]}
    assert written_with(store, partial(commit, store, record(round=5), last=True), rows) == ["FULL"]
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    commit(store, record(round=7))
    assert store._db.execute("PRAGMA synchronous").fetchone() == (1,)
    assert set(written_with(store, store.finish, "INSERT OR REPLACE INTO info")) == {"FULL"}


def test_code_of_a_rule_is_stored_by_what_it_says(tmp_path: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text("x = 1\n")
    store = begun(tmp_path / "run")
    store.register([federation("own", plugins=(str(code), "installed"))])
    store.close()
    settings = json.loads(query(store.folder, "SELECT settings FROM federations WHERE name = 'own'")[0][0])
    assert settings["plugins"] == [f"sha256:{hashlib.sha256(code.read_bytes()).hexdigest()}", "installed"]


def doubles(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


def test_a_round_stands_in_the_tables_number_by_number(store: Store) -> None:
    test = {"server_accuracy": 0.5, "server_macro_f1": 0.25, "server_metrics": {"f1": [0.5, 0.0]}}
    commit(store, record(**test, tests=2, epsilon=1.5, bytes_each=2))
    (row,) = query(store.folder, "SELECT * FROM rounds")
    plain = json.dumps({"name": "auto", "class_weights": None, "shape": None, "scale": None})
    start = (1, 1, 0.625, "DS>LD", '[["DS>LD", 0.625]]', 2)
    metrics = '{"f1": [0.5, 0.0]}'
    cost = (None, None, 16.0, 6.0)
    assert row == (*start, 3, 2, 0, "[]", 0, plain, 0.5, 0.25, metrics, 0.125, None, 1.5, *cost)
    assert query(store.folder, "SELECT hex(clients), samples, bytes, score, weight, raw FROM updates") == [
        ("0100000002000000", struct.pack("<2q", 3, 1), None, doubles(1.125, 0.375), doubles(0.75, 0.25), RAW.tobytes())
    ]
    assert query(store.folder, "SELECT client, reason FROM failures") == [(3, "not registered")]
    assert query(store.folder, "SELECT hex(clients), score FROM evaluations") == [
        ("0100000004000000", doubles(0.5, 1.0))
    ]


def test_an_old_model_that_was_kept_gave_nobody_weight(store: Store) -> None:
    rule = Rule(WeighingSettings(criteria=("DS", "LD"), score="product"))
    nobody = {"kept_old": True, "evaluations": None, "accuracy": None, "order": ()}
    commit(store, record(weighing=rule.weigh(np.zeros((2, 2))), **nobody))
    ((kept, zero, uniform, accuracy, order),) = query(
        store.folder, "SELECT kept_old, zero_criteria, zero_scores, accuracy, priority FROM rounds"
    )
    assert (kept, json.loads(zero), uniform, accuracy, order) == (1, ["DS", "LD"], 0, None, None)
    assert query(store.folder, "SELECT weight FROM updates") == [(bytes(16),)]
    assert query(store.folder, "SELECT * FROM evaluations") == []


def test_the_end_of_a_federation_stands_in_the_round_after_its_last(store: Store) -> None:
    store.commit(4, [record(round=4)], {"DS>LD": state(4, ended="it exploded")}, dict, last=True)
    assert query(store.folder, "SELECT round, reason FROM ended") == [(5, "it exploded")]


def test_updates_without_weighing_and_with_bytes(store: Store) -> None:
    failures = (Failure("c", "too late"), Failure("c", "again"), Failure("b", "sent twice"))
    commit(store, record(weighing=None, updates=updates(bytes_sent=np.array([70, 80]), failures=failures)))
    bytes_sent = struct.pack("<2d", 70, 80)
    assert query(store.folder, "SELECT bytes, raw, normalised, score, weight FROM updates") == [
        (bytes_sent, *[None] * 4)
    ]
    # A client that is weighed all the same is no failure, and one that failed twice was asked once.
    assert query(store.folder, "SELECT reason FROM failures") == [("again",)]
    assert query(store.folder, "SELECT cohort, answered FROM rounds") == [(4, 2)]


def test_checkpoints_come_each_k_rounds_and_in_the_last_and_two_are_kept(store: Store) -> None:
    expected = {0: [0], 1: [0], 2: [0], 3: [0, 3], 4: [0, 3], 5: [3, 5]}
    (store.folder / "checkpoints" / "round-000009.safetensors.part").write_bytes(b"cut off")
    for round, kept in expected.items():
        commit(store, record(round=round), last=round == 5, parameters=(round, 7.0))
        files = [f"round-{number:06d}.safetensors" for number in kept]
        assert query(store.folder, "SELECT round, file FROM checkpoints") == list(zip(kept, files, strict=True))
        assert sorted(path.name for path in (store.folder / "checkpoints").iterdir()) == files
    assert store.resume().states["DS>LD"].parameters.tolist() == [5.0, 7.0]
    store.finish(RunFacts(others={"engine": "loop"}))
    assert [path.name for path in (store.folder / "checkpoints").iterdir()] == ["round-000005.safetensors"]
    assert dict(query(store.folder, "SELECT key, value FROM info"))["status"] == "finished"


def test_while_somebody_reads_no_checkpoint_is_removed_that_the_database_file_names(store: Store) -> None:
    commit(store, record(round=0))
    reader = connect(store.folder, write=False)
    reader.execute("BEGIN")
    assert reader.execute("SELECT COUNT(*) FROM rounds").fetchone() == (1,)
    for round in (3, 6, 9):
        commit(store, record(round=round))
    assert len(list((store.folder / "checkpoints").iterdir())) == 4
    reader.close()
    commit(store, record(round=12))
    assert len(list((store.folder / "checkpoints").iterdir())) == 2


def test_a_resume_forgets_what_came_after_the_checkpoint(store: Store) -> None:
    bits = np.array([True])
    orders = OrderState((1, 0), 0.75, 4, {"duels": {"0,1": 2.0}})
    for round in range(6):
        found = record(round=round, evaluations=evaluations(round=round, right=bits))
        store.commit(round, [found], {"DS>LD": state(round, orders=orders)}, dict, last=False)
    found = store.resume()
    assert (found.round, found.kept, found.problems) == (3, {}, ())
    assert found.loaded.file == "round-000003.safetensors"
    assert found.states["DS>LD"].round == 3
    assert found.states["DS>LD"].orders == orders
    for table in TABLES:
        assert query(store.folder, f"SELECT DISTINCT round FROM {table} ORDER BY round") == [(0,), (1,), (2,), (3,)]


def test_a_round_is_written_as_a_whole_or_not_at_all(store: Store) -> None:
    commit(store, record(round=0))
    with pytest.raises(KeyError):
        commit(store, record(round=3), record("stranger", round=3))
    assert query(store.folder, "SELECT MAX(round) FROM rounds") == [(0,)]
    # The new file is there, the row is not: the old checkpoint still holds.
    assert len(list((store.folder / "checkpoints").iterdir())) == 2
    assert store.resume().states["DS>LD"].round == 0


def test_a_set_up_run_has_its_files_facts_and_rules_one_writer_and_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    made(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "experiment.toml", "lock", "run.sqlite"]
    assert (folder / "experiment.toml").read_text() == "name = 'x'\n"
    assert History(folder).info == {"schema": "11", "seeds": "[1, 2]", "status": "running"}
    assert query(folder, "SELECT name FROM federations") == [("a#1",), ("a#2",)]
    first = Store(folder)
    assert_refused(lambda: Store(folder), "another process is writing this run", "wait for it or stop it first")
    first.close()
    assert_refused(lambda: made(folder), folder, "holds a run already", "a new folder, or `steelyard resume")


VIEW = "DROP TABLE untested; CREATE VIEW untested AS SELECT * FROM failures WHERE 0"
UNWRITABLE = named(
    [
        ("its end", "DROP TABLE info", Store.finish, "its end cannot be written: no such table: info"),
        ("its start", VIEW, Store.resume, "where it goes on from cannot be written: cannot modify untested"),
        (
            "a round",
            "DROP TABLE rounds",
            lambda store: commit(store, record(round=1)),
            "cannot be written: no such table",
        ),
    ]
)


@pytest.mark.parametrize(("harm", "call", "words"), UNWRITABLE)
def test_what_cannot_be_written_is_one_line_that_says_how_to_go_on(
    store: Store, harm: str, call: Callable[[Store], object], words: str
) -> None:
    commit(store, record(round=0))
    with closing(sqlite3.connect(store.folder / "run.sqlite")) as other:
        other.executescript(harm)
    kept = f"rounds written before are kept, `steelyard resume {store.folder}` goes on once that is mended"
    assert_refused(lambda: call(store), store.folder, words, kept)


def test_folders_that_hold_several_runs_say_so_and_name_one(tmp_path: Path) -> None:
    for name, words in (("sweep.toml", "holds a sweep"), ("attack.toml", "attacks"), ("arena.toml", "an arena")):
        (tmp_path / name).touch()
        call = partial(connect, tmp_path, write=False)
        assert_refused(call, tmp_path, f"{words}, which is several runs; allowed: a run in it, {tmp_path}/")
        (tmp_path / name).unlink()
    (tmp_path / "runs" / "first").mkdir(parents=True)
    connect(tmp_path / "runs" / "first", write=True).close()
    words = f"allowed: one of the runs in it, such as {tmp_path}/runs/first"
    assert_refused(lambda: connect(tmp_path / "runs", write=False), words)


@pytest.mark.parametrize("write", [True, False])
def test_what_is_no_database_of_this_version_is_named(tmp_path: Path, write: bool) -> None:
    path, call = tmp_path / "run.sqlite", partial(connect, tmp_path, write=write)
    path.write_text("this is not a database, it is only some text that is long enough to be read")
    assert_refused(call, path, "not a readable run database", "not a database")
    path.unlink()
    connect(tmp_path, write=True).close()
    for statement, found in (("UPDATE info SET value = '1' WHERE key = 'schema'", "1"), ("DELETE FROM info", "None")):
        with closing(sqlite3.connect(path)) as writer, writer:
            writer.execute(statement)
        assert_refused(call, path, f"schema {found}; this version reads schema 11")


def test_parts_are_joined_to_the_run_made_at_once(tmp_path: Path) -> None:
    """The numbers of clients are those that one run gives; one part ends a round early, with every client written."""

    def wrote(folder: str, **rounds: int) -> Path:
        store = begun(tmp_path / folder, *rounds, clients_every=2)
        for round in range(4):
            going = {name: last for name, last in rounds.items() if round <= last}
            found = [record(name, round, updates=updates(name, round, clients=("a", name))) for name in going]
            states = {name: state(min(round, last), float(len(name))) for name, last in rounds.items()}
            if found:
                store.commit(round, found, states, dict, last=round == max(rounds.values()))
        store.close()
        return tmp_path / folder

    whole, joined = wrote("whole", early=1, late=3), tmp_path / "joined"
    Store(joined).close()
    parts = [wrote("second", late=3), wrote("first", early=1)]
    join_rounds(joined, parts, ["early", "late"], 2, None)
    for table in ("clients", "federations", "rounds", "updates", "failures", "evaluations", "digests", "chain"):
        assert query(joined, f"SELECT * FROM {table}") == query(whole, f"SELECT * FROM {table}"), table
    ours, theirs = (contents.checkpoint(folder) for folder in (joined, whole))
    assert (*ours[:2], sorted(ours[2])) == (*theirs[:2], sorted(theirs[2]))
    key = a_key(tmp_path / "keys" / "server")
    names = ["early", "late"]
    both = [federation(name) for name in names]
    signed = tmp_path / "signed"
    set_up(signed, FILES, RunFacts(), both, fill=lambda draft: join_rounds(draft, parts, names, 2, key))
    assert query(signed, "SELECT COUNT(signature), COUNT(*) FROM chain") == [(4, 4)]
    assert query(signed, "SELECT head FROM chain") == query(whole, "SELECT head FROM chain")
