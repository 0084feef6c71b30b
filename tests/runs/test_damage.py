"""Damaged and hostile runs: what is broken is named in one line, the checkpoint before is used, nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import CommandLine
from tests.kit import assert_refused, refusal
from tests.report.made_run import make_run
from tests.runs.contents import closed_again, query
from tests.runs.damaged_folders import run_cases
from tests.runs.records import add, begun, record, state, values
from tests.runs.signed_runs import TEXT

from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.experiment.loading import read_experiment
from steelyard.report.result import computed
from steelyard.report.verification import verify
from steelyard.rounds.state import Best, RoundState
from steelyard.runs.checkpoint import pack, write_tensors
from steelyard.runs.database import Damaged, Reader, bound, check_files, size_of_database, unbound
from steelyard.runs.export import export_run
from steelyard.runs.facts import RunFacts, checksum
from steelyard.runs.history import History, read_values
from steelyard.runs.schema import SCHEMA
from steelyard.runs.store import Store, add_values, tidy


def five_rounds(folder: Path) -> None:
    """A run that stopped after round 4: its checkpoints are those of rounds 3 and 4."""
    store = begun(folder)
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


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "run"
    five_rounds(folder)
    add_values(folder, {("DS>LD", 2): [values(2)]}, "replay")
    return folder


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


def beside(statement: str) -> Callable[[Path], None]:
    return lambda run: change(run, f"UPDATE checkpoints SET {statement} WHERE round = 4")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (
        lambda run: flip(file(run, 4)), "round-000004.safetensors: not the checkpoint that was written: its checksum"
    ),
    "a missing file": (lambda run: file(run, 4).unlink(), "not a readable checkpoint: No such file or directory"),
    "a file elsewhere": (beside("file = '../x'"), "'../x'"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run: Path, damage: str) -> None:
    harm, said = DAMAGE[damage]
    harm(run)
    found = resumed(run)
    assert (found.round, found.states["DS>LD"].parameters.tolist(), found.kept["own"].tolist()) == (3, [3.0], [3])
    (problem,) = found.problems
    assert said in problem
    for table in ("rounds", "checkpoints"):
        assert query(run, f"SELECT MAX(round) FROM {table}") == [(3,)]


def _states(**changes: object) -> str:
    _, text = pack({"DS>LD": state(4, 4.0)}, {})
    return json.dumps({"DS>LD": {**json.loads(text)["DS>LD"], **changes}})


STATES = {
    "no JSON": ("{", "Expecting property name"),
    "too deep": ("[" * 100_000, "nested too deeply"),
    "a round before the first": (_states(round=-3), "DS>LD.round"),
    "a field too many": (_states(more=1), "DS>LD.more"),
    "another model": (_states().replace("DS>LD", "LD"), "no model of 'LD'"),
}


@pytest.mark.parametrize("kind", STATES)
def test_states_of_another_make_are_named_even_where_changes_are_accepted(run: Path, kind: str) -> None:
    text, words = STATES[kind]
    with closing(sqlite3.connect(run / "run.sqlite")) as writer, writer:
        writer.execute("UPDATE checkpoints SET states = ? WHERE round = 4", (text,))
        writer.execute("DELETE FROM checkpoints WHERE round = 3")
    found = resumed(run, accept=True)
    assert (found.round, found.states) == (-1, {})
    assert any(words in problem for problem in found.problems)
    assert "\n" not in "".join(found.problems)


def test_without_a_sound_checkpoint_nothing_is_forgotten_unless_accepted(run: Path) -> None:
    for round in (3, 4):
        flip(file(run, round))
    assert_refused(lambda: History(run).last_checkpoint(), "round-000004")
    words = ("round-000004", "checksum differs; no other checkpoint is sound; allowed: the file")
    assert_refused(partial(resumed, run), *words)
    assert query(run, "SELECT MAX(round) FROM rounds") == [(4,)]
    # Accepted: what can be read is used, wrong checksum or not.
    assert resumed(run, accept=True).round == 4
    for round in (3, 4):
        file(run, round).write_text("nothing like tensors")
    begins = resumed(run, accept=True)
    assert (begins.round, begins.states) == (-1, {})
    assert query(run, "SELECT COUNT(*) FROM rounds") == [(0,)]


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Path]:
    """A run whose writer died: the folder as it is while the writer still holds it."""
    store = begun(tmp_path / "alive")
    for round in range(4):
        add(store, record(round=round))
        store.note(RunFacts(status=f"after {round}"))
    shutil.copytree(tmp_path / "alive", tmp_path / "killed")
    yield tmp_path / "killed"
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


@pytest.mark.parametrize(
    ("of", "changed"), [(4, state(4, 7.0)), (2, state(4, 4.0, best=Best(2, 0.5, torch.tensor([7.0]))))]
)
def test_a_checkpoint_with_another_model_than_its_rounds_is_not_gone_on_from_unless_accepted(
    run: Path, of: int, changed: RoundState
) -> None:
    """Its file and checksum fit together; the digest that the chain holds shows that the model is not the round's."""
    tensors, text = pack({"DS>LD": changed}, {"own": torch.tensor([4])})
    content = write_tensors(file(run, 4), tensors)
    with closing(sqlite3.connect(run / "run.sqlite")) as writer, writer:
        row = (text, len(content), checksum(content, text))
        writer.execute("UPDATE checkpoints SET states = ?, size = ?, checksum = ? WHERE round = 4", row)
    closed_again(run)
    said = f"the checkpoint's model of DS>LD is not the one that round {of} ended with"
    allowed = f"allowed: the folder as it was written, or `steelyard resume {run} --accept-changes`"
    assert refusal(resumed, run) == f"{run}: {said}; {allowed}"
    (run / "experiment.toml").write_text(TEXT)
    named = [finding for finding in verify(run).found.changed if "the model of DS>LD" in finding.what]
    assert [finding.round for finding in named] == [of]
    accepted = resumed(run, accept=True)
    assert (accepted.round, accepted.problems) == (4, (said,))
    assert [(round, model.tolist()) for round, model in accepted.states["DS>LD"].models][-1] == (of, [7.0])


def info(key: str, text: str) -> str:
    return f"INSERT OR REPLACE INTO info VALUES ('{key}', '{text}')"


def settings_of(text: str) -> str:
    return f"UPDATE federations SET settings = '{text}'"


def metrics(text: str) -> str:
    return f"UPDATE rounds SET server_metrics = '{text}'"


DEEP = "[" * 100_000


def test_the_rows_of_a_checkpoint_are_in_the_database_file_before_an_older_file_goes(killed: Path) -> None:
    for ending in ("-wal", "-shm"):
        (killed / f"run.sqlite{ending}").unlink()
    named = {name for (name,) in query(killed, "SELECT file FROM checkpoints")}
    assert named <= {path.name for path in (killed / "checkpoints").iterdir()}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_is_one_line_and_the_rounds_before_stay(
    run: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = begun(run)

    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    def fifth() -> None:
        add(store, record(round=5))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        assert_refused(fifth, f"round 5 cannot be written: {os.strerror(code)}; rounds written before are")
    assert store.resume().round == 4
    fifth()
    store.close()
    assert History(run).last_round == 5


@pytest.mark.parametrize("page", range(2, 14))
def test_a_page_of_garbage_is_named_and_never_continued_from(run: Path, page: int) -> None:
    content = bytearray((run / "run.sqlite").read_bytes())
    if len(content) < page * 4096:
        pytest.skip("the database has fewer pages")
    content[(page - 1) * 4096 : page * 4096] = b"\xa5" * 4096
    (run / "run.sqlite").write_bytes(bytes(content))
    with pytest.raises(UserError, match=r"run\.sqlite: (damaged|not a readable run database): \S"):
        resumed(run)
    said = ""
    try:
        export_run(History(run), "csv", run / "out")
    except UserError as error:
        said = str(error)
    assert not said or "cannot be read" in said or "not a readable run database" in said


class Refusing(Reader):
    """What SQLite opens where it may not make the side files."""

    def execute(self, *given: Any) -> Any:
        raise sqlite3.OperationalError("unable to open database file")


def test_a_run_is_read_where_nothing_can_be_made(run: Path, killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only medium, also where nothing may be mounted."""
    real = sqlite3.connect

    def opened(name: Any, **options: Any) -> sqlite3.Connection:
        return real(name, **options | ({"factory": Refusing} if str(name).endswith("mode=ro") else {}))

    monkeypatch.setattr(sqlite3, "connect", opened)
    assert [History(folder).last_round for folder in (run, killed)] == [4, 3]


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


SAMPLE = 8


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "run", rounds=3, clients=4, seeds=(0,), rules=("fedavg",))


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """A folder with two runs, of which `bad` is going to be changed."""
    for name in ("good", "bad"):
        shutil.copytree(made, tmp_path / "runs" / name)
    return tmp_path / "runs"


def change(folder: Path, *statements: str) -> None:
    with sqlite3.connect(folder / "run.sqlite") as writer:
        for statement in statements:
            writer.execute(statement)
    writer.close()


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS round, 1 AS federation FROM n"


def test_damaged_folders_give_one_line() -> None:
    assert run_cases(SAMPLE, every=80) == []


def reader(*statements: str, size: int = 1 << 20) -> Reader:
    made = sqlite3.connect(":memory:", factory=Reader)
    made.executescript(SCHEMA)
    for statement in statements:
        made.execute(statement)
    made.size = size
    return made


def test_federations_are_given_by_number_in_order() -> None:
    insert = "INSERT INTO federations (id, name, rule, seed, settings, algorithm) VALUES"
    made = reader(
        f"""{insert} (9, 'x', 'DS', 4, '{{"criteria": ["DS"]}}', 'fedavg')""",
        f"""{insert} (2, 'y', 'LD', 4, '{{"criteria": ["LD"]}}', 'fedavg')""",
    )
    assert list(made.federations().items()) == [(2, ("LD", 4)), (9, ("DS", 4))]
    made.execute("UPDATE federations SET rule = 'DS'")
    with pytest.raises(Damaged, match=r"^federations: a rule and a seed come twice$"):
        made.federations()


def test_a_table_cannot_hold_more_than_its_file() -> None:
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100) "
    made = reader(many + "INSERT INTO clients SELECT i, 'c' || i FROM n", size=400)
    assert len(made.rows("clients", ("id", "name"))) == 100
    made.size = 399
    with pytest.raises(Damaged, match=r"^clients holds more than its file does$"):
        made.rows("clients", ("id",))
    made.size = 400
    made.execute("UPDATE clients SET name = name || ' is long'")
    with pytest.raises(Damaged, match=r"^clients holds more than its file does$"):
        made.rows("clients", ("id", "name"))
    assert made.rows("clients", ("id",), "WHERE id > ? ORDER BY id DESC", 98) == [(100,), (99,)]


def test_a_question_is_bounded_before_the_first_is_asked() -> None:
    connection = sqlite3.connect(":memory:")
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


TWICE = "criteria and priority do not fit"
HARM: tuple[tuple[str, str, str], ...] = (
    ("UPDATE rounds SET accuracy = 'abc'", "rounds", "rounds, accuracy: 'abc' is no number"),
    ("UPDATE rounds SET accuracy = 2e200", "rounds", "rounds, accuracy: holds a number beyond 1e+200"),
    ("UPDATE rounds SET round = 1000000000001 WHERE round = 4", "rounds", "rounds, round: 1000000000001 is no whole"),
    ("UPDATE federations SET rule = x'00'", "rounds", "federations, rule: b'\\x00' is no text"),
    ("DELETE FROM clients WHERE name = 'a'", "clients", "client number 1 has no name"),
    (metrics('{"f1": 0.5}'), "rounds", "rounds, server_metrics: Value error, f1 is of another kind"),
    (metrics('{"f1": [0.5, -1e201]}'), "rounds", "f1 is beyond 1e+200"),
    (info("flaws", DEEP), "flaws", "info, flaws holds no JSON"),
    (info("labels", '{"1": {"a": ["x"]}}'), "labels", "info, labels: 1.a.0: Input should be a valid integer"),
    (info("personal", "7"), "personal", "info, personal: "),
    (settings_of('{"criteria": ["DS"], "priority": "DS>LD"}'), "clients", TWICE),
    ("UPDATE updates SET listening = x'0011' WHERE round = 1", "listening", "listening of "),
    ("UPDATE updates SET weight = x'00'", "clients", "updates of DS>LD, seed 0: a stored column has another length"),
    ("UPDATE updates SET clients = x'6300000064000000' WHERE round = 1", "clients", "client number 99"),
    ("UPDATE updates SET samples = 'abc'", "clients", "updates, samples: 'abc' is no column of numbers"),
    ("UPDATE updates SET samples = x'00000000000000ff00000000000000ff'", "clients", "a number below zero"),
    ("UPDATE updates SET weight = x'000000000000f07f000000000000f07f'", "clients", "one that is not finite"),
    ("UPDATE evaluations SET score = x'00'", "scores", "evaluations of DS>LD, seed 0: a stored column has another"),
    ("INSERT INTO samples VALUES (1, 4, x'00', 9)", "hits", "samples of DS>LD, seed 0: not the bits of their count"),
    ("UPDATE contributions SET sizes = zeroblob(length(sizes))", "values", "contributions of round 2: no test rows"),
    ("UPDATE contributions SET added = x'00'", "values", "contributions of round 2: "),
    ("UPDATE contributions SET federation = 77", "values", "federation"),
    ("DROP TABLE untested", "opened", "the table 'untested' is missing"),
    ("ALTER TABLE clients ADD COLUMN more TEXT", "opened", "the table 'clients' is not one of a run's"),
    ("UPDATE chain SET ledger = x'00'", "store", "cannot be read: chain, ledger: b'\\x00' is no text"),
    (
        "CREATE TRIGGER t AFTER INSERT ON info BEGIN DELETE FROM rounds; END",
        "store",
        "the trigger 't' is not one of a run's database",
    ),
    ("DELETE FROM rounds WHERE round = 2", "resume", "round 2 is not as it was written"),
)
"""What was done to a run's database, what is asked of it then, and what is said."""


def resumed(folder: Path, *, accept: bool = False) -> Any:
    store = Store(folder)
    try:
        return store.resume(accept=accept)
    finally:
        store.close()


ASKED: dict[str, Callable[[Path], object]] = {
    **{
        name: lambda run, name=name: getattr(History(run), name)
        for name in ("rounds", "clients", "evaluations", "flaws")
    },
    **{name: lambda run, name=name: getattr(History(run), name) for name in ("personal", "listening")},
    "scores": lambda run: History(run).scores("DS>LD", 0),
    "hits": lambda run: History(run).hits("DS>LD", 0),
    "labels": lambda run: History(run).labels(1),
    "values": read_values,
    "opened": History,
    "store": Store,
    "resume": resumed,
}


@pytest.mark.parametrize(("statement", "asked", "words"), HARM, ids=lambda each: each[:50])
def test_what_does_not_belong_in_a_database_is_one_line_that_names_it(
    run: Path, statement: str, asked: str, words: str
) -> None:
    with closing(sqlite3.connect(run / "run.sqlite")) as writer:
        writer.executescript(statement)
        rows = writer.execute("SELECT COUNT(*) FROM rounds").fetchone()
    assert_refused(partial(ASKED[asked], run), run, words)
    with closing(sqlite3.connect(run / "run.sqlite")) as reader:  # nothing was forgotten, and no trigger ran
        assert reader.execute("SELECT COUNT(*) FROM rounds").fetchone() == rows


def test_a_comment_in_a_table_may_be_of_another_version(run: Path) -> None:
    renamed = "UPDATE sqlite_master SET sql = replace(sql, 'runs/chain.py', 'runs/marks.py') WHERE name = 'digests'"
    change(run, "PRAGMA writable_schema=1", renamed)
    assert "runs/marks.py" in query(run, "SELECT sql FROM sqlite_master WHERE name = 'digests'")[0][0]
    assert History(run).last_round == 4


def test_a_figure_that_is_not_finite_is_unknown_and_the_largest_ones_stay(run: Path) -> None:
    for round, value in ((0, "9e999"), (1, "-9e999"), (2, "1e200"), (3, "-1e200")):
        change(run, f"UPDATE rounds SET accuracy = {value} WHERE round = {round}")
    change(run, "UPDATE rounds SET round = 1000000000000 WHERE round = 4")
    change(run, "UPDATE federations SET seed = 9223372036854775807")
    change(run, settings_of('{"criteria": ["DS", "LD"], "priority": "LD > DS", "more": 1}'))
    found = History(run).rounds
    assert found["accuracy"].fillna(0).tolist() == [0, 0, 1e200, -1e200, 0.625]
    assert found["round"].tolist() == [0, 1, 2, 3, 10**12]
    assert set(found["seed"]) == {2**63 - 1}


def test_a_bad_run_is_one_line_in_every_list_and_for_every_command(
    runs: Path, command: CommandLine, refused: Callable[..., str]
) -> None:
    why = "the view 'rounds' is not one of a run's"
    change(runs / "bad", "DROP TABLE rounds", f"CREATE VIEW rounds AS {ENDLESS}")
    for words in (("ls", runs), ("top", runs, "--once")):
        done = command(*words)
        assert (done.returncode, done.stderr) == (0, "")
        (line,) = [line for line in done.stdout.splitlines() if "cannot be read" in line]
        assert f"bad: cannot be read: {why}" in line
        assert "finished" in done.stdout
    for word in ("table", "report", "export"):
        assert why in refused(word, runs / "bad")


def test_what_a_run_names_neither_reaches_the_terminal_nor_is_a_formula(runs: Path, command: CommandLine) -> None:
    """Neither the old control characters nor the newer ones, which terminals take for the same."""
    odd = "=red\x1b[31m\x9b2J\x07"
    change(
        runs / "bad",
        f"UPDATE federations SET rule = '{odd}', name = '{odd}'",
        f"UPDATE clients SET name = name || '{odd}'",
    )
    for more in ((), ("--format", "csv"), ("--curves", "c.csv")):
        done = command("table", runs / "bad", *more)
        assert done.returncode == 0, done.stderr
        assert "red" in done.stdout
        assert done.stdout.replace("\n", "").isprintable()
        assert (",'=red" in done.stdout) == ("csv" in more)
    assert "\n'=red" in (runs.parent / "c.csv").read_text(encoding="utf-8")
    change(runs / "bad", "UPDATE federations SET rule = char(9) || '=1+1'")
    assert "\n'\\t=1+1," in export_run(History(runs / "bad"), "csv")[1].read_text(encoding="utf-8")


def test_rounds_that_do_not_fit_together_are_one_line(runs: Path, refused: Callable[..., str]) -> None:
    bad = runs / "bad"
    change(bad, "DELETE FROM evaluations WHERE round = 2")
    assert "fedavg, seed 0: 3 rounds with an accuracy and 2 with evaluations" in refused("table", bad)
    change(bad, *(f"DELETE FROM {table}" for table in ("federations", "chain", "digests", "checkpoints")))
    assert_refused(lambda: computed(bad, read_experiment(bad)), "it names no rule")


def test_a_journal_names_no_other_file_and_may_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, journal = tmp_path / "run.sqlite", tmp_path / "run.sqlite-journal"
    assert not check_files(path, write=True)
    path.touch()
    journal.write_bytes(b"\0" * 20)
    assert check_files(path, write=True)
    journal.write_bytes(b"\0" * 20 + bytes.fromhex("d9d505f920a163d7"))
    assert_refused(lambda: check_files(path, write=False), f"{journal}: names another file", "as the run wrote it")
    journal.write_bytes(b"\0" * 20)
    read = files.read_bytes

    def vanish(path: Path) -> bytes:
        path.unlink()
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "read_bytes", vanish)
        assert check_files(path, write=False)
    assert not journal.exists()
    # What is written has one name, and what is read may have two.
    (tmp_path / "second").hardlink_to(path)
    assert check_files(path, write=False)
    assert_refused(lambda: check_files(path, write=True), "has 2 names")


def test_a_run_at_rest_is_one_database_file_whatever_the_folders_name(tmp_path: Path) -> None:
    run = tmp_path / "what? 100% #1"
    five_rounds(run)
    assert len(History(run).clients) == 15
    assert [path.name for path in run.glob("run.sqlite*")] == ["run.sqlite"]
