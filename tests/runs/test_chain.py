"""The chain of rounds: computed again by a stranger from its definition; a change is found, a whole one remembered."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import struct
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.runs.contents import chain_again, change, query
from tests.runs.records import begun, evaluations, federation, record, state, updates, values
from tests.runs.signed_runs import RUN, signed_run

from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import Failure, Signed, Updates
from steelyard.privacy.accounting import Release
from steelyard.privacy.ledger import FILE, Charge, Ledger, Mark
from steelyard.proof.signing import read_public_key
from steelyard.report.curves import chain_of
from steelyard.runs import chain, history
from steelyard.runs.chain import Checked
from steelyard.runs.database import reading
from steelyard.runs.digests import Digest, Digests
from steelyard.runs.facts import RunFacts
from steelyard.runs.history import History
from steelyard.runs.store import Store

NAMES = ("DS>LD", "other")


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
    store.commit(round, records, states, dict, last=last)


def charge(store: Store, round: int) -> None:
    assert store.ledger is not None
    store.ledger.charge([Charge("DS>LD", round, "update", Release(4.0), ("a", "b"))])


def written(folder: Path, rounds: int = 4, every: int = 1, *, ledger: bool = False) -> Path:
    """A run of two rules side by side, finished after some rounds; with a privacy ledger where asked for."""
    store = begun(folder, *NAMES, checkpoint_every=every)
    if ledger:
        store.ledger = Ledger(folder / FILE)
        store.note(RunFacts(salt="ab" * 32))
    for round in range(rounds + 1):
        if ledger and round:
            charge(store, round)
        commit(store, round, last=round == rounds)
    store.close()
    return folder


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
        if (kept := folder / "updates" / f"round-{round:06d}.safetensors").exists():
            text += strangers_value("kept", hashlib.sha256(kept.read_bytes()).hexdigest())
        link = strangers_value("chain", 3) + strangers_value("before", head) + strangers_value("round", round)
        link += strangers_value("record", hashlib.sha256(text).hexdigest())
        head = hashlib.sha256(link).hexdigest()
    return head


def strangers_closing(folder: Path) -> str:
    """The final hash of a run as docs/reference/chain.md defines it."""
    ((last, head),) = query(folder, "SELECT round, head FROM chain ORDER BY round DESC LIMIT 1")
    text = strangers_value("closing", 3) + strangers_value("round", last) + strangers_value("head", head)
    for row in query(folder, "SELECT round, head, checksum, size FROM checkpoints ORDER BY round"):
        text += b"".join(map(strangers_value, ("checkpoint", "head", "checksum", "bytes"), row))
    ended = "SELECT f.name, e.round, e.reason FROM ended e JOIN federations f ON f.id = e.federation ORDER BY f.name"
    for row in query(folder, ended):
        text += b"".join(map(strangers_value, ("ended", "round", "reason"), row))
    facts = query(folder, "SELECT key, value FROM info ORDER BY key")
    covered = [row for row in facts if row[0] not in ("tracked_as", "withdrawals", "writer")]
    said = b"".join(b"".join(map(strangers_value, ("fact", "value"), row)) for row in covered)
    return hashlib.sha256(text + strangers_value("facts", hashlib.sha256(said).hexdigest())).hexdigest()


@pytest.mark.parametrize(("every", "ledger"), [(1, False), (3, True)])
def test_a_stranger_comes_to_the_same_hashes(tmp_path: Path, every: int, ledger: bool) -> None:
    folder = written(tmp_path / "run", every=every, ledger=ledger)
    change(folder, "INSERT INTO ended VALUES (2, 3, 'exploded')")
    chain_again(folder)
    found = checked(folder)
    assert found == Checked(strangers_head(folder), 4, "", ledger, strangers_closing(folder))
    assert query(folder, "SELECT head FROM checkpoints ORDER BY round DESC LIMIT 1") == [(found.head,)]
    # Time is not in the chain.
    change(folder, "UPDATE rounds SET seconds = 99")
    assert checked(folder) == found


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


def test_updates_are_hashed_where_that_is_cheap_beside_training() -> None:
    large = DenseModels(torch.ones(2, 1 << 18))  # 2 MiB, on threads
    for steps, every, hashed in ((99, False, False), (100, False, True), (None, False, False), (1, True, True)):
        sent = updates(payload=large, steps=None if steps is None else np.full(2, steps))
        assert (digest_of(sent, every=every).updates is not None) == hashed
    # Where a node's signature was checked there is its digest, and for others none.
    sent = updates(payload=large, signed=(Signed("key", "", {"b": bytes([7]) * 32}, {"b": bytes(16)}, b""),))
    assert digest_of(sent).updates == bytes(32) + bytes([7]) * 32


def digest_of(sent: Updates, *, every: bool = False) -> Digest:
    digests = Digests(every=every)
    digests.take(1, [record(updates=sent)], {"DS>LD": state()}, single=True)
    (found,) = digests.collect()
    digests.close()
    return found


CHANGES: dict[str, tuple[str, str]] = {
    "a column of no length": ("UPDATE updates SET clients = x'00' WHERE round = 1", "round 1 is not"),
    "names of criteria": (
        "UPDATE federations SET settings = replace(settings, '\"DS\",\"LD\"', '\"LD\",\"DS\"')", "round 0 is not",
    ),
    "a link": ("DELETE FROM chain WHERE round = 2", "round 2 is missing from its chain"),
    "the links after a round": ("DELETE FROM chain WHERE round > 2", "the checkpoint after round 3 names another head"),
    "a checkpoint": ("DELETE FROM checkpoints WHERE round = 4", "round 4 has a head and no checkpoint after it"),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize("what", CHANGES)
def test_the_first_round_that_differs_is_named(plain: Path, tmp_path: Path, what: str) -> None:
    """Each single cell is changed in report/test_verification.py; here whole rows and links are."""
    folder = Path(shutil.copytree(plain, tmp_path / "run"))
    statement, problem = CHANGES[what]
    change(folder, statement)
    assert problem in checked(folder).problem


def test_what_was_charged_for_rounds_that_are_run_again_cannot_be_taken_away(tmp_path: Path) -> None:
    """Rounds after the checkpoint go with a resume; their charges do not, also before a round is written again."""
    store = begun(tmp_path, *NAMES, checkpoint_every=3)
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


def test_a_run_without_rounds_has_no_head(tmp_path: Path) -> None:
    store = begun(tmp_path)
    store.close()
    assert checked(tmp_path) == Checked()


def test_a_sealed_round_holds_its_head_the_one_before_and_the_servers_signature(tmp_path: Path) -> None:
    run = signed_run(tmp_path / "run", tmp_path / "keys")
    server = read_public_key(tmp_path / "keys" / "server.pub")
    rows = {round: rest for round, *rest in query(run, "SELECT round, head, signature, ledger FROM chain")}
    with reading(run) as db:
        records = chain.Records(db)
        for round, (head, signature, ledger) in rows.items():
            found = records.sealed(round)
            assert found is not None
            assert (found.run, found.round, found.head, found.key) == (RUN, round, head, server)
            assert found.before == (rows[round - 1][0] if round else records.first())
            assert (found.signature, ledger, found.tree.root is None) == (signature, None, round == 0)
            assert found.record == hashlib.sha256(records.record(chain.Row(round, None, None, None, None))).hexdigest()
        assert (len(rows), records.sealed(4)) == (4, None)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(history, "WORTH", 0.0)
    monkeypatch.setattr(history, "SETTLED", -60.0)
    return tmp_path / "cache" / "chains"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = Store(tmp_path / "run", checkpoint_every=1)
    store.register([federation("both", 1, "both")])
    for round in range(3):
        store.commit(round, [record("both", round)], {"both": state(round)}, dict, last=round == 2)
    store.close()
    return tmp_path / "run"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every look that computes a chain."""
    found: list[Path] = []
    check = history.check
    monkeypatch.setattr(history, "check", lambda db, folder: (found.append(folder), check(db, folder))[1])
    return found


@pytest.mark.parametrize("how", ["times set back", "another file"])
def test_a_changed_run_is_never_said_to_be_whole(cache: Path, folder: Path, how: str) -> None:
    chain_of(History(folder))
    path = folder / "run.sqlite"
    before = path.stat()
    change(folder, "UPDATE rounds SET accuracy = 0.99 WHERE round = 1")
    if how == "times set back":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        shutil.copy(path, folder / "new")
        (folder / "new").replace(path)
    assert path.stat().st_size == before.st_size
    for _ in range(2):  # what has a problem is not remembered either
        assert chain_of(History(folder)).problem == "round 1 is not as it was written"


def test_a_run_in_writing_and_one_just_written_are_not_remembered(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(sqlite3.connect(folder / "run.sqlite")) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("UPDATE info SET value = value")
        db.execute("INSERT INTO info VALUES ('other', '1')")
        db.commit()
        chain_of(History(folder))
    monkeypatch.setattr(history, "SETTLED", 300.0)
    chain_of(History(folder))
    assert not cache.exists()


def test_a_damaged_memory_is_as_none(cache: Path, folder: Path, looks: list[Path]) -> None:
    chain_of(History(folder))
    path = next(cache.iterdir())
    kept = json.loads(path.read_text())
    for text in ("", "[]", json.dumps({"state": kept["state"]}), json.dumps({**kept, "chain": {"head": 3}})):
        path.write_text(text)
        assert chain_of(History(folder)).head == kept["chain"]["head"]
        assert json.loads(path.read_text()) == kept
    assert looks == [folder] * 5


def test_a_ledger_is_held_to_what_it_was_and_may_be_ahead(tmp_path: Path) -> None:
    """What a changed ledger is called stands in tests/privacy/test_ledger.py."""
    folder = written(tmp_path / "run", ledger=True)
    path, content = folder / FILE, (folder / FILE).read_bytes()
    first = content.index(b"\n") + 1
    with reading(folder) as db:
        records, mark = chain.Records(db), Mark(first, hashlib.sha256(content[:first]).hexdigest())
        sealed = records.sealed(1)
        assert sealed is not None
        assert (
            sealed.record
            == hashlib.sha256(records.record(chain.Row(1, mark.bytes, mark.sha256, None, None))).hexdigest()
        )
    path.write_bytes(content[:first])
    found = checked(folder)
    assert "when round 2 was written" in found.problem
    assert found.ledger
    # A last line that is torn is no charge.
    ahead = Charge("DS>LD", 5, "update", Release(4.0), ("a",)).line().encode() + b"\n" + b'{"federation": "DS'
    path.write_bytes(content + ahead)
    assert checked(folder).problem == ""
    path.unlink()
    assert "is gone, and was there when round 1 was written" in checked(folder).problem
    # The salt is in the first head, and hides what that is the hash of.
    path.write_bytes(content)
    change(folder, "UPDATE info SET value = 'cd' WHERE key = 'salt'")
    assert "round 0 is not" in checked(folder).problem


def test_a_report_computes_the_chain_of_an_untouched_run_once_and_what_goes_on_from_it_always(
    cache: Path, folder: Path, looks: list[Path]
) -> None:
    first, again = chain_of(History(folder)), chain_of(History(folder))
    assert first == again
    assert (first.problem, first["round"], len(first["head"])) == ("", 2, 64)
    assert (looks, len(list(cache.iterdir()))) == ([folder], 1)
    assert History(folder).shown_chain == History(folder).chain == History(folder).chain
    assert looks == [folder] * 3
