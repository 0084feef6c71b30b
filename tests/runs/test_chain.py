"""The chain of rounds: computed again by a stranger from the definition, and every change is found in its round."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runs.contents import chain_again, query
from tests.runs.records import evaluations, federation, record, state, updates, values

from steelyard.messages import Failure
from steelyard.privacy.accounting import Release
from steelyard.privacy.ledger import Charge, Ledger
from steelyard.privacy.ledger_marks import FILE
from steelyard.runs import chain, digests
from steelyard.runs.chain_check import Checked, check
from steelyard.runs.reader import History
from steelyard.runs.store import Store
from steelyard.signing import field
from steelyard.update_payloads import DenseModels

NAMES = ("DS>LD", "other")


def nothing() -> dict[str, torch.Tensor]:
    return {}


def commit(store: Store, round: int, *, last: bool = False) -> None:
    tested = evaluations(
        round=round, metrics={"mae": np.array([1.0, 2.0])}, right=np.array([True, False, True, True]) if last else None,
        failures=(Failure("é", "no test rows"),),
    )  # fmt: skip
    records = [
        record(
            name,
            round,
            updates=updates(name, round) if round else None,
            evaluations=tested,
            epsilon=0.5 * round,
            contributions=(values(round), replace(values(round), method="classes")) if round else (),
        )
        for name in NAMES
    ]
    states = {name: state(round, 1.0 + round, 2.0) for name in NAMES}
    store.commit(round, records, states, nothing, last=last)


def charge(store: Store, round: int) -> None:
    assert store.ledger is not None
    store.ledger.charge([Charge("DS>LD", round, "update", Release(4.0), ("a", "b"))])


def written(folder: Path, rounds: int = 4, every: int = 1, *, ledger: bool = False) -> Path:
    """A run of two rules side by side, finished after some rounds; with a privacy ledger where asked for."""
    store = Store(folder, checkpoint_every=every)
    store.register([federation(name) for name in NAMES])
    if ledger:
        store.ledger = Ledger(folder / FILE)
        store.note(salt="ab" * 32)
    for round in range(rounds + 1):
        if ledger and round:
            charge(store, round)
        commit(store, round, last=round == rounds)
    store.close()
    return folder


def change(folder: Path, *statements: str) -> None:
    connection = sqlite3.connect(folder / "run.sqlite")
    with connection:
        for statement in statements:
            assert connection.execute(statement).rowcount != 0, statement
    connection.close()


def checked(folder: Path) -> Checked:
    return History(folder).chain


# ---------------------------------------------------------------- a stranger computes it


def strangers_field(name: str, kind: str, content: bytes) -> bytes:
    return f"{name} {kind} {len(content)}\n".encode() + content + b"\n"


def strangers_value(name: str, value: Any) -> bytes:
    """A field by the page's table of kinds, and nothing for what is not known."""
    if value is None:
        return b""
    if type(value) is float:
        return strangers_field(name, "real", struct.pack("<d", value))
    if type(value) is int:
        return strangers_field(name, "whole", str(value).encode())
    return strangers_field(name, *(("text", value.encode()) if type(value) is str else ("bytes", value)))


TABLES = {
    "rounds": "accuracy priority tried tests cohort answered kept_old zero_criteria zero_scores loss server_accuracy "
    "server_macro_f1 server_metrics simulated epsilon",
    "updates": "clients samples bytes loss score weight raw normalised listening",
    "digests": "task model updates salts",
    "evaluations": "clients samples score loss metrics figures",
    "samples": "hits count",
    "ended": "reason",
}


def strangers_salt(secret: str | None, federation: str, round: int, client: str) -> bytes:
    said = strangers_value("salt", secret) + strangers_value("federation", federation)
    return hashlib.sha256(said + strangers_value("round", round) + strangers_value("client", client)).digest()[:16]


def strangers_head(folder: Path) -> str:
    """The head of a run as docs/reference/chain.md defines it, computed without the code that is tested."""
    clients = dict(query(folder, "SELECT id, name FROM clients"))
    federations = sorted(query(folder, "SELECT name, id, rule, seed, settings, algorithm FROM federations"))
    salt = query(folder, "SELECT value FROM info WHERE key = 'salt'")
    text = strangers_value("chain", 3) + (strangers_value("salt", salt[0][0]) if salt else b"")
    for name, _, rule, seed, settings, algorithm in federations:
        text += strangers_value("federation", name) + strangers_value("rule", rule) + strangers_value("seed", seed)
        text += strangers_value("settings", settings) + strangers_value("algorithm", algorithm)
    head = hashlib.sha256(text).hexdigest()
    content = (folder / FILE).read_bytes() if (folder / FILE).exists() else b""
    for round, size in query(folder, "SELECT round, ledger_bytes FROM chain ORDER BY round"):
        text = b""
        for name, key, _, _, settings, _ in federations:
            text += strangers_value("federation", name)
            for table, columns in TABLES.items():
                found = query(folder, f"SELECT * FROM {table} WHERE federation = {key} AND round = {round}")
                names = [row[1] for row in query(folder, f"PRAGMA table_info({table})")]
                for row in found:
                    cells = dict(zip(names, row, strict=True))
                    text += strangers_value("table", table)
                    if table == "updates":
                        criteria = json.loads(settings)["criteria"]
                        text += b"".join(strangers_value("criterion", criterion) for criterion in criteria)
                    for column in columns.split():
                        if column == "clients":
                            numbers = np.frombuffer(cells["clients"], "<i4").tolist()
                            text += b"".join(strangers_value("client", clients[number]) for number in numbers)
                        else:
                            text += strangers_value(column, cells[column])
            for table in ("failures", "untested"):
                rows = query(folder, f"SELECT client, reason FROM {table} WHERE federation = {key} AND round = {round}")
                text += strangers_value("table", table) if rows else b""
                for client, reason in sorted((clients[number], reason) for number, reason in rows):
                    text += strangers_value("client", client) + strangers_value("reason", reason)
            found = query(
                folder,
                "SELECT measure, method, clients, added, error, sizes, before, after FROM contributions "
                f"WHERE federation = {key} AND round = {round} AND source = 'run' ORDER BY measure, method",
            )
            for measure, method, numbers, added, error, sizes, before, after in found:
                text += strangers_value("table", "contributions") + strangers_value("measure", measure)
                text += strangers_value("method", method)
                for number in np.frombuffer(numbers, "<i4").tolist():
                    text += strangers_value("client", clients[number])
                text += strangers_value("added", added) + strangers_value("error", error)
                text += strangers_value("sizes", sizes) + strangers_value("before", before)
                text += strangers_value("after", after)
        if size is not None:
            text += strangers_value("ledger_bytes", size)
            text += strangers_value("ledger", hashlib.sha256(content[:size]).hexdigest())
        link = strangers_value("chain", 3) + strangers_value("before", head) + strangers_value("round", round)
        link += strangers_value("record", hashlib.sha256(text).hexdigest())
        head = hashlib.sha256(link).hexdigest()
    return head


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("ledger", [False, True])
def test_a_stranger_comes_to_the_same_head(tmp_path: Path, every: int, ledger: bool) -> None:
    folder = written(tmp_path / "run", every=every, ledger=ledger)
    found = checked(folder)
    assert found == Checked(strangers_head(folder), 4, "", ledger)
    assert query(folder, "SELECT head FROM checkpoints ORDER BY round DESC LIMIT 1") == [(found.head,)]


def test_the_head_does_not_depend_on_how_often_a_checkpoint_is_written_nor_on_time(tmp_path: Path) -> None:
    heads = {checked(written(tmp_path / str(every), every=every)).head for every in (1, 2, 100)}
    assert len(heads) == 1
    change(tmp_path / "1", "UPDATE rounds SET seconds = 99")
    assert checked(tmp_path / "1").problem == ""


def test_digests_are_of_each_clients_numbers(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    rows = query(folder, "SELECT round, model, updates FROM digests ORDER BY round")
    for number, round, found, salts in query(folder, "SELECT federation, round, updates, salts FROM digests"):
        sent = [] if not round else list(zip("ab", torch.eye(2).numpy(), strict=True))
        made = [strangers_salt(None, NAMES[number - 1], round, client) for client, _ in sent]
        expected = [hashlib.sha256(salt + row.tobytes()).digest() for salt, (_, row) in zip(made, sent, strict=True)]
        assert (found, salts) == ((b"".join(expected), b"".join(made)) if round else (None, None))
    models = [hashlib.sha256(struct.pack("<2f", 1.0 + round, 2.0)).hexdigest() for round, _, _ in rows]
    assert [model for _, model, _ in rows] == models


def test_large_updates_are_hashed_on_threads_to_the_same_digests() -> None:
    models = torch.arange(3 * 40_000, dtype=torch.float32).reshape(3, 40_000)
    assert models[0].nbytes > digests.SMALL
    taking = digests.Digests()
    made = record(updates=updates(clients=("a", "b", "c"), payload=DenseModels(models)))
    taking.take(1, [made], {"DS>LD": state(1)}, single=True)
    (found,) = taking.collect()
    taking.close()
    salts = [strangers_salt(None, "DS>LD", 1, client) for client in "abc"]
    expected = [hashlib.sha256(salt + row.numpy().tobytes()).digest() for salt, row in zip(salts, models, strict=True)]
    assert (found.updates, found.salts) == (b"".join(expected), b"".join(salts))
    assert taking.collect() == []


def test_updates_are_hashed_on_as_many_threads_as_help(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, str]] = []

    class Pool(digests.ThreadPoolExecutor):
        def __init__(self, threads: int, name: str) -> None:
            made.append((threads, name))
            super().__init__(threads, name)

    monkeypatch.setattr(digests, "ThreadPoolExecutor", Pool)
    taking = digests.Digests()
    for width, pools in ((100, 0), (digests.SMALL // 4, 1), (digests.SMALL // 4, 1)):
        payload = DenseModels(torch.ones(2, width))
        taking.take(1, [record(updates=updates(payload=payload))], {"DS>LD": state(1)}, single=True)
        assert len(made) == pools
    taking.close()
    assert made == [(digests.THREADS, "digests")]


def test_one_client_of_many_steps_is_hashed() -> None:
    models = DenseModels(torch.ones(1, digests.FEW_BYTES // 4 + 1))
    for steps, hashed in ((np.array([100]), True), (np.zeros(0, dtype=np.int64), False)):
        taking = digests.Digests()
        given = updates(clients=("a",), payload=models, steps=steps)
        taking.take(1, [record(updates=given)], {"DS>LD": state(1)}, single=True)
        assert (taking.collect()[0].updates is not None) == hashed


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def test_models_on_a_gpu_are_hashed_beside_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device that is only played: the work waits for the round's event, on a stream of its own."""
    order: list[str] = []
    go_on = threading.Event()

    class Event:
        def record(self) -> None:
            order.append("recorded")

    class Stream:
        def wait_event(self, event: object) -> None:
            assert isinstance(event, Event)
            order.append("waited")
            assert go_on.wait(30)

    @contextmanager
    def inside(stream: object) -> Generator[None]:
        assert isinstance(stream, Stream)
        order.append(threading.current_thread().name[:7])
        yield

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    model = torch.arange(3.0).as_subclass(OnGpu)
    taking = digests.Digests()
    taking.take(1, [record(updates=None)], {"DS>LD": replace(state(1), parameters=model)}, single=True)
    assert "digests" not in order  # it is under way, and nobody waits for it
    go_on.set()
    (found,) = taking.collect()
    assert order == ["recorded", "waited", "digests"]
    assert (found.round, found.model) == (1, hashlib.sha256(struct.pack("<3f", 0, 1, 2)).hexdigest())
    # One round after the other, on the same thread; updates that are not on the GPU are waited for at once.
    pool = taking._beside
    taking.take(2, [record(round=2)], {"DS>LD": replace(state(2), parameters=model)}, single=True)
    assert taking._under_way is None
    assert taking._beside is pool
    assert pool is not None
    assert pool._max_workers == 1
    assert [digest.round for digest in taking.collect()] == [2]
    taking.close()


@pytest.mark.parametrize(
    ("every", "steps", "hashed"), [(False, None, False), (False, 99, False), (False, 100, True), (True, 2, True)]
)
def test_large_updates_of_a_simulation_are_hashed_where_training_took_longer(
    every: bool, steps: int | None, hashed: bool
) -> None:
    """A thousand clients with two steps each take less time to train than to hash; across machines all are hashed."""
    models = torch.ones(2, digests.FEW_BYTES // 8 + 1)
    given = None if steps is None else np.array([steps, steps])
    for payload, expected in ((DenseModels(models), hashed), (DenseModels(models[:, 1:].contiguous()), True)):
        taking = digests.Digests(every=every)
        taking.take(1, [record(updates=updates(payload=payload, steps=given))], {"DS>LD": state(1)}, single=True)
        (found,) = taking.collect()
        taking.close()
        assert (found.updates is not None) == expected
        assert len(found.model) == 64


def test_rounds_after_the_last_checkpoint_are_not_in_the_chain_yet(tmp_path: Path) -> None:
    store = Store(tmp_path, checkpoint_every=3)
    store.register([federation(name) for name in NAMES])
    for round in range(5):
        commit(store, round)
    store.close()
    assert checked(tmp_path).round == 3
    change(tmp_path, "UPDATE rounds SET accuracy = 0.1 WHERE round = 4")
    assert checked(tmp_path).problem == ""


# ---------------------------------------------------------------- what was changed is found

CHANGES: dict[str, tuple[str, str]] = {
    "an accuracy": ("UPDATE rounds SET accuracy = 0.99 WHERE round = 2", "round 2 is not"),
    "an accuracy that is gone": ("UPDATE rounds SET accuracy = NULL WHERE round = 2", "round 2 is not"),
    "an accuracy that is text": ("UPDATE rounds SET accuracy = 'abc' WHERE round = 2", "round 2 is not"),
    "spent epsilon": ("UPDATE rounds SET epsilon = 0.1 WHERE round = 3 AND federation = 2", "round 3 is not"),
    "the order": ("UPDATE rounds SET priority = 'LD>DS' WHERE round = 1", "round 1 is not"),
    "weights": ("UPDATE updates SET weight = zeroblob(16) WHERE round = 2", "round 2 is not"),
    "scores": ("UPDATE updates SET score = zeroblob(16) WHERE round = 2", "round 2 is not"),
    "criteria": ("UPDATE updates SET raw = normalised WHERE round = 1", "round 1 is not"),
    "who sent what": ("UPDATE updates SET clients = substr(clients, 5) || substr(clients, 1, 4)", "round 1 is not"),
    "a column of no length": ("UPDATE updates SET clients = x'00' WHERE round = 1", "round 1 is not"),
    "a reason": ("UPDATE failures SET reason = 'late' WHERE round = 4", "round 4 is not"),
    "a failure that is gone": ("DELETE FROM failures WHERE round = 4", "round 4 is not"),
    "why it was not tested": ("UPDATE untested SET reason = 'late' WHERE round = 0", "round 0 is not"),
    "a client's test": ("UPDATE evaluations SET score = zeroblob(16) WHERE round = 3", "round 3 is not"),
    "hits": ("UPDATE samples SET hits = x'ff'", "round 4 is not"),
    "a digest": ("UPDATE digests SET updates = zeroblob(64) WHERE round = 2", "round 2 is not"),
    "a model's digest": ("UPDATE digests SET model = 'x' WHERE round = 2", "round 2 is not"),
    "a client's name": ("UPDATE clients SET name = 'z' WHERE name = 'a'", "round 0 is not"),
    "a rule's seed": ("UPDATE federations SET seed = 5", "round 0 is not"),
    "names of criteria": (
        "UPDATE federations SET settings = replace(settings, '\"DS\",\"LD\"', '\"LD\",\"DS\"')", "round 0 is not",
    ),
    "a round's rows": ("DELETE FROM rounds WHERE round = 1", "round 1 is not"),
    "the first link": ("DELETE FROM chain WHERE round = 0", "round 0 is missing from its chain"),
    "a link": ("DELETE FROM chain WHERE round = 2", "round 2 is missing from its chain"),
    "the links after a round": ("DELETE FROM chain WHERE round > 2", "the checkpoint after round 3 names another head"),
    "all links": ("DELETE FROM chain", "the checkpoint after round 3 names another head"),
    "a head": ("UPDATE chain SET head = 'x' WHERE round = 2", "round 2 is not"),
    "a checkpoint's head": ("UPDATE checkpoints SET head = 'x'", "the checkpoint after round 3 names another head"),
    "a checkpoint": ("DELETE FROM checkpoints WHERE round = 4", "round 4 has a head and no checkpoint after it"),
    "all checkpoints": ("DELETE FROM checkpoints", "round 0 has a head and no checkpoint after it"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_the_first_round_that_differs_is_named(tmp_path: Path, what: str) -> None:
    folder = written(tmp_path / "run")
    statement, problem = CHANGES[what]
    change(folder, statement)
    assert problem in checked(folder).problem


def edited(content: bytes) -> bytes:
    return content.replace(b'"round": 2, "what": "update", "noise": 4.0', b'"round": 2, "what": "update", "noise": 9.0')


LEDGERS: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "gone": (lambda content: None, "is gone, and was there when round 1 was written"),
    "emptied": (lambda content: b"", "has 0 bytes, and had 1"),
    "shortened": (lambda content: content[: content.index(b"\n") + 1], "when round 2 was written"),
    "torn": (lambda content: content[:-1], "when round 4 was written"),
    "edited": (edited, "no longer holds the charges that it held when round 2 was written"),
}


@pytest.mark.parametrize("what", LEDGERS)
def test_a_ledger_that_is_not_what_it_was_is_found(tmp_path: Path, what: str) -> None:
    folder = written(tmp_path / "run", ledger=True)
    made, problem = LEDGERS[what]
    before = (folder / FILE).read_bytes()
    after = made(before)
    assert after != before
    if after is None:
        (folder / FILE).unlink()
    else:
        (folder / FILE).write_bytes(after)
    found = checked(folder)
    assert problem in found.problem
    assert found.ledger


def test_a_ledger_may_be_ahead_and_its_last_line_torn(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", ledger=True)
    with (folder / FILE).open("ab") as file:
        file.write(Charge("DS>LD", 5, "update", Release(4.0), ("a",)).line().encode() + b'{"federation": "DS')
    assert checked(folder).problem == ""


def test_what_was_charged_for_rounds_that_are_run_again_cannot_be_taken_away(tmp_path: Path) -> None:
    """Rounds after the checkpoint go with a resume; their charges do not, also before a round is written again."""
    store = Store(tmp_path, checkpoint_every=3)
    store.register([federation(name) for name in NAMES])
    store.ledger = Ledger(tmp_path / FILE)
    for round in range(6):
        if round:
            charge(store, round)
        commit(store, round)
    store.close()
    again = Store(tmp_path)
    again.register([federation(name) for name in NAMES])
    assert again.resume().round == 3
    again.close()
    lines = (tmp_path / FILE).read_text().splitlines(keepends=True)
    (tmp_path / FILE).write_text("".join(lines[:3]))
    assert "when the run was last resumed" in checked(tmp_path).problem
    (tmp_path / FILE).write_text("".join(lines))
    assert checked(tmp_path).problem == ""


def test_the_salt_hides_what_a_head_is_the_hash_of(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", ledger=True)
    change(folder, "UPDATE info SET value = 'cd' WHERE key = 'salt'")
    assert "round 0 is not" in checked(folder).problem


def test_a_run_with_a_salt_keeps_a_ledger_whatever_is_left_of_it(tmp_path: Path) -> None:
    plain = written(tmp_path / "plain")
    assert not checked(plain).ledger
    salted = written(tmp_path / "salted")
    change(salted, "INSERT INTO info VALUES ('salt', 'ab')")
    assert checked(salted).ledger
    kept = written(tmp_path / "kept", ledger=True)
    assert checked(kept).ledger


def test_a_rule_without_a_row_in_a_round_has_no_place_in_its_record(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    db = sqlite3.connect(folder / "run.sqlite")
    records = chain.Records(db)
    assert records.record(99, None) == b""
    db.close()


# ---------------------------------------------------------------- fields

VALUES = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(), st.binary(max_size=40)
)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "client"]), VALUES), max_size=5))
def test_fields_can_be_read_back_one_by_one(fields: list[tuple[str, Any]]) -> None:
    """So that two different lists of fields never make the same record."""
    content = b"".join(field(name, value) for name, value in fields)
    found: list[tuple[str, str, bytes]] = []
    while content:
        header, _, rest = content.partition(b"\n")
        name, kind, length = header.decode().split(" ")
        found.append((name, kind, rest[: int(length)]))
        assert rest[int(length) : int(length) + 1] == b"\n"
        content = rest[int(length) + 1 :]
    kinds = {int: "whole", float: "real", str: "text", bytes: "bytes"}
    assert [(name, kinds[type(value)]) for name, value in fields if value is not None] == [row[:2] for row in found]
    assert [row[2] for row in found if row[1] == "whole"] == [str(v).encode() for _, v in fields if type(v) is int]


def test_a_negative_zero_is_a_zero_as_in_the_database() -> None:
    assert field("x", -0.0) == field("x", 0.0) != field("x", 0)


def test_a_run_without_rounds_has_no_head(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.register([federation()])
    assert check(store._db, tmp_path) == Checked()
    store.close()


def test_who_computes_it_again_is_not_found_but_has_another_head(tmp_path: Path) -> None:
    """What docs/reference/security.md says of a chain that is not signed."""
    folder = written(tmp_path / "run")
    before = checked(folder).head
    change(folder, "UPDATE rounds SET accuracy = 0.99 WHERE round = 2")
    connection = sqlite3.connect(folder / "run.sqlite")
    with connection:
        chain_again(connection)
    connection.close()
    after = checked(folder)
    assert after.problem == ""
    assert after.head != before
