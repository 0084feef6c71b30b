"""Writing a run, record by record: what stands in the tables, what a resume forgets, who may write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.runs import contents
from tests.runs.contents import query
from tests.runs.records import evaluations, federation, record, state, updates

from steelyard.errors import UserError
from steelyard.messages import Failure, LossState
from steelyard.rounds.state import RoundRecord
from steelyard.runs.opening import connect
from steelyard.runs.store import Store, exists, tidy
from steelyard.weighing.priorities import OrderState
from steelyard.weighing.rule import Rule, WeighingSettings

TABLES = ("rounds", "updates", "failures", "evaluations", "samples")


def nothing() -> dict[str, torch.Tensor]:
    return {}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "run", checkpoint_every=3)
    opened.register([federation()])
    yield opened
    opened.close()


def commit(store: Store, *records: RoundRecord, last: bool = False, parameters: tuple[float, ...] = (1.0, 2.0)) -> None:
    round = records[0].round
    states = {one.federation: state(round, *parameters) for one in records}
    store.commit(round, records, states, nothing, last=last)


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


def test_a_round_stands_in_the_tables_number_by_number(store: Store) -> None:
    test = {"server_accuracy": 0.5, "server_macro_f1": 0.25, "server_metrics": {"f1": [0.5, 0.0]}}
    commit(store, record(**test, tests=2, epsilon=1.5, bytes_each=2))
    (row,) = query(store.folder, "SELECT * FROM rounds")
    plain = json.dumps({"name": "auto", "class_weights": None, "shape": None, "scale": None})
    start = (1, 1, 0.625, "DS>LD", '[["DS>LD", 0.625]]', 2)
    metrics = '{"f1": [0.5, 0.0]}'
    cost = (None, None, 16.0, 6.0)
    assert row == (*start, 3, 2, 0, "[]", 0, plain, 0.5, 0.25, metrics, 0.125, None, 1.5, *cost)
    assert contents.updates(store.folder) == [
        {
            "federation": "DS>LD",
            "round": 1,
            "clients": ["a", "b"],
            "samples": [3, 1],
            "bytes": None,
            "loss": [0.25, None],
            "score": [1.125, 0.375],
            "weight": [0.75, 0.25],
            "raw": [3.0, 4.0, 1.0, 4.0],
            "normalised": [0.75, 0.5, 0.25, 0.5],
        }
    ]
    assert contents.rows(store.folder)["failures"] == [("DS>LD", 1, "c", "not registered")]
    assert contents.evaluations(store.folder) == [
        {
            "federation": "DS>LD",
            "round": 1,
            "clients": ["a", "d"],
            "samples": [3, 1],
            "score": [0.5, 1.0],
            "loss": [0.75, None],
            "metrics": "[]",
            "figures": None,
        }
    ]
    assert query(store.folder, "SELECT * FROM samples") == []


def test_the_first_model_has_neither_cohort_nor_order(store: Store) -> None:
    commit(store, RoundRecord("DS>LD", 0, 0.5, evaluations=evaluations(round=0), accuracy=0.5))
    assert query(store.folder, "SELECT * FROM rounds") == [
        (1, 0, 0.5, None, "[]", 0, 0, 0, 0, "[]", 0, "{}", *[None] * 3, 0.5, *[None] * 6)
    ]
    assert query(store.folder, "SELECT * FROM updates") == []


def test_an_old_model_that_was_kept_gave_nobody_weight(store: Store) -> None:
    rule = Rule(WeighingSettings(criteria=("DS", "LD"), score="product"))
    commit(store, record(weighing=rule.weigh(np.zeros((2, 2))), kept_old=True, evaluations=None, accuracy=None))
    ((kept, zero, uniform, accuracy),) = query(
        store.folder, "SELECT kept_old, zero_criteria, zero_scores, accuracy FROM rounds"
    )
    assert (kept, json.loads(zero), uniform, accuracy) == (1, ["DS", "LD"], 0, None)
    (found,) = contents.updates(store.folder)
    assert (found["score"], found["weight"]) == ([0.25, 0.25], [0.0, 0.0])
    assert query(store.folder, "SELECT * FROM evaluations") == []


def test_scores_that_are_all_zero_are_marked(store: Store) -> None:
    rule = Rule(WeighingSettings(criteria=("DS", "LD"), score="product"))
    commit(store, record(weighing=rule.weigh(np.array([[3.0, 0.0], [0.0, 4.0]]))))
    assert query(store.folder, "SELECT zero_criteria, zero_scores FROM rounds") == [("[]", 1)]
    assert contents.updates(store.folder)[0]["weight"] == [0.5, 0.5]


def test_updates_without_weighing_and_with_bytes(store: Store) -> None:
    failures = (Failure("c", "too late"), Failure("c", "again"), Failure("b", "sent twice"))
    commit(store, record(weighing=None, updates=updates(bytes_sent=np.array([70, 80]), failures=failures)))
    (found,) = contents.updates(store.folder)
    assert (found["clients"], found["samples"], found["bytes"]) == (["a", "b"], [3, 1], [70, 80])
    assert found["raw"] is found["normalised"] is found["score"] is found["weight"] is None
    # A client that is weighed all the same is no failure, and one that failed twice was asked once.
    assert contents.rows(store.folder)["failures"] == [("DS>LD", 1, "c", "again")]
    assert query(store.folder, "SELECT cohort, answered FROM rounds") == [(4, 2)]


def test_metrics_and_right_or_wrong_of_every_sample(store: Store) -> None:
    metrics = {"recall": np.array([0.5, 0.25]), "hit": np.array([1.0, 0.0])}
    right = np.array([True, False, True, True, False, False, False, False, True])
    commit(store, record(evaluations=evaluations(metrics=metrics, right=right)))
    (found,) = contents.evaluations(store.folder)
    assert (found["metrics"], found["figures"]) == ('["recall", "hit"]', [0.5, 0.25, 1.0, 0.0])
    assert query(store.folder, "SELECT * FROM samples") == [(1, 1, bytes([0b10110000, 0b10000000]), 9)]


def test_losses_that_adapt_are_written_whole(store: Store) -> None:
    commit(store, record(loss=LossState("barron", (1.0, 2.0), 0.5, 3.0)))
    ((text,),) = query(store.folder, "SELECT loss FROM rounds")
    assert json.loads(text) == {"name": "barron", "class_weights": [1.0, 2.0], "shape": 0.5, "scale": 3.0}


def test_a_client_has_one_number_in_all_tables_and_after_opening_again(tmp_path: Path) -> None:
    for round in (1, 2):
        store = Store(tmp_path)
        store.register([federation()])
        commit(store, record(round=round))
        store.close()
    assert query(tmp_path, "SELECT id, name FROM clients ORDER BY id") == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
    assert query(tmp_path, "SELECT round, hex(clients) FROM updates") == [
        (1, "0100000002000000"),
        (2, "0100000002000000"),
    ]
    assert query(tmp_path, "SELECT round, client FROM failures") == [(1, 3), (2, 3)]
    assert query(tmp_path, "SELECT hex(clients) FROM evaluations") == [("0100000004000000",)] * 2


def test_federations_are_named_once_with_their_settings(tmp_path: Path) -> None:
    made = [federation("x#1", 1, "x", criteria=("DS",)), federation("x#2", 2, "x", criteria=("DS",))]
    for _ in range(2):
        store = Store(tmp_path)
        store.register(made)
        store.commit(0, [RoundRecord("x#2", 0, 0.0)], {"x#1": state(0), "x#2": state(0)}, nothing, last=False)
        store.close()
    found = query(tmp_path, "SELECT id, name, rule, seed, settings FROM federations ORDER BY id")
    assert [row[:4] for row in found] == [(1, "x#1", "x", 1), (2, "x#2", "x", 2)]
    assert json.loads(found[0][4])["criteria"] == ["DS"]
    assert query(tmp_path, "SELECT federation FROM rounds") == [(2,)]


def test_single_clients_are_written_each_k_rounds_and_in_the_last(tmp_path: Path) -> None:
    store = Store(tmp_path, clients_every=2)
    store.register([federation()])
    for round in range(1, 6):
        commit(store, record(round=round), last=round == 5)
    store.close()
    assert query(tmp_path, "SELECT DISTINCT round FROM updates ORDER BY round") == [(2,), (4,), (5,)]
    assert query(tmp_path, "SELECT COUNT(*) FROM rounds") == [(5,)]
    assert query(tmp_path, "SELECT COUNT(*) FROM evaluations") == [(5,)]


def test_without_saying_more_every_round_is_written_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.register([federation()])
    for round in range(3):
        commit(store, record(round=round))
        assert query(tmp_path, "SELECT MAX(round) FROM checkpoints") == [(round,)]
    store.close()
    assert query(tmp_path, "SELECT DISTINCT round FROM updates ORDER BY round") == [(0,), (1,), (2,)]


def test_checkpoints_come_each_k_rounds_and_in_the_last_and_two_are_kept(store: Store) -> None:
    expected = {0: [0], 1: [0], 2: [0], 3: [0, 3], 4: [0, 3], 5: [3, 5]}
    (store.folder / "checkpoints" / "round-000009.safetensors.part").write_bytes(b"cut off")
    for round, kept in expected.items():
        commit(store, record(round=round), last=round == 5, parameters=(round, 7.0))
        files = [f"round-{number:06d}.safetensors" for number in kept]
        assert query(store.folder, "SELECT round, file FROM checkpoints") == list(zip(kept, files, strict=True))
        assert sorted(path.name for path in (store.folder / "checkpoints").iterdir()) == files
    assert store.resume().states["DS>LD"].parameters.tolist() == [5.0, 7.0]
    store.finish(engine="loop")
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


def test_what_clients_keep_is_asked_for_only_when_a_checkpoint_is_due(store: Store) -> None:
    asked: list[int] = []

    def snapshot() -> dict[str, torch.Tensor]:
        asked.append(round)
        return {"own": torch.tensor([round])}

    for round in range(6):
        store.commit(round, [record(round=round)], {"DS>LD": state(round)}, snapshot, last=False)
    assert asked == [0, 3]
    assert store.resume().kept["own"].tolist() == [3]


def test_a_resume_forgets_what_came_after_the_checkpoint(store: Store) -> None:
    bits = np.array([True])
    orders = OrderState((1, 0), 0.75, 4, {"duels": {"0,1": 2.0}})
    for round in range(6):
        found = record(round=round, evaluations=evaluations(round=round, right=bits))
        store.commit(round, [found], {"DS>LD": state(round, orders=orders)}, nothing, last=False)
    found = store.resume()
    assert (found.round, found.kept, found.problems) == (3, {}, ())
    assert found.states["DS>LD"].round == 3
    assert found.states["DS>LD"].orders == orders
    for table in TABLES:
        assert query(store.folder, f"SELECT DISTINCT round FROM {table} ORDER BY round") == [(0,), (1,), (2,), (3,)]


def test_a_resume_before_any_checkpoint_begins_anew(store: Store) -> None:
    assert (store.resume().round, store.resume().states) == (-1, {})
    # Round 0 always has a checkpoint; rows without one are of a version or a hand that broke off.
    with store._db:
        store._rows.write(record(round=0), single=True)
    assert (store.resume().round, store.resume().states) == (-1, {})
    for table in TABLES:
        assert query(store.folder, f"SELECT COUNT(*) FROM {table}") == [(0,)]


def test_a_round_is_written_as_a_whole_or_not_at_all(store: Store) -> None:
    commit(store, record(round=0))
    with pytest.raises(KeyError):
        commit(store, record(round=3), record("stranger", round=3))
    assert query(store.folder, "SELECT MAX(round) FROM rounds") == [(0,)]
    # The new file is there, the row is not: the old checkpoint still holds.
    assert len(list((store.folder / "checkpoints").iterdir())) == 2
    assert store.resume().states["DS>LD"].round == 0


def test_a_round_written_again_replaces_the_first(store: Store) -> None:
    commit(store, record(round=1, accuracy=0.25))
    commit(store, record(round=1, accuracy=0.5))
    assert query(store.folder, "SELECT accuracy FROM rounds") == [(0.5,)]
    for table in ("updates", "failures", "evaluations"):
        assert query(store.folder, f"SELECT COUNT(*) FROM {table}") == [(1,)]


def test_notes_are_text_or_json_and_the_newest_holds(store: Store) -> None:
    store.note(status="running", seeds=[1, 2], in_memory=False)
    store.note(status="finished")
    found = dict(query(store.folder, "SELECT key, value FROM info"))
    assert found == {"schema": "9", "status": "finished", "seeds": "[1, 2]", "in_memory": "false"}


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    first = Store(tmp_path)
    with pytest.raises(UserError, match="another process is writing this run; wait for it or stop it first"):
        Store(tmp_path)
    first.close()
    Store(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"file.run: cannot be written: Not a directory; allowed: a writable folder"):
        Store(tmp_path / "file" / "run")


def test_whether_a_folder_holds_a_run(tmp_path: Path) -> None:
    assert not exists(tmp_path / "run")
    (tmp_path / "run").mkdir()
    assert not exists(tmp_path / "run")
    Store(tmp_path / "run").close()
    assert exists(tmp_path / "run")


def test_an_end_that_cannot_be_written_is_one_line(store: Store) -> None:
    commit(store, record(round=0))
    store._db.execute("DROP TABLE info")
    with pytest.raises(UserError) as found:
        store.finish()
    assert str(found.value) == (
        f"{store.folder}: its end cannot be written: no such table: info; rounds written before are kept, "
        f"`steelyard resume {store.folder}` goes on once that is mended"
    )


def test_a_finished_run_that_was_killed_is_tidied(store: Store) -> None:
    for round in (0, 3):
        commit(store, record(round=round))
    store.finish()
    store.close()
    more = store.folder / "checkpoints" / "round-000001.safetensors"
    more.write_bytes(b"left behind")
    tidy(store.folder)
    assert [path.name for path in (store.folder / "checkpoints").iterdir()] == ["round-000003.safetensors"]


def test_rounds_that_are_all_gone_are_counted_as_none(store: Store) -> None:
    commit(store, record(round=0))
    with store._db:
        store._db.execute("DELETE FROM rounds")
    with pytest.raises(UserError) as found:
        store.resume()
    assert str(found.value) == (
        f"{store.folder / 'run.sqlite'}: damaged: 0 rounds of DS>LD, where its checkpoint follows 1; allowed: the file "
        "as it was"
    )


def test_a_resume_that_cannot_be_written_says_where(store: Store) -> None:
    commit(store, record(round=0))
    store._db.execute("DROP TABLE untested")
    store._db.execute("CREATE VIEW untested AS SELECT * FROM failures WHERE 0")
    with pytest.raises(UserError) as found:
        store.resume()
    assert str(found.value) == (
        f"{store.folder}: where it goes on from cannot be written: cannot modify untested because it is a view; rounds "
        f"written before are kept, `steelyard resume {store.folder}` goes on once that is mended"
    )


def test_rules_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    made = Store(tmp_path / "new")
    made._db.execute("DROP TABLE federations")
    with pytest.raises(UserError) as found:
        made.register([federation()])
    assert str(found.value) == f"{made.folder}: its rules cannot be written: no such table: federations"
    made.close()
