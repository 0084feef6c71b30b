"""Damage to a stored run: what is broken is named in one line, the checkpoint before is used, nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.runs.contents import query
from tests.runs.records import federation, record, state

from steelyard.errors import UserError
from steelyard.runs.checkpoint import checksum, pack
from steelyard.runs.export import export_run
from steelyard.runs.reader import History
from steelyard.runs.store import Store, tidy
from steelyard.runs.tensor_files import write_tensors


def five_rounds(folder: Path) -> None:
    """A run that stopped after round 4: its checkpoints are those of rounds 3 and 4."""
    store = Store(folder)
    store.register([federation()])
    for round in range(5):
        own = {"own": torch.tensor([round])}
        store.commit(
            round, [record(round=round)], {"DS>LD": state(round, float(round))}, lambda own=own: own, last=False
        )
    store.close()


def file(folder: Path, round: int) -> Path:
    return folder / "checkpoints" / f"round-{round:06d}.safetensors"


def flip(path: Path, position: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    five_rounds(tmp_path / "run")
    return tmp_path / "run"


DAMAGE = {
    "a flipped bit": (flip, "round-000004.safetensors: not the checkpoint that was written: its checksum differs"),
    "a file cut off": (lambda path: path.write_bytes(path.read_bytes()[:50]), "its checksum differs"),
    "a missing file": (Path.unlink, "not a readable checkpoint: No such file or directory"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run: Path, damage: str) -> None:
    harm, said = DAMAGE[damage]
    harm(file(run, 4))
    store = Store(run)
    found = store.resume()
    store.close()
    assert (found.round, found.states["DS>LD"].parameters.tolist(), found.kept["own"].tolist()) == (3, [3.0], [3])
    assert len(found.problems) == 1
    assert said in found.problems[0]
    assert query(run, "SELECT MAX(round) FROM rounds") == [(3,)]
    assert query(run, "SELECT round FROM checkpoints") == [(3,)]


@pytest.mark.parametrize("statement", ["states = '{'", "states = '{\"DS>LD\": 3}'", "checksum = 'x'", "file = '../x'"])
def test_garbage_beside_a_checkpoint_is_damage_too(run: Path, statement: str) -> None:
    with sqlite3.connect(run / "run.sqlite") as writer:
        writer.execute(f"UPDATE checkpoints SET {statement} WHERE round = 4")
    writer.close()
    store = Store(run)
    assert store.resume().round == 3
    store.close()
    flip(file(run, 3))
    with pytest.raises(UserError, match="round-000003"):
        History(run).last_checkpoint()


def _states(**changes: object) -> str:
    _, text = pack({"DS>LD": state(4, 4.0)}, {})
    return json.dumps({"DS>LD": {**json.loads(text)["DS>LD"], **changes}})


STATES = {
    "no JSON": ("{", "Expecting property name"),
    "too deep": ("[" * 100_000, "nested too deeply"),
    "a list": ("[]", "valid dictionary"),
    "nothing of a state": ('{"DS>LD": {}}', "DS>LD.round: Field required"),
    "a round that is a word": (_states(round="x"), "DS>LD.round"),
    "a round before the first": (_states(round=-3), "DS>LD.round"),
    "a field too many": (_states(more=1), "DS>LD.more"),
    "an order of words": (_states(orders={"order": ["DS"], "reference": 0.5}), "DS>LD.orders.order.0"),
    "a loss without a name": (_states(loss={"name": None}), "DS>LD.loss.name"),
    "another model": (_states().replace("DS>LD", "LD"), "no model of 'LD'"),
}


@pytest.mark.parametrize("kind", STATES)
def test_states_of_another_make_are_named_even_where_changes_are_accepted(run: Path, kind: str) -> None:
    text, words = STATES[kind]
    with sqlite3.connect(run / "run.sqlite") as writer:
        writer.execute("UPDATE checkpoints SET states = ? WHERE round = 4", (text,))
        writer.execute("DELETE FROM checkpoints WHERE round = 3")
    writer.close()
    store = Store(run)
    found = store.resume(accept=True)
    store.close()
    assert (found.round, found.states) == (-1, {})
    assert words in found.problems[-1]
    assert "\n" not in found.problems[-1]


def test_without_a_sound_checkpoint_nothing_is_forgotten_unless_accepted(run: Path) -> None:
    for round in (3, 4):
        flip(file(run, round))
    store = Store(run)
    with pytest.raises(
        UserError, match=r"round-000004.*checksum differs; no other checkpoint is sound; allowed: the file"
    ):
        store.resume()
    assert query(run, "SELECT MAX(round) FROM rounds") == [(4,)]
    # Accepted: what can be read is used, wrong checksum or not.
    assert store.resume(accept=True).round == 4
    for round in (3, 4):
        file(run, round).write_text("nothing like tensors")
    begins = store.resume(accept=True)
    assert (begins.round, begins.states) == (-1, {})
    assert query(run, "SELECT COUNT(*) FROM rounds") == [(0,)]
    store.close()


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Path]:
    """A run whose writer died: the folder as it is while the writer still holds it."""
    store = Store(tmp_path / "alive")
    store.register([federation()])
    for round in range(4):
        store.commit(round, [record(round=round)], {"DS>LD": state(round, float(round))}, dict, last=False)
        store.note(status=f"after {round}")
    shutil.copytree(tmp_path / "alive", tmp_path / "run")
    yield tmp_path / "run"
    store.close()


@pytest.mark.parametrize("left", [0.0, 0.3, 0.5, 0.9, None])
def test_a_log_that_lost_its_tail_leaves_a_run_that_goes_on(killed: Path, left: float | None) -> None:
    """A power cut may take any part of what was not flushed; the database must never name files that are gone."""
    log = killed / "run.sqlite-wal"
    assert log.stat().st_size > 0
    if left is None:
        log.unlink()
        (killed / "run.sqlite-shm").unlink()
    else:
        os.truncate(log, int(left * log.stat().st_size))
    store = Store(killed)
    found = store.resume()
    assert found.problems == ()
    assert found.round >= 2
    assert query(killed, "SELECT MAX(round) FROM rounds") == [(found.round,)]
    store.close()


def test_a_log_shortened_below_what_was_flushed_is_never_continued_from(tmp_path: Path) -> None:
    """No power cut does it, but a bad copy may: old pages in the log then hide newer ones of the database."""
    store = Store(tmp_path / "alive", checkpoint_every=3)
    store.register([federation()])
    for round in range(4):
        store.commit(round, [record(round=round)], {"DS>LD": state(round, float(round))}, dict, last=False)
    size = (tmp_path / "alive" / "run.sqlite-wal").stat().st_size
    refused = 0
    for length in range(32, size, 4096 + 24):
        run = tmp_path / f"run-{length}"
        shutil.copytree(tmp_path / "alive", run)
        (run / "run.sqlite-shm").unlink()
        os.truncate(run / "run.sqlite-wal", length)
        copy = Store(run)
        try:
            found = copy.resume().round
        except UserError:
            refused += 1
        else:
            assert query(run, "SELECT round FROM rounds ORDER BY round") == [(round,) for round in range(found + 1)]
        copy.close()
    store.close()
    assert refused


def test_a_checkpoint_with_another_model_than_its_rounds_is_not_gone_on_from_unless_accepted(run: Path) -> None:
    """Its file and checksum fit together; the digest that the chain holds shows that the model is not the round's."""
    tensors, text = pack({"DS>LD": state(4, 7.0)}, {"own": torch.tensor([4])})
    wanted = checksum(write_tensors(file(run, 4), tensors), text)
    with sqlite3.connect(run / "run.sqlite") as writer:
        writer.execute("UPDATE checkpoints SET states = ?, checksum = ? WHERE round = 4", (text, wanted))
    writer.close()
    said = "the checkpoint's model of DS>LD is not the one that round 4 ended with"
    store = Store(run)
    with pytest.raises(UserError) as found:
        store.resume()
    assert str(found.value) == (
        f"{run}: {said}; allowed: the folder as it was written, or `steelyard resume {run} --accept-changes`"
    )
    accepted = store.resume(accept=True)
    assert (accepted.round, accepted.problems) == (4, (said,))
    assert accepted.states["DS>LD"].parameters.tolist() == [7.0]
    store.close()


def test_a_store_that_keeps_no_models_asks_for_none(tmp_path: Path) -> None:
    store = Store(tmp_path, keep_models=False)
    store.register([federation()])
    store.commit(0, [record(round=0)], {"DS>LD": state(0, 5.0)}, dict, last=False)
    found = store.resume()
    store.close()
    assert (found.round, found.problems, found.states["DS>LD"].parameters.tolist()) == (0, (), [])


def test_missing_rounds_are_damage_unless_accepted(run: Path) -> None:
    connection = sqlite3.connect(run / "run.sqlite")
    with connection:
        connection.execute("DELETE FROM rounds WHERE round = 2")
    connection.close()
    store = Store(run)
    with pytest.raises(UserError, match=r"run\.sqlite: damaged: 4 rounds of DS>LD, where its checkpoint follows 5"):
        store.resume()
    assert query(run, "SELECT COUNT(*) FROM rounds") == [(4,)]
    assert store.resume(accept=True).round == 4
    store.close()


DEEP = "[" * 100_000
GARBAGE = {
    "info no JSON": ("INSERT INTO info VALUES ('flaws', '{')", "flaws", "info, flaws holds no JSON"),
    "info too deep": (f"INSERT INTO info VALUES ('flaws', '{DEEP}')", "flaws", "info, flaws holds no JSON"),
    "info a list": ("INSERT INTO info VALUES ('flaws', '[1]')", "flaws", "info, flaws: "),
    "info no names": ("INSERT OR REPLACE INTO info VALUES ('personal', '7')", "personal", "info, personal: "),
    "listening too short": (
        "UPDATE updates SET listening = x'0011' WHERE round = 1",
        "listening",
        "listening of ",
    ),
    "info another seed": ("INSERT INTO info VALUES ('flaws', '{\"x\": {\"a\": [1]}}')", "flaws", "info, flaws: "),
    "settings": (
        "UPDATE federations SET settings = '{}'",
        "clients",
        "federations, settings: criteria: Field",
    ),
    "settings a number": ("UPDATE federations SET settings = '3'", "clients", "federations, settings: Input should be"),
    "metrics": (
        "UPDATE evaluations SET metrics = '3'",
        "evaluations",
        "evaluations, metrics: Input should be ",
    ),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_in_stored_text_is_named_with_its_table(run: Path, kind: str) -> None:
    statement, table, words = GARBAGE[kind]
    with sqlite3.connect(run / "run.sqlite") as writer:
        writer.execute(statement)
    writer.close()
    with pytest.raises(UserError, match=rf"^{run}: the run's database cannot be read: {words}"):
        getattr(History(run), table)


@pytest.mark.parametrize(("bits", "count"), [("text", 3), (b"\0", 9), (b"\0", -1), (b"\0", "x")])
def test_samples_that_are_no_bits_are_named(run: Path, bits: object, count: object) -> None:
    with sqlite3.connect(run / "run.sqlite") as writer:
        writer.execute("INSERT OR REPLACE INTO samples VALUES (1, 4, ?, ?)", (bits, count))
    writer.close()
    with pytest.raises(UserError, match=r"samples(, | of DS>LD, seed 0: )(hits|count|not the bits of their count)"):
        History(run).hits("DS>LD", 0)


def test_the_rows_of_a_checkpoint_are_in_the_database_file_before_an_older_file_goes(killed: Path) -> None:
    for ending in ("-wal", "-shm"):
        (killed / f"run.sqlite{ending}").unlink()
    named = {name for (name,) in query(killed, "SELECT file FROM checkpoints")}
    assert named <= {path.name for path in (killed / "checkpoints").iterdir()}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_one_line_and_the_rounds_before_stay(
    run: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = Store(run)
    store.register([federation()])

    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(
            UserError, match=f"round 5 cannot be written: {os.strerror(code)}; rounds written before are"
        ):
            store.commit(5, [record(round=5)], {"DS>LD": state(5)}, dict, last=False)
    assert store.resume().round == 4
    store.commit(5, [record(round=5)], {"DS>LD": state(5)}, dict, last=False)
    store.close()
    assert History(run).last_round == 5


def test_a_database_that_is_full_is_one_line(run: Path) -> None:
    store = Store(run)
    store.register([federation()])
    ((pages,),) = store._db.execute("PRAGMA page_count").fetchall()
    store._db.execute(f"PRAGMA max_page_count={pages}")
    written: list[int] = []

    def fill() -> None:
        for round in range(5, 500):
            store.commit(round, [record(round=round)], {"DS>LD": state(round)}, dict, last=False)
            written.append(round)

    with pytest.raises(UserError, match=r"cannot be written: database or disk is full; .*goes on once that is mended"):
        fill()
    assert store.resume().round == max(written, default=4)
    store.close()


@pytest.mark.parametrize("page", range(2, 14))
def test_a_page_of_garbage_is_named_and_never_continued_from(run: Path, page: int) -> None:
    path = run / "run.sqlite"
    content = bytearray(path.read_bytes())
    if len(content) < page * 4096:
        pytest.skip("the database has fewer pages")
    content[(page - 1) * 4096 : page * 4096] = b"\xa5" * 4096
    path.write_bytes(bytes(content))

    def each() -> None:
        store = Store(run)
        try:
            store.resume()
        finally:
            store.close()

    with pytest.raises(UserError, match=r"run\.sqlite: (damaged|not a readable run database): \S"):
        each()
    said = ""
    try:
        export_run(run, "csv", run / "out")
    except UserError as error:
        said = str(error)
    assert not said or "cannot be read" in said or "not a readable run database" in said


def read_only(folder: Path) -> Iterator[Path]:
    """The folder as on a read-only medium: mounted over itself, which only root may do."""
    for command in (["mount", "--bind", folder, folder], ["mount", "-o", "remount,ro,bind", folder]):
        if subprocess.run(command, capture_output=True, check=False).returncode:
            subprocess.run(["umount", folder], capture_output=True, check=False)
            pytest.skip("mounting is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("how", ["at rest", "killed", "killed without a log"])
def test_a_run_on_a_read_only_medium_is_read(killed: Path, how: str) -> None:
    if how == "at rest":
        killed = killed.parent / "rest"
        five_rounds(killed)
    if how == "killed without a log":
        for ending in ("-wal", "-shm"):
            (killed / f"run.sqlite{ending}").unlink()
    if how == "killed":
        (killed / "run.sqlite-shm").unlink()
    before = sorted(path.name for path in killed.iterdir())
    for folder in read_only(killed):
        history = History(folder)
        assert history.last_round == (4 if how == "at rest" else 3)
        assert len(history.clients) > 0
        with pytest.raises(UserError, match="cannot be written: Read-only file system; allowed: a writable folder"):
            Store(folder)
        with pytest.raises(UserError, match="Read-only file system"):
            export_run(folder, "csv")
    assert sorted(path.name for path in killed.iterdir()) == before


def test_a_run_at_rest_is_one_database_file_and_reading_leaves_it_so(run: Path) -> None:
    assert [path.name for path in run.glob("run.sqlite*")] == ["run.sqlite"]
    assert len(History(run).clients) == 15
    assert [path.name for path in run.glob("run.sqlite*")] == ["run.sqlite"]


def test_a_folder_with_marks_in_its_name_is_read(tmp_path: Path) -> None:
    five_rounds(tmp_path / "what? 100% #1")
    assert History(tmp_path / "what? 100% #1").last_round == 4


def test_a_run_killed_at_its_very_end_is_tidied(run: Path) -> None:
    """The end is noted and the older checkpoint is not named any more, but its file and the log are still there."""
    left = file(run, 3).read_bytes()
    store = Store(run)
    store.finish()
    shutil.copytree(run, run.parent / "killed")
    store.close()
    killed = run.parent / "killed"
    file(killed, 3).write_bytes(left)
    assert (killed / "run.sqlite-wal").exists()
    tidy(killed)
    assert sorted(path.name for path in killed.iterdir()) == ["checkpoints", "lock", "run.sqlite"]
    assert [path.name for path in (killed / "checkpoints").iterdir()] == ["round-000004.safetensors"]
    assert History(killed).info["status"] == "finished"
